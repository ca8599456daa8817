"""Every policy on even and uneven rings, and on a table of models, devices and links; by name.

    python tests/benchmarks/rings.py --prompts FILE [--rings even,heavy-last,…|--table] [--jobs 0]
        [--models NAME,…] [--profiles NAME,…] [--links LATENCY_MS:MBIT,…] [--policies all]
        [--temperature 0] [--new-tokens 64] [--limit N] [--json FILE] [--check]

As `edgespec simulate` with the bundled pair: what the models say is computed once for all rings and
policies. `--table` plays every model on every device and link: D0 and four stages of one kind, or
as many more, up to 16, as the model needs. For each ring it prints tokens a second of each policy
and `adaptive` over the best other one; with `--rings`, also the times that `adaptive` has learnt.
`--check` computes every row too, on rings that have no slow stage, and compares. Prompts that were
looked at here must be none that reports are about.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.faults import SlowStage
from support.faulty_world import FaultyWorld

from edgespec.bench.asking import Asking
from edgespec.bench.processes import News, map_in_processes, process_count
from edgespec.bench.report import REFERENCE
from edgespec.bench.setup import Setup, one_thread
from edgespec.bench.simulated import chosen_policies, play
from edgespec.bench.together import Together
from edgespec.bench.workloads import Prompt, read_prompts
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.cli.simulate import parse_link
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.daemon.settings import chosen_draft
from edgespec.errors import ConfigError
from edgespec.planning.cost_model import cost_model_named
from edgespec.verify.sampling import Sampling

NANO, NX, AGX, PI = (
    "jetson-orin-nano-8gb",
    "jetson-orin-nx-16gb",
    "jetson-agx-orin-64gb",
    "raspberry-pi-5-8gb",
)
MODELS = "llama-2-13b,llama-3.1-8b,qwen2.5-32b"
LINKS = "0.25:1000,2:100,20:1000"
LEAST_STAGES, MOST_STAGES = 4, 16


@dataclass(frozen=True)
class RingCase:
    """`stages`: the devices of V1 … VN. `split`: layers of each; none given: evenly. `slow`: the
    stage that takes twice as long; 0: none. `link`: "" for the profiles' own."""

    stages: tuple[str, ...] = (NANO,) * 4
    split: tuple[int, ...] = ()
    slow: int = 0
    model: str = "llama-2-13b"
    head: str = NANO
    link: str = ""


RINGS = {
    "even": RingCase(),
    "heavy-last": RingCase(split=(9, 9, 10, 12)),
    "mixed": RingCase((NX, NX, NX, NANO)),
    "slow-1": RingCase(slow=1),
    "slow-2": RingCase(slow=2),
    "slow-4": RingCase(slow=4),
    "one": RingCase((NANO,), model="llama-2-7b"),
    "two": RingCase((NANO,) * 2, model="llama-2-7b"),
    "even-8": RingCase((NANO,) * 8),
    "heavy-last-8": RingCase((NANO,) * 8, (4, 5, 5, 5, 5, 5, 5, 6)),
}


@dataclass(frozen=True)
class Asked:
    """What all rings play."""

    prompts: tuple[Prompt, ...]
    temperature: float
    new_tokens: int
    policies: tuple[str, ...]
    check: bool


def setup_of(case: RingCase, asked: Asked) -> Setup:
    """What `edgespec simulate` would play. Raises ConfigError if the model does not fit."""
    return Setup(
        model=bundled("base"),
        draft=str(chosen_draft("", "")),
        dtype="float64",
        profiles=tuple(profile_named(name) for name in (case.head, *case.stages)),
        cost_model=cost_model_named(case.model),
        link=parse_link(case.link) if case.link else None,
        prompts=asked.prompts,
        max_new_tokens=asked.new_tokens,
        sampling=Sampling(asked.temperature),
        split=case.split,
    )


def fitting_case(model: str, profile: str, link: str, asked: Asked) -> RingCase:
    """The ring of fewest stages, at least four, that holds the model."""
    for stages in range(LEAST_STAGES, MOST_STAGES):
        case = RingCase((profile,) * stages, model=model, head=profile, link=link)
        try:
            setup_of(case, asked)
        except ConfigError:
            continue
        return case
    return RingCase((profile,) * MOST_STAGES, model=model, head=profile, link=link)


