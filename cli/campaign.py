"""edgespec campaign: random scenarios of toy rings with faults, several at once."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import typer

from edgespec.bench.processes import News, map_in_processes
from edgespec.cli import options
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.errors import ConfigError, EdgespecError
from edgespec.sim.campaign import run_campaign

CHUNK = 50
"""Scenarios that a process plays before it takes the next ones."""


def campaign(
    runs: int = typer.Argument(metavar="RUNS", help="How many scenarios, each of its own seed."),
    seed: int = typer.Option(0, help="That of the first scenario."),
    traces: str = typer.Option("traces", help="Folder for the trace of a scenario that fails."),
    jobs: int = options.JOBS,
) -> None:
    """Play random scenarios of toy rings with faults in virtual time, and check every event.

    The first one that breaks a promise ends it, and leaves a trace for `edgespec replay`.
    """
    if runs < 1:
        raise ConfigError(f"a campaign of {runs} runs; it must have at least 1")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; it must be at least 0")
    end, folder, start = seed + runs, Path(traces), time.monotonic()
    chunks = [(first, min(first + CHUNK, end), folder) for first in range(seed, end, CHUNK)]
    done = [0] * len(chunks)
    with Notes().waiting("playing") as waiting:
        left = TimeLeft()

        def heard(index: int, played: int) -> None:
            done[index] = played
            waiting(f"{sum(done)}/{runs} scenarios{left(sum(done), runs)}")

        map_in_processes(_play_chunk, chunks, jobs, heard)
    rate = runs / max(time.monotonic() - start, 1e-9)
    sys.stdout.write(
        f"{runs} scenarios kept every promise: seeds {seed} to {end - 1}, {rate:.0f} a second\n"
    )


def _play_chunk(chunk: tuple[int, int, Path], news: News) -> None:
    first, end, traces = chunk
    try:
        for seed in range(first, end):
            run_campaign([seed], traces)
            news(seed + 1 - first)
    except OSError as problem:
        raise EdgespecError(f"cannot write a trace into {traces}: {problem}") from None
