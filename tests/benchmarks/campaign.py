"""Random scenarios of toy rings with faults in virtual time, every event checked; run by name.

    python tests/benchmarks/campaign.py RUNS [--seed 0] [--traces traces] [--jobs 0] [--hybrid]
    python tests/benchmarks/campaign.py --replay FILE

Plays a scenario for each seed from `--seed` on, in `--jobs` processes (0: one a processor). The
first one that breaks a promise ends it with status 1, and leaves a trace in `--traces`. `--hybrid`:
the bundled hybrid computes, with caches and states as stages have them, in place of the toy
arithmetic. `--replay` plays a trace's scenario again, and says whether it fails as recorded, fails
otherwise, or diverges; status 1 if it fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.campaign import ScenarioFailed, replay, run_campaign
from support.scenario import Scenario, draw, draw_hybrid

from edgespec.bench.processes import News, map_in_processes
from edgespec.errors import ConfigError

CHUNK = 50
"""Scenarios that a process plays before it takes the next ones."""


def main(arguments: Sequence[str]) -> int:
    """Play what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=int, nargs="?", default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", type=Path, default=Path("traces"))
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--replay", type=Path)
    given = parser.parse_args(arguments)
    if bool(given.replay) == (given.runs > 0) or given.seed < 0:
        parser.error("give how many scenarios, at least 1, from a seed of at least 0; or --replay")
    try:
        if given.replay:
            again = replay(given.replay)
            print(again.words())
            return 1 if again.failure else 0
        drawn = draw_hybrid if given.hybrid else draw
        print(campaign(given.runs, given.seed, given.traces, given.jobs, drawn))
    except (ConfigError, ScenarioFailed) as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def campaign(
    runs: int, seed: int, traces: Path, jobs: int, drawn: Callable[[int], Scenario]
) -> str:
    """What came of the scenarios of `runs` seeds. Raises ScenarioFailed at the first that fails."""
    end, start = seed + runs, time.monotonic()
    chunks = [(first, min(first + CHUNK, end), traces, drawn) for first in range(seed, end, CHUNK)]
    map_in_processes(play_chunk, chunks, jobs)
    rate = runs / max(time.monotonic() - start, 1e-9)
    return f"{runs} scenarios kept every promise: seeds {seed} to {end - 1}, {rate:.0f} a second"


def play_chunk(chunk: tuple[int, int, Path, Callable[[int], Scenario]], news: News) -> None:
    """The scenarios of the seeds from the first of these numbers up to the second."""
    first, end, traces, drawn = chunk
    run_campaign(range(first, end), traces, drawn)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
