"""edgespec simulate: policies on a ring in virtual time; the options of such a ring."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import typer

from edgespec.bench.load import Load
from edgespec.bench.report import (
    COLUMNS,
    LOAD_COLUMNS,
    REFERENCE,
    RIVAL,
    Run,
    as_json,
    cells,
)
from edgespec.bench.setup import Setup, answerable
from edgespec.bench.simulated import chosen_policies
from edgespec.bench.simulated import simulate as run_policies
from edgespec.bench.workloads import DEFAULT_WORKLOAD, Prompt, default_prompts, read_prompts
from edgespec.cli import options
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.cli.tables import show_table
from edgespec.config import DTYPES, HEAD_ON_COORDINATOR
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.precision import AUTO
from edgespec.daemon.profiles import profile_named, ring_of, unproven
from edgespec.daemon.settings import LAST_STAGE, chosen_draft
from edgespec.door.asking import GREEDY, SamplingOptions
from edgespec.door.simulation import DEFAULT_PROFILE, charged_model
from edgespec.drafting.choice import parse_draft
from edgespec.drafting.own import say_measured
from edgespec.errors import ConfigError
from edgespec.model.hub import require_model
from edgespec.planning.profile import DATA_SHEET, RowPrice
from edgespec.sim.durations import Jitter
from edgespec.sim.links import LinkSpec


@dataclass(frozen=True)
class SimulatedRing:
    """Options of a ring in virtual time, which `simulate` and `replay` have."""

    profile: list[str] | None = typer.Option(
        None,
        metavar="PROFILE[,PROFILE...]",
        help="The devices, by name or file: one for all, or those of D0, V1, ... VN, separated by "
        f"commas or given one by one. Default: {DEFAULT_PROFILE}.",
    )
    cost_model: str = typer.Option(
        "",
        help="The model whose costs are charged: a name, or a folder or file, whose sizes are "
        "taken, with those of the draft. Default: the one that the profile was fitted with, or "
        "llama-2-13b.",
    )
    head_quant: str = typer.Option(
        AUTO,
        help="How the coordinator is charged for output heads, the base's and the draft's: as "
        "`edgespec serve` holds them with this option; none: in 16 bit, as published systems do.",
    )
    stages: int = typer.Option(4, help="Number of stages in the ring.")
    with_stage: int | None = options.WITH_STAGE
    head: str = typer.Option(
        HEAD_ON_COORDINATOR, help="Where the output head is: coordinator, or last-stage."
    )
    link: str = typer.Option(
        "",
        metavar="LATENCY_MS:MBIT[:JITTER_MS[:LOSS]]",
        help="Every link of the ring, instead of the profiles' own; MBIT 0: no limit.",
    )
    row_price: str = typer.Option(
        "",
        metavar=f"F|{DATA_SHEET}",
        help="Each further row of a pass costs F of a step of one row, on every device, whatever "
        "the profile's tables say, but never more in all than a prompt's chunk of 64 rows; "
        f"{DATA_SHEET}: the least that its arithmetic allows. Default: as the profile has it, for "
        "boards 0.04, which is what published figures give.",
    )
    d0_free: bool = typer.Option(
        False,
        "--d0-free",
        help="Head, choosing, ranking and drafts take D0 no time: what the ring alone could do.",
    )
    loop_free: bool = typer.Option(
        False,
        "--loop-free",
        help="The coordinator's own loop, which is Python, takes no time.",
    )
    jitter: str = typer.Option(
        "",
        metavar="KIND",
        help="Noise, by --seed: 1%x100ms: of each hundred jobs of the stages and of D0 one takes "
        "100 ms more; exp5ms: each takes an exponential time of that mean more.",
    )
    model: str = options.MODEL
    draft: str = options.DRAFT
    dtype: options.Dtype = "float64"

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the profiles of D0, V1 … VN (see ring_of)."""
        return ring_of(split_names(self.profile or [DEFAULT_PROFILE]), self.stages)

    def setup(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingOptions,
        load: Load | None,
        notes: Notes,
    ) -> Setup:
        """What is played of it. Raises ConfigError, before torch is imported for what is found
        most often."""
        base, chosen = self.model or bundled("base"), chosen_draft(self.draft, self.model)
        say_measured(chosen, notes.say)
        if self.dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {self.dtype!r}; choose one of: {', '.join(DTYPES)}")
        for model in (base, *chosen.folders):
            require_model(model)
        draft = str(chosen)
        profiles = tuple(map(cache(profile_named), self.names))
        return Setup(
            model=base,
            draft=draft,
            dtype=self.dtype,
            profiles=profiles,
            cost_model=charged_model(self.cost_model, profiles, draft, self.head_quant),
            link=parse_link(self.link) if self.link else None,
            prompts=tuple(answerable(base, prompts, notes.say)),
            max_new_tokens=sampling.max_new_tokens,
            sampling=sampling.sampling,
            row_price=_price(self.row_price),
            d0_free=self.d0_free,
            loop_free=self.loop_free,
            jitter=Jitter.parse(self.jitter) if self.jitter else None,
            with_stage=self.stages if self.with_stage == LAST_STAGE else self.with_stage or 0,
            head=self.head,
            load=load,
        )


