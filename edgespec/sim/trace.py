"""Trace: a failed run as a file, which tells what happened and can be played again."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.schema import FileStruct, json_text, read_as
from edgespec.sim.scenario import Scenario

_FORMAT = ("format", 1)


class FailureTrace(FileStruct, frozen=True):
    """A scenario, how it failed, and its events; the first `skipped` of them were not kept."""

    scenario: Scenario
    failure: str
    events: tuple[str, ...]
    skipped: int = 0


def write_trace(path: Path, trace: FailureTrace) -> None:
    """Write a trace, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json_text(trace, _FORMAT), encoding="utf-8")


def read_trace(path: Path) -> FailureTrace:
    """The trace in a file; raises ConfigError if there is none."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from problem
    return read_as(FailureTrace, content, str(path), "give a file of `edgespec simulate`", _FORMAT)
