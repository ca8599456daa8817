"""Several users at once: tokens a second and time between tokens over K; run by name.

    python tests/benchmarks/several_users.py [--live 1,2,4,8,16] [--row-price F] [--plot FILE.png]

`edgespec simulate --live K` for each K, on one ring of virtual time, in one go: what the models say
is computed once for all. Prints a table; --json FILE keeps all figures. Every text is compared with
that of plain decoding to the request alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.bench.load import Load
from edgespec.bench.plots import plot_load
from edgespec.bench.processes import News, map_in_processes
from edgespec.bench.report import ALONE, REFERENCE, Run, run_of
from edgespec.bench.simulated import Setup
from edgespec.bench.together import play_together
from edgespec.bench.workloads import default_prompts, read_prompts
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.profiles import profile_named
from edgespec.planning.cost_model import cost_model_named
from edgespec.verify.sampling import Sampling

POLICIES = "adaptive,specpipe,autoregressive"
"""Ours, SpecPipe-DB, no draft."""


def play(item: tuple[Setup, list[str]], news: News) -> list[Run]:
    """Each policy's figures under the load of that set-up."""
    setup, policies = item
    playing = list(dict.fromkeys([REFERENCE, *policies]))
    plays = [(replace(setup, load=None), REFERENCE), *((setup, policy) for policy in playing)]
    played = dict(zip([ALONE, *playing], play_together(plays, news), strict=True))
    names = [profile.name for profile in setup.profiles]
    return [run_of(policy, played, names, setup.cost_model.name) for policy in policies]


def table(figures: Sequence[dict[str, Any]]) -> str:
    """In Markdown; times in milliseconds."""
    titles = ("K", "policy", "tok/s", "TTFT", "TBT", "TBT p99", "slowest", "D0 busy", "stages busy")
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    for one in figures:
        busy = one["stage_busy"]
        cells = [str(one["live"]), f"`{one['policy']}`", f"{one['tokens_per_second']:.2f}"]
        cells += [f"{one[name] * 1e3:.0f}" for name in ("ttft_mean", "tbt_mean", "tbt_p99")]
        cells += [f"{one['slowest_ratio']:.2f}", f"{one['coordinator_busy']:.0%}"]
        cells += [f"{min(busy):.0%} to {max(busy):.0%}" + ("" if one["exact"] else ", NOT EXACT")]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--live", default="1,2,4,8,16")
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--profile", default="jetson-orin-nano-8gb")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--cost-model", default="llama-2-13b")
    parser.add_argument("--row-price", type=float)
    parser.add_argument("--prompts", default="")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--json", default="")
    parser.add_argument("--plot", default="")
    given = parser.parse_args()
    read = (
        read_prompts(given.prompts, given.limit) if given.prompts else default_prompts(given.limit)
    )
    setup = Setup(
        model=bundled("base"),
        draft=bundled("draft"),
        dtype="float64",
        profiles=(profile_named(given.profile),) * (given.stages + 1),
        cost_model=cost_model_named(given.cost_model),
        link=None,
        prompts=tuple(read),
        max_new_tokens=given.new_tokens,
        sampling=Sampling(),
        row_price=given.row_price,
    )
    policies = given.policies.split(",")
    loads = [int(live) for live in given.live.split(",")]
    items = [(replace(setup, load=Load(live)), policies) for live in loads]
    done, left, notes = [0] * len(items), TimeLeft(), Notes()
    of = len(items) * len(read) * (1 + len({REFERENCE, *policies}))
    with notes.waiting("loading the models") as waiting:

        def heard(index: int, answers: int) -> None:
            done[index] = answers
            waiting(f"{sum(done)}/{of} answers{left(sum(done), of)}")

        runs = map_in_processes(play, items, given.jobs, heard)
    figures = [run.as_dict() for group in runs for run in group]
    if given.json:
        Path(given.json).write_text(json.dumps({"runs": figures, "settings": setup.settings()}))
    if given.plot:
        lines = {policy: [one for one in figures if one["policy"] == policy] for policy in policies}
        price = "" if given.row_price is None else f", a further row {given.row_price:g} of a step"
        devices = f"{given.stages + 1} × {given.profile}"
        plot_load(Path(given.plot), lines, f"{given.cost_model} on {devices}{price}; virtual time")
    print(table(figures))


if __name__ == "__main__":
    main()