def learnt_against_charged(play: Asking, case: RingCase) -> str:
    """Seconds of the slowest stage by rows, and the spread, each learnt over charged."""
    setup, answers = play.setup, play.answers
    seen = sum(a.prompt_tokens + a.new_tokens // 2 for a in answers) // len(answers)
    slowness = [2.0 if number == case.slow else 1.0 for number in range(1, setup.stages + 1)]
    step = play.world.coordinator.learnt[play.policy].step

    def each(rows: int) -> list[float]:
        costs = setup.costs().stages
        return [s * cost.block_seconds(rows, seen) for s, cost in zip(slowness, costs, strict=True)]

    words = [
        f"{rows}: {step.seconds(rows) * 1e3:.1f}/{max(each(rows)) * 1e3:.1f}"
        for rows in (1, 2, 4, 8, 16, 32)
    ]
    spread = sum(each(4)) / max(each(4))
    return f"ms by rows {', '.join(words)}; spread {step.spread:.2f}/{spread:.2f}"


def play_rings(item: tuple[Asked, dict[str, RingCase]], news: News) -> list[dict[str, Any]]:
    """The figures of each of these rings."""
    asked, cases = item
    with one_thread():
        together = Together(setup_of(next(iter(cases.values())), asked))
        plays = {}
        for name, case in cases.items():
            faults = [SlowStage(case.slow, 2.0, 0.0, 1e9)] if case.slow else []
            world = partial(FaultyWorld, faults=faults)
            setup = setup_of(case, asked)
            plays[name] = [together.add(setup, policy, world) for policy in asked.policies]
        together.run(news)
    return [figures(name, cases[name], plays[name], asked) for name in cases]


def figures(name: str, case: RingCase, plays: Sequence[Asking], asked: Asked) -> dict[str, Any]:
    """One ring's."""
    speeds = {play.policy: play.played.speed for play in plays}
    own = next((play for play in plays if play.policy == "adaptive"), None)
    best = max((speed for policy, speed in speeds.items() if policy != "adaptive"), default=0.0)
    tokens = next(one.played.tokens for one in plays)
    for one in plays if asked.check and not case.slow else ():
        assert play(one.setup, one.policy).speed == one.played.speed, f"{one.policy} on {name}"
    return {
        "ring": name,
        **asdict(case),
        "temperature": asked.temperature,
        "tokens_per_second": speeds,
        "adaptive_over_best_other": speeds["adaptive"] / best if own and best else None,
        "same_tokens": all(one.played.tokens == tokens for one in plays),
        "learnt": learnt_against_charged(own, case) if own else "",
    }


def table(rows: Sequence[dict[str, Any]], policies: Sequence[str], *, learnt: bool) -> str:
    """In Markdown."""
    lines = ["| ring | T | " + " | ".join(policies) + " | adaptive / best other | same tokens |"]
    lines.append("| --- " * (4 + len(policies)) + "|")
    for row in rows:
        speeds = row["tokens_per_second"]
        ratio = row["adaptive_over_best_other"]
        cells = [row["ring"], f"{row['temperature']:g}", *(f"{speeds[p]:.2f}" for p in policies)]
        cells += ["" if ratio is None else f"{ratio:.3f}", "yes" if row["same_tokens"] else "NO"]
        lines.append("| " + " | ".join(cells) + " |")
    if learnt:
        lines += ["", *(f"{row['ring']}: {row['learnt']}" for row in rows)]
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--rings", default=",".join(RINGS))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--profiles", default=",".join((NANO, NX, AGX, PI)))
    parser.add_argument("--links", default=LINKS)
    parser.add_argument("--policies", default="all")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--json", default="")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    prompts = tuple(read_prompts(chosen.prompts, chosen.limit))
    policies = chosen_policies([REFERENCE, *chosen.policies.split(",")], "independent")
    asked = Asked(prompts, chosen.temperature, chosen.new_tokens, policies, chosen.check)
    cases = {name: RINGS[name] for name in chosen.rings.split(",")}
    if chosen.table:
        cases = {}
        for model in chosen.models.split(","):
            for profile in chosen.profiles.split(","):
                for link in chosen.links.split(","):
                    case = fitting_case(model, profile, link, asked)
                    cases[f"{model}, {len(case.stages)} × {profile}, {link}"] = case
    rows = play_all_rings(cases, asked, chosen.jobs)
    if chosen.json:
        Path(chosen.json).write_text(json.dumps(rows), encoding="utf-8")
    print(table(rows, policies, learnt=not chosen.table))
    return 0


def play_all_rings(cases: dict[str, RingCase], asked: Asked, jobs: int) -> list[dict[str, Any]]:
    """The figures of all rings, which some processes share."""
    names = list(cases)
    hands = [names[n :: process_count(jobs)] for n in range(min(process_count(jobs), len(names)))]
    items = [(asked, {name: cases[name] for name in hand}) for hand in hands]
    done, of = [0] * len(items), len(cases) * len(asked.policies) * len(asked.prompts)
    notes, left = Notes(), TimeLeft()
    with notes.waiting("loading the models") as waiting:

        def news(item: int, answers: int) -> None:
            done[item] = answers
            waiting(f"{sum(done)}/{of} answers{left(sum(done), of)}")

        played = map_in_processes(play_rings, items, jobs, news)
    found = {row["ring"]: row for part in played for row in part}
    return [found[name] for name in names]


if __name__ == "__main__":
    sys.exit(main())
