"""Trace: a failed run as a file, from which it can be told what happened and played again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError
from edgespec.sim.plain_json import from_json, to_json
from edgespec.sim.scenario import Scenario

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Trace:
    """A scenario, how it failed, and its events; the first `skipped` of them were not kept."""

    scenario: Scenario
    failure: str
    events: tuple[str, ...]
    skipped: int


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": FORMAT,
        "scenario": to_json(trace.scenario),
        "failure": trace.failure,
        "skipped": trace.skipped,
        "events": list(trace.events),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_trace(path: Path) -> Trace:
    """The trace in a file; raises ConfigError if there is none."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from problem
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(f"{path} is no trace of format {FORMAT}")
    try:
        return Trace(
            from_json(Scenario, content["scenario"]),
            str(content["failure"]),
            tuple(str(event) for event in content["events"]),
            int(content.get("skipped", 0)),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(f"{path} is no whole trace: {problem!r}") from problem