USUAL_RING = SimulatedRing()


@options.grouped
def simulate(
    ring: SimulatedRing = USUAL_RING,
    policy: str = options.POLICIES,
    prompts: str = options.PROMPTS,
    limit: int = options.LIMIT,
    live: int | None = options.LIVE,
    arrivals: float | None = typer.Option(
        None,
        metavar="RATE",
        help="Instead of --live: so many requests come a second, at random times, whether those "
        "before them are answered or not.",
    ),
    sampling: SamplingOptions = GREEDY,
    jobs: int = options.JOBS,
    as_json_object: bool = options.JSON,
) -> None:
    """Play policies on a simulated ring, with real tokens and charged times, side by side.

    A pair of models computes the tokens; how long it takes is what the devices of the profiles
    would have needed for a published model. The same command gives the same figures everywhere.
    """
    load = None if live is None and arrivals is None else Load(live, arrivals)
    policies = chosen_policies(split_names([policy]), str(chosen_draft(ring.draft, ring.model)))
    workload = read_prompts(prompts, limit) if prompts else default_prompts(limit)
    notes = Notes()
    setup = ring.setup(workload, sampling, load, notes)
    if load is not None:
        load.check_prompts(len(setup.prompts), notes.say)
    with notes.waiting("loading the models") as waiting:
        left = TimeLeft()
        runs = run_policies(
            setup, policies, jobs, lambda done, of: waiting(f"{done}/{of} answers{left(done, of)}")
        )
    if as_json_object:
        settings = {
            **setup.settings(),
            "policies": list(policies),
            "profiles": list(ring.names),
            "model": ring.model or options.BUNDLED,
            "draft": ring.draft or (options.BUNDLED if setup.draft else ""),
            "workload": prompts or DEFAULT_WORKLOAD,
        }
        print(json.dumps(as_json(runs, settings)))
    else:
        _show(runs, setup, ring.names)
    if not all(run.exact for run in runs):
        notes.say(f"some answers are not those of {REFERENCE}: a fault, whatever the dtype")


# --- settings -----------------------------------------------------------------------------------


