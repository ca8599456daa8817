"""edgespec profile: measure this device, write its profile, show what is fast on it."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.tables import show_table
from edgespec.config import Address
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.errors import EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from edgespec.daemon.kernels import Kernels
    from edgespec.daemon.measure import Measured
    from edgespec.planning.profile import LogitTimes

_LEAST_SECONDS, _MOST_SECONDS = 0.01, 3600.0


def profile(
    model: str = typer.Option(
        "",
        help="The model whose layers are measured, with random weights: a name of `edgespec "
        "models`, a hub id or a folder. Default: Llama 2 7B, or a smaller one where memory is "
        "short.",
        callback=options.check_model,
    ),
    coordinator: str = typer.Option(
        "", help="HOST:PORT of a running coordinator: measure the way to it too."
    ),
    seconds: float = typer.Option(60.0, help="About how long to measure; more takes less chance."),
    name: str = typer.Option(
        "", help="Name of the profile. Default: that of --out, or of this machine."
    ),
    out: str = typer.Option("", metavar="FILE.json", help="Where to write it. Default: NAME.json."),
    cluster: str = options.CLUSTER,
    as_json: bool = options.JSON,
) -> None:
    """Measure this device and write its profile, for simulate, --emulate and plan.

    Times a decoder layer with every quantisation that runs here, memory and, if asked, the way to a
    coordinator. Nothing else should run meanwhile.
    """
    if not _LEAST_SECONDS <= seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"{seconds} seconds; --seconds goes from {_LEAST_SECONDS} to {_MOST_SECONDS:.0f}"
        )
    name = name or _default_name(out)
    file = Path(out or f"{name}.json")
    _check_writable(file)
    address = Address.parse(coordinator) if coordinator else None
    identity = ClusterFolder.open(folder_of(cluster)).identity if coordinator else None
    notes = Notes()
    with notes.waiting("trying the quantisations") as waiting:
        # Imported late, as torch takes seconds: a wrong option is refused at once.
        from edgespec.daemon.measure import MeasureRequest, measure

        waiting("trying the quantisations")
        kernels = _kernels(notes)
        request = MeasureRequest(name, model, address, identity, seconds)
        measured = measure(request, kernels.usable, kernels.unusable, waiting)
    content = json.dumps(measured.profile.to_dict(), indent=2, ensure_ascii=False) + "\n"
    file.write_text(content, encoding="utf-8")
    if as_json:
        print(json.dumps(_as_json(measured, file)))
    else:
        _show(measured)
    for note in measured.notes:
        notes.say(f"note: {note}")
    notes.say(
        f"the profile is in {file}: edgespec simulate --profile {_as_path(file)}, or --emulate "
        f"{_as_path(file)}"
    )


def _kernels(notes: Notes) -> Kernels:
    """The quantisations that run here; exit code 1 without a 4-bit one."""
    from edgespec.daemon.kernels import tried_kernels

    kernels = tried_kernels()
    for kernel, reason in kernels.unusable.items():
        notes.say(f"{kernel} is not measured: {reason}")
    if not kernels.has_four_bit:
        notes.say(
            "edgespec: error: no 4-bit quantisation runs here, and a profile needs the times of "
            "one; see above for each, and run `edgespec doctor`"
        )
        raise typer.Exit(EXIT_FAILED)
    return kernels


def _default_name(out: str) -> str:
    if out:
        return Path(out).stem
    return re.sub(r"[^a-z0-9.-]+", "-", platform.node().lower()).strip("-.") or "device"


def _check_writable(path: Path) -> None:
    """Raises ConfigError before a minute of measuring, not after it."""
    folder = path.parent
    if not folder.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {folder}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"cannot write {path}; name another file with --out")


def _as_path(file: Path) -> str:
    """The file in a form that options do not take for a profile's name."""
    text = str(file)
    return text if "/" in text or text.endswith(".json") else f"./{text}"


# --- showing ------------------------------------------------------------------------------------


def _as_json(measured: Measured, file: Path) -> dict[str, object]:
    return {
        "file": str(file),
        "profile": measured.profile.to_dict(),
        "layer": {
            "of": measured.shape,
            "bytes": dict(measured.stored),
            "seconds": {name: dict(column) for name, column in measured.layer.items()},
        },
        "notes": list(measured.notes),
    }


def _show(measured: Measured) -> None:
    of = measured.profile
    show_table(
        ("rows", *("16 bit" if name == "none" else name for name in measured.layer)),
        _rows(measured),
        f"one layer of {measured.shape}: ms, and GB/s of its packed bytes; * the fastest",
        f"four_bit is {of.quantisation}; launching a layer takes "
        f"{of.launch_seconds.value * 1e6:.0f} µs, "
        + ("while the device computes" if of.launches_ahead else "and then it computes"),
        "on 10^6 logits, at temperature 0, above it, and with filters: "
        f"{_each_way(of.choosing)} to choose a token, {_each_way(of.ranking)} to rank guesses",
        f"memory {of.memory_bytes.value / 2**30:.1f} GiB free, read at "
        f"{_rate(of.memory_bandwidth.value)}; cache rows {_rate(of.copy_bandwidth.value)}",
        f"link {of.link_latency.value * 1e3:.3g} ms one way, {_rate(of.link_bandwidth.value)} "
        f"({of.link_latency.origin.partition(':')[0].partition(' on ')[0]})",
        *(f"{name}: {fact}" for name, fact in of.board.items()),
        left=(),
        rule=None,
    )


def _rows(measured: Measured) -> Iterator[list[str]]:
    """A line for each number of rows, a column for each quantisation."""
    for rows in next(iter(measured.layer.values())):
        best = min(measured.layer, key=lambda name: measured.layer[name][rows])
        cells = [str(rows)]
        for name, column in measured.layer.items():
            speed = measured.stored[name] / column[rows] / 1e9
            mark = "*" if name == best else " "
            cells.append(f"{column[rows] * 1e3:.3g} ms, {speed:.3g} GB/s{mark}")
        yield cells


def _each_way(times: LogitTimes) -> str:
    """Milliseconds for 10^6 logits."""
    ways = (times.greedy, times.sampled, times.filtered)
    return ", ".join(f"{way.seconds(10**6) * 1e3:.3g}" for way in ways) + " ms"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.3g} GB/s"
