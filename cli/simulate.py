"""edgespec simulate: policies on a ring in virtual time; random faults; what failed once, again."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from edgespec.bench.campaigns import campaign as run_campaign
from edgespec.bench.load import Load
from edgespec.bench.recorded import is_recording, prompts_of, read_recording
from edgespec.bench.report import (
    COLUMNS,
    LOAD_COLUMNS,
    REFERENCE,
    RIVAL,
    Run,
    as_json,
    cells,
)
from edgespec.bench.simulated import Setup, answerable, chosen_policies
from edgespec.bench.simulated import simulate as run_policies
from edgespec.bench.workloads import DEFAULT_WORKLOAD, default_prompts, read_prompts
from edgespec.cli import options
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.cli.replays import show_replay
from edgespec.cli.tables import show_table
from edgespec.config import DEFAULT_LIVE, DTYPES, HEAD_ON_COORDINATOR, MOST_STAGES, Quantisation
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.planning import Quants, model_to_plan
from edgespec.daemon.precision import AUTO
from edgespec.daemon.process import EXIT_FAILED
from edgespec.daemon.profiles import profile_named, unproven
from edgespec.daemon.settings import LAST_STAGE, chosen_draft, chosen_hints
from edgespec.door.asking import USUAL, SamplingOptions
from edgespec.drafting.choice import NONE, DraftChoice
from edgespec.errors import ConfigError
from edgespec.model.hub import require_model
from edgespec.planning.cost_model import (
    COST_MODELS,
    DEFAULT_COST_MODEL,
    CostModel,
    cost_model_named,
)
from edgespec.planning.profile import DATA_SHEET, Profile, RowPrice
from edgespec.sim.campaign import replay as play_again
from edgespec.sim.durations import Jitter
from edgespec.sim.links import LinkSpec

DEFAULT_PROFILE = "jetson-orin-nano-8gb"


@options.grouped
def simulate(
    profile: list[str] | None = typer.Option(
        None,
        metavar="PROFILE[,PROFILE...]",
        help="The devices, by name or file: one for all, or those of D0, V1, ... VN, separated by "
        f"commas or given one by one. Default: {DEFAULT_PROFILE}.",
    ),
    cost_model: str = typer.Option(
        "",
        help="The model whose costs are charged: a name, or a folder or file, whose sizes are "
        "taken, with those of the draft. Default: the one that the profile was fitted with, or "
        "llama-2-13b.",
    ),
    head_quant: str = typer.Option(
        AUTO,
        help="How the coordinator is charged for output heads, the base's and the draft's: as "
        "`edgespec serve` holds them with this option; none: in 16 bit, as published systems do.",
    ),
    stages: int = typer.Option(4, help="Number of stages in the ring."),
    with_stage: int | None = options.WITH_STAGE,
    head: str = typer.Option(
        HEAD_ON_COORDINATOR, help="Where the output head is: coordinator, or last-stage."
    ),
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
    sampling: SamplingOptions = USUAL,
    link: str = typer.Option(
        "",
        metavar="LATENCY_MS:MBIT[:JITTER_MS[:LOSS]]",
        help="Every link of the ring, instead of the profiles' own; MBIT 0: no limit.",
    ),
    row_price: str = typer.Option(
        "",
        metavar=f"F|{DATA_SHEET}",
        help="Each further row of a pass costs F of a step of one row, on every device, whatever "
        "the profile's tables say, but never more in all than a prompt's chunk of 64 rows; "
        f"{DATA_SHEET}: the least that its arithmetic allows. Default: as the profile has it, for "
        "boards 0.04, which is what published figures give.",
    ),
    d0_free: bool = typer.Option(
        False,
        "--d0-free",
        help="Head, choosing, ranking and drafts take D0 no time: what the ring alone could do.",
    ),
    loop_free: bool = typer.Option(
        False,
        "--loop-free",
        help="The coordinator's own loop, which is Python, takes no time.",
    ),
    jitter: str = typer.Option(
        "",
        metavar="KIND",
        help="Noise, by --seed: 1%x100ms: of each hundred jobs of the stages and of D0 one takes "
        "100 ms more; exp5ms: each takes an exponential time of that mean more.",
    ),
    model: str = options.MODEL,
    draft: str = options.DRAFT,
    hints: str = options.HINTS,
    dtype: options.Dtype = "float64",
    jobs: int = typer.Option(0, help="Processes that compute at once; 0: one a processor."),
    as_json_object: bool = options.JSON,
    campaign: int | None = typer.Option(
        None,
        metavar="RUNS",
        help="Instead: play so many random scenarios of toy rings with faults, the first one "
        "of --seed, and check every event.",
    ),
    traces: str = typer.Option(
        "traces", help="Folder that --campaign writes the trace of a failure into."
    ),
    replay: str = typer.Option(
        "",
        metavar="FILE",
        help="Instead: play again what `edgespec serve --record` wrote, each request with its "
        "own policy and settings (with one --policy: with that), up to --live at once, or the "
        "scenario of a trace.",
    ),
) -> None:
    """Play policies on a simulated ring, with real tokens and charged times, side by side.

    A pair of models computes the tokens; how long it takes is what the devices of the profiles
    would have needed for a published model. The same command gives the same figures everywhere.
    """
    if campaign is not None and replay:
        raise ConfigError("--campaign and --replay exclude each other; give one of them")
    load = None if live is None and arrivals is None else Load(live, arrivals)
    if arrivals is not None and replay:
        raise ConfigError("--arrivals goes with prompts; what --replay plays has its own times")
    if load is not None and campaign is not None:
        raise ConfigError("--live and --arrivals do not go with --campaign, which draws its own")
    recording = Path(replay) if replay and is_recording(Path(replay)) else None
    if (campaign is not None or (replay and recording is None)) and as_json_object:
        raise ConfigError(
            "--json goes with the policies and with recorded requests, not with --campaign or the "
            "trace of one"
        )
    if live is not None and replay and recording is None:
        raise ConfigError("--live does not go with the trace of a campaign, which has its own")
    if replay and recording is None:
        _replay(Path(replay))
        return
    if campaign is not None:
        _campaign(sampling.seed, campaign, Path(traces), jobs)
        return

    base, chosen = model or bundled("base"), chosen_draft(draft, model)
    _look_at_models(base, chosen, dtype)
    recorded = read_recording(recording) if recording is not None else []
    policies = chosen_policies(split_names([policy]), str(chosen))
    names, profiles = ring_of(profile or [DEFAULT_PROFILE], stages)
    if recording is not None:
        workload = prompts_of(recorded)
    else:
        workload = read_prompts(prompts, limit) if prompts else default_prompts(limit)
    notes = Notes()
    workload = answerable(base, workload, notes.say)
    setup = Setup(
        model=base,
        draft=str(chosen),
        dtype=dtype,
        profiles=profiles,
        cost_model=charged_model(cost_model, profiles, str(chosen), head_quant),
        link=parse_link(link) if link else None,
        prompts=tuple(workload),
        max_new_tokens=sampling.max_new_tokens,
        sampling=sampling.sampling,
        row_price=_price(row_price),
        d0_free=d0_free,
        loop_free=loop_free,
        jitter=Jitter.parse(jitter) if jitter else None,
        with_stage=stages if with_stage == LAST_STAGE else with_stage or 0,
        head=head,
        load=Load(live or DEFAULT_LIVE) if recording is not None else load,
        hints=chosen_hints(hints, base),
    )
    if recording is not None:
        show_replay(setup, recorded, policies[0] if len(policies) == 1 else "", as_json_object)
        return
    if load is not None:
        load.check_prompts(len(workload), notes.say)
    with notes.waiting("loading the models") as waiting:
        left = TimeLeft()
        runs = run_policies(
            setup, policies, jobs, lambda done, of: waiting(f"{done}/{of} answers{left(done, of)}")
        )
    if as_json_object:
        settings = {
            **setup.settings(),
            "policies": list(policies),
            "profiles": list(names),
            "model": model or options.BUNDLED,
            "draft": draft or (options.BUNDLED if chosen.members else ""),
            "workload": prompts or DEFAULT_WORKLOAD,
        }
        print(json.dumps(as_json(runs, settings)))
    else:
        _show(runs, setup, names)
    if not all(run.exact for run in runs):
        notes.say(f"some answers are not those of {REFERENCE}: a fault, whatever the dtype")


# --- settings -----------------------------------------------------------------------------------


def split_names(values: Sequence[str]) -> list[str]:
    """The names in comma-separated lists, in order."""
    return [name.strip() for value in values for name in value.split(",") if name.strip()]


def ring_of(values: Sequence[str], stages: int) -> tuple[tuple[str, ...], tuple[Profile, ...]]:
    """The names of the profiles of D0, V1 … VN, and the profiles; one name stands for all.

    Raises ConfigError for an unknown name and for a wrong number of them.
    """
    if not 1 <= stages <= MOST_STAGES:
        raise ConfigError(f"{stages} stages; a ring has 1 to {MOST_STAGES}")
    names = split_names(values)
    if len(names) == 1:
        names *= stages + 1
    if len(names) != stages + 1:
        raise ConfigError(
            f"{len(names)} profiles for a coordinator and {stages} stage(s); name one for all "
            f"devices, or {stages + 1}: D0's first, then those of the stages"
        )
    known = {name: profile_named(name) for name in dict.fromkeys(names)}
    return tuple(names), tuple(known[name] for name in names)


def charged_model(
    name: str, profiles: Sequence[Profile], draft: str = "", head_quant: str = AUTO
) -> CostModel:
    """The cost model of that name; "": that of the profiles, or the default.

    That of a folder or file is by its sizes, held as daemon.precision chooses, with `draft`.
    `head_quant` "auto": with heads as the cost model has them.
    """
    if name and name not in COST_MODELS and Path(name).exists():
        return model_to_plan(name, Quants(head=head_quant), draft or NONE).model.costs
    wanted = dict.fromkeys(profile.cost_model for profile in profiles if profile.cost_model)
    if not name and len(wanted) > 1:
        raise ConfigError(
            f"the profiles name several cost models ({', '.join(wanted)}); choose with --cost-model"
        )
    head = None if head_quant == AUTO else Quantisation.parse(head_quant)
    return cost_model_named(name or next(iter(wanted), DEFAULT_COST_MODEL), head)


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


def _look_at_models(base: str, draft: DraftChoice, dtype: str) -> None:
    """Find the most frequent mistakes before torch is imported."""
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; choose one of: {', '.join(DTYPES)}")
    for model in (base, *draft.folders):
        require_model(model)


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
        f"charged: {of.name}, drafts by {of.draft.name or 'none'}; D0 and {setup.stages} stage(s)"
        + (f", V{setup.with_stage} on D0's device" if setup.with_stage else "")
        + (f", head on V{setup.stages}" if setup.head_last else "")
        + (", with hints" if setup.hints else "")
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


# --- replays and campaigns ----------------------------------------------------------------------


def _replay(path: Path) -> None:
    """Play a recorded scenario; exit code 1 if it fails, as recorded or otherwise."""
    outcome = play_again(path)
    print(outcome.words())
    if outcome.failure:
        raise typer.Exit(EXIT_FAILED)


def _campaign(first: int, runs: int, traces: Path, jobs: int) -> None:
    notes = Notes()
    start = time.monotonic()
    with notes.waiting("playing") as waiting:
        left = TimeLeft()
        played = run_campaign(
            first,
            runs,
            traces,
            jobs,
            lambda done: waiting(f"{done}/{runs} scenarios{left(done, runs)}"),
        )
    rate = played / max(time.monotonic() - start, 1e-9)
    sys.stdout.write(
        f"{played} scenarios kept every promise: seeds {first} to {first + runs - 1}, "
        f"{rate:.0f} a second\n"
    )
