"""Campaigns: many random scenarios of toy rings with faults, several at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgespec.bench.processes import News, map_in_processes
from edgespec.errors import ConfigError, EdgespecError
from edgespec.sim.campaign import run_campaign

CHUNK = 50
"""Scenarios that a process plays before it takes the next ones."""


def campaign(
    first: int,
    runs: int,
    traces: Path,
    jobs: int = 1,
    news: Callable[[int], None] = lambda played: None,
) -> int:
    """Play the scenarios of the seeds from `first` on, up to the first that fails.

    Up to `jobs` (0: one a processor) processes share the work; `news(played)`: how many
    scenarios are done. Returns how many passed, which is all of them. Raises ScenarioFailed, which
    names the seed and its trace in the folder `traces`.
    """
    if runs < 1:
        raise ConfigError(f"a campaign of {runs} runs; it must have at least 1")
    if first < 0:
        raise ConfigError(f"seed is {first}; it must be at least 0")
    end = first + runs
    chunks = [(seed, min(seed + CHUNK, end), traces) for seed in range(first, end, CHUNK)]
    done = [0] * len(chunks)

    def heard(index: int, played: int) -> None:
        done[index] = played
        news(sum(done))

    return sum(map_in_processes(_play_chunk, chunks, jobs, heard))


def _play_chunk(chunk: tuple[int, int, Path], news: News) -> int:
    first, end, traces = chunk
    try:
        for seed in range(first, end):
            run_campaign([seed], traces)
            news(seed + 1 - first)
    except OSError as problem:
        raise EdgespecError(f"cannot write a trace into {traces}: {problem}") from None
    return end - first
