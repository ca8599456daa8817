"""edgespec doctor: whether edgespec can run on this device, and if not, why."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.config import Address
from edgespec.daemon.cluster import folder_of
from edgespec.daemon.doctor import BLOCKED, OK, WARNING, Finding, examine
from edgespec.daemon.doctor_network import examine_network
from edgespec.errors import EXIT_FAILED

_MARKS = {OK: ("ok", "green"), WARNING: ("warning", "yellow"), BLOCKED: ("blocked", "bold red")}


def doctor(
    coordinator: str | None = options.COORDINATOR,
    cluster: str = options.CLUSTER,
    cache: str = options.CACHE,
    as_json: bool = options.JSON,
) -> None:
    """Look whether edgespec can run on this device, and reach its cluster.

    Software, kernels, memory, disk and ports; clock, keys, network and the way to the coordinator.
    Exit code 0 if it can, warnings or not; 1 if something blocks it.
    """
    told = None if coordinator is None else Address.parse(coordinator)
    notes = Notes()
    with notes.waiting("looking") as waiting:
        findings = []
        folder = folder_of(cluster)
        device = examine(Path(cache) if cache else _blocks(), folder)
        for finding in chain(device, examine_network(folder, told)):
            findings.append(finding)
            waiting(f"looked at {finding.name}")
    blocked = [finding for finding in findings if finding.state == BLOCKED]
    if as_json:
        entries = [asdict(finding) for finding in findings]
        print(json.dumps({"can_run": not blocked, "findings": entries}))
    else:
        _show(findings)
    if blocked:
        names = ", ".join(finding.name for finding in blocked)
        notes.say(f"edgespec cannot run here yet: {names}")
        raise typer.Exit(EXIT_FAILED)
    notes.say("edgespec can run here")


def _blocks() -> Path:
    """The cache of blocks. Imported late: a broken torch must become a finding, not a crash."""
    try:
        from edgespec.daemon.blocks import default_folder
    except Exception:
        return Path.home()
    return default_folder()


def _show(findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark, style = _MARKS[finding.state]
        table.add_row(Text(mark, style=style), Text(finding.name), Text(finding.text))
    Console(markup=False, highlight=False, emoji=False).print(table)