def split_names(values: Sequence[str]) -> list[str]:
    """The names in comma-separated lists, in order."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def parse_link(text: str) -> LinkSpec:
    """LATENCY_MS:MBIT[:JITTER_MS[:LOSS]]; MBIT 0: no limit. Raises ConfigError for other texts."""
    parts = text.split(":")
    try:
        figures = [float(part) for part in parts]
    except ValueError:
        figures = []
    if not 2 <= len(figures) <= 4 or not all(math.isfinite(figure) for figure in figures):
        raise ConfigError(
            f"{text!r} is no link; give LATENCY_MS:MBIT[:JITTER_MS[:LOSS]], such as 0.3:1000 or "
            "5:100:2:0.01"
        )
    latency, mbit, jitter, loss = (*figures, 0.0, 0.0)[:4]
    if min(figures) < 0 or loss >= 1:
        raise ConfigError(
            f"{text!r} is no link: no figure may be negative, and LOSS, the share of messages that "
            "must be sent again, must be below 1"
        )
    return LinkSpec(latency / 1e3, mbit * 1e6 / 8, jitter / 1e3, loss)


# --- showing ------------------------------------------------------------------------------------


def _show(runs: Sequence[Run], setup: Setup, names: Sequence[str]) -> None:
    of = setup.cost_model
    devices = f"each a {names[0]}" if len(set(names)) == 1 else ", ".join(names)
    links = "the profiles' links"
    if (link := setup.link) is not None:
        mbit = link.bytes_per_second * 8 / 1e6
        rate = f"{mbit:g} Mbit/s" if mbit else "no limit"
        jitter = f"{link.jitter * 1e3:g} ms jitter"
        links = f"links of {link.latency * 1e3:g} ms, {rate}, {jitter}, {link.loss:g} loss"
    show_table(
        COLUMNS if setup.load is None else COLUMNS + LOAD_COLUMNS,
        map(cells, runs),
        f"charged: {of.name}, drafts by {_drafts(setup)}; D0 and {setup.stages} stage(s)"
        + (f", V{setup.with_stage} on D0's device" if setup.with_stage else "")
        + (f", head on V{setup.stages}" if setup.head_last else "")
        + f", {devices}; {links}"
        + _instead(setup),
        f"{len(setup.prompts)} prompts, {runs[0].new_tokens} new tokens; all times are virtual, "
        "from those figures and not measured",
        f"vs AR, vs naive: tok/s over that of {REFERENCE}, {RIVAL}; exact: the tokens of "
        f"{REFERENCE}" + (", each request alone" if setup.load is not None else ""),
        *([] if setup.load is None else [_of_load(setup.load)]),
        *(unproven(setup.profiles) if setup.row_price is None else ()),
        left=("policy",),
    )


def _drafts(setup: Setup) -> str:
    """As what the draft's sources are charged."""
    members = parse_draft(setup.draft).members
    costs = {one.name: setup.cost_model.draft_of(one.name).name or one.name for one in members}
    return " and ".join(costs.values()) or "none"


def _price(text: str) -> RowPrice | None:
    """What `--row-price` says; "": nothing."""
    if text in ("", DATA_SHEET):
        return DATA_SHEET if text else None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"row-price is {text!r}; give a share of a step of one row, or {DATA_SHEET}"
        ) from None


def _of_load(load: Load) -> str:
    """What the columns of a load say."""
    how = f"{load.live} at once" if load.arrivals is None else f"{load.arrivals:g} a second"
    return (
        f"requests: {how}; tok/s: of all together; TTFT, TBT: ms to the first token since it was "
        "asked, and between tokens; slowest: that of the slowest request over the mean"
    )


def _instead(setup: Setup) -> str:
    """What is charged otherwise than the profiles say."""
    told = ""
    if setup.row_price is not None:
        price = setup.row_price
        of = "what the data sheet allows" if price == DATA_SHEET else f"{price:g} of a step of one"
        told += f"; a further row costs {of}"
    if (jitter := setup.jitter) is not None:
        mean = f"{jitter.share:.3g} of" if jitter.share else "exponential,"
        told += f"; {mean} jobs take {jitter.seconds * 1e3:g} ms more"
    told += "; D0's own work costs nothing" if setup.d0_free else ""
    return told + ("; D0's loop costs nothing" if setup.loop_free else "")
