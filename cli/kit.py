"""What `edgespec bench --kit` collects about a board, for one file that can be published."""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from edgespec import __version__
from edgespec.cli.answering import tokens_per_second
from edgespec.cli.demo import ring_here
from edgespec.cli.notes import Notes
from edgespec.config import LOOPBACK, Address
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.daemon.device import ROOT, board_facts, gpu_facts, system_number, system_text, zones
from edgespec.daemon.doctor import Finding, examine
from edgespec.daemon.health import SensorReader
from edgespec.daemon.profiles import profile_named, profile_names
from edgespec.daemon.settings import RingOptions, coordinator_config
from edgespec.door.asking import GREEDY
from edgespec.errors import EdgespecError
from edgespec.net.control import takes_connections
from edgespec.net.keys import Identity
from edgespec.planning.profile import Profile
from edgespec.wire.client_messages import Finished

FORMAT = 1
SECONDS = 120.0
"""About how long the profile is measured."""
LIBRARIES = ("torch", "numpy", "transformers", "triton", "bitsandbytes", "pyzmq")
PROMPT = "Question: Anna has 4 bags with 6 apples each. How many apples does she have?\nAnswer:"
PROFILE = "edgespec-profile.json"
TOKENS = (1155, 79, 66, 453, 222, 21, 289, 1009, 439, 222, 23, 1309, 533, 13, 649, 509)
"""What the bundled pair says to PROMPT in float64: seen on x86-64 by plain decoding."""
LOOK_EVERY_S = 1.0
HIDDEN = "(hidden)"
_UNITS = {
    "memory_bytes": (2**30, "GiB"),
    **dict.fromkeys(("memory_bandwidth", "copy_bandwidth", "link_bandwidth"), (1e9, "GB/s")),
    **dict.fromkeys(("four_bit", "sixteen_bit"), (1e-3, "ms a GB of weights")),
}
"""Of a profile's figures by their first word, for people; all others are milliseconds."""

_PATH = re.compile(r"(?<![\w.~)])~?(?:/[\w.@+~-]+)+/?")
_IPV4 = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)(?:/\d+)?")
_IPV6 = re.compile(r"(?<!\w)[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:%\w+)?(?:/\d+)?")
_MAC = re.compile(r"(?<![\w:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![\w:-])")
_VERSION = re.compile(r"\d+(?:\.\d+)*")
_COMMON = frozenset({"root", "localhost", "user", "local", "device", "board"})
"""Names that identify nobody, and words of every report."""


def kit(file: Path, notes: Notes) -> None:
    """Measure this board, which should do nothing else, and write the report to `file`, and the
    profile of it beside that, for the board's owner.

    Raises EdgespecError where nothing can be measured; what fails by itself is in the report."""
    from edgespec.daemon.blocks import default_folder

    with notes.waiting("looking at this board") as waiting, Watch() as watch:
        waiting("looking at this board")
        findings = list(examine(default_folder(), folder_of("")))
        board = board_facts(ROOT)
        profile = bundled_profile(board.get("board", ""))
        predicted = figures(profile.to_dict()) if profile else {}
        notes.say(
            f"predicted for this board, by {profile.name}, before anything is measured (a number "
            "behind a name: rows of a pass; docs/profiles.md says what each is):"
            if profile
            else "no bundled profile is of this board, so nothing was predicted for it"
        )
        notes.table([(name, in_words(name, value)) for name, value in predicted.items()])
        content: dict[str, Any] = {
            "format": FORMAT,
            "edgespec": __version__,
            "versions": versions(LIBRARIES),
            "board": board | gpu_facts(),
            "findings": [_told(finding) for finding in findings],
            "predicted": {profile.name: predicted} if profile else {},
            "measured": _tried(lambda: _measured(waiting)),
        }
        waiting("comparing tokens with those of another machine")
        content["exactness"] = _tried(lambda: _exactness(notes))
    content["meanwhile"] = watch.as_json()
    content = without_names(content, own_names())
    _write(file, content)
    notes.say(f"{file} has what was measured; docs/measure-your-board.md says where to send it")
    if problem := content["measured"].get("failed"):
        notes.say(f"the board could not be measured: {problem}")
        return
    profile_file = file.with_name(PROFILE)
    _write(profile_file, content["measured"]["profile"])
    notes.table(beside(predicted, figures(content["measured"]["profile"])))
    notes.say(
        f"{profile_file} is this board's profile: edgespec plan --model NAME --devices "
        f"{profile_file} says what it can run, and how fast"
    )


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def bundled_profile(board: str) -> Profile | None:
    """The installed profile that all words of, but for its memory, are in the board's own name; of
    several the one of most words."""
    words = set(re.findall(r"[a-z0-9]+", board.lower()))
    named = {name: set(name.split("-")[:-1]) for name in profile_names()}
    fitting = [name for name, own in named.items() if own and own <= words]
    return profile_named(max(fitting, key=lambda name: len(named[name]))) if fitting else None


def figures(profile: dict[str, Any], place: str = "") -> dict[str, float]:
    """The numbers of a profile as written, by where they stand; none that was only assumed."""
    found: dict[str, float] = {}
    for name, entry in profile.items():
        here = place if name in ("value", "seconds") else f"{place} {name}".lstrip()
        if isinstance(entry, dict) and not str(entry.get("origin", "")).startswith("assumed"):
            found |= figures(entry, here)
        elif place and isinstance(entry, (int, float)):
            found[here] = float(entry)
    return found


def beside(predicted: dict[str, float], measured: dict[str, float]) -> list[tuple[str, str]]:
    """By figure what was predicted, what was measured, and how many times as much that is."""
    return [
        (
            name,
            f"predicted {in_words(name, value)}, measured {in_words(name, own)}: "
            f"{own / value:.2f} times",
        )
        for name, value in predicted.items()
        if value and (own := measured.get(name)) is not None
    ]


def in_words(name: str, value: float) -> str:
    """A figure of a profile with its unit."""
    unit, word = _UNITS.get(name.partition(" ")[0], (1e-3, "ms"))
    number = value / unit
    return f"{number:.0f} {word}" if number >= 100 else f"{number:.3g} {word}"


def _told(finding: Finding) -> dict[str, str]:
    return {"name": finding.name, "state": finding.state, "text": finding.text}


def _tried(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part of the report, or why there is none, be it that a board breaks what nobody thought
    of: what else was measured in minutes is to be in the report."""
    try:
        return part()
    except EdgespecError as problem:
        return {"failed": str(problem)}
    except Exception as problem:
        return {"failed": f"{type(problem).__name__}: {problem}"}


def _measured(waiting: Callable[[str], None]) -> dict[str, Any]:
    """The profile, the seconds of a layer by rows for each kernel, and the bytes of the layer."""
    from edgespec.daemon.kernels import tried_kernels
    from edgespec.daemon.measure import MeasureRequest, measure

    kernels = tried_kernels()
    if not kernels.has_four_bit:
        return {"failed": "no 4-bit quantisation runs here", "unusable": dict(kernels.unusable)}
    address, identity = _coordinator()
    request = MeasureRequest("measured", coordinator=address, identity=identity, seconds=SECONDS)
    found = measure(request, kernels.usable, kernels.unusable, waiting)
    return {
        "profile": found.profile.to_dict(),
        "layer_of": found.shape,
        "layer_seconds": {name: dict(times) for name, times in found.layer.items()},
        "layer_bytes": dict(found.stored),
        "notes": list(found.notes),
    }


def _coordinator() -> tuple[Address | None, Identity | None]:
    """The coordinator of this device's cluster, if it has joined one that answers: the way to it
    is measured too."""
    try:
        folder = ClusterFolder.open(folder_of(""))
        if folder.address and takes_connections(
            address := Address.parse(folder.address), folder.identity
        ):
            return address, folder.identity
    except EdgespecError:
        pass
    return None, None


def _exactness(notes: Notes) -> dict[str, Any]:
    """The tokens of the bundled pair in float64, on a ring of two stages of this machine."""
    options = RingOptions(bundled("base"), bundled("draft"), 2, "float64", "none", "none", "none")
    config = coordinator_config(options, Address(LOOPBACK, 0))
    submit = replace(GREEDY, max_new_tokens=len(TOKENS)).complete(PROMPT)
    with ring_here(config, notes) as client:
        *_, done = client.ask(submit)
    assert isinstance(done, Finished)
    return {
        "same_tokens": tuple(done.token_ids) == TOKENS,
        "token_ids": list(done.token_ids),
        "smallest_margin": done.smallest_margin,
        "tokens_per_second": tokens_per_second(done),
    }


# --- what changes while it is measured ----------------------------------------------------------


@dataclass
class Watch:
    """Looks at heat, throttling and power every second while it is entered."""

    root: Path = ROOT
    celsius: dict[str, list[float]] = field(default_factory=dict)
    watts: dict[str, list[float]] = field(default_factory=dict)
    throttled: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._sensors = SensorReader(root=self.root)
        self._thread = threading.Thread(target=self._run, name="edgespec-watch", daemon=True)

    def __enter__(self) -> Watch:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LOOK_EVERY_S * 5)  # a sensor may hang
        self.look()

    def look(self) -> None:
        """Read all sensors once."""
        for zone in zones(self.root):
            self.celsius.setdefault(zone.name, []).append(zone.celsius)
        for name, watts in power(self.root).items():
            self.watts.setdefault(name, []).append(watts)
        if text := self._sensors.look().text:
            # Without their figures, which differ at every look.
            self.throttled.add(re.sub(r"\d+", "N", text))

    def _run(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            self.look()

    def as_json(self) -> dict[str, object]:
        """Each sensor at first, at most, at last and in the mean."""
        return {
            "celsius": {name: _summary(values) for name, values in self.celsius.items()},
            "watts": {name: _summary(values) for name, values in self.watts.items()},
            "throttled": sorted(self.throttled),
        }


def _summary(values: list[float]) -> dict[str, float]:
    mean = sum(values) / len(values)
    named = {"first": values[0], "most": max(values), "last": values[-1], "mean": mean}
    return {name: round(value, 2) for name, value in named.items()}


def power(root: Path = ROOT) -> dict[str, float]:
    """Watts by the name of the rail, of sensors that the kernel reads: a Jetson's INA3221 tells
    millivolts and milliamperes, others microwatts. Empty where there are none."""
    found = {}
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = system_text(chip / "name") or chip.name
        for file in sorted(chip.glob("power*_input")):
            if (micro := system_number(file)) is not None:
                label = system_text(file.with_name(file.name.replace("_input", "_label")))
                found[label or f"{name} {file.name.removesuffix('_input')}"] = micro / 1e6
        for file in sorted(chip.glob("curr*_input")):
            number = file.name.removeprefix("curr").removesuffix("_input")
            milli = system_number(file), system_number(chip / f"in{number}_input")
            if milli[0] is not None and milli[1] is not None:
                label = system_text(chip / f"in{number}_label")
                found[label or f"{name} {number}"] = milli[0] * milli[1] / 1e6
    return found


# --- what it is, without whose it is ------------------------------------------------------------


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Versions of what computes here; of the kernel the numbers alone, as builders add names."""
    from importlib import metadata

    found = {"python": platform.python_version(), "machine": platform.machine()}
    kernel = _VERSION.match(platform.release())
    found["linux"] = kernel[0] if kernel else ""
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def own_names() -> list[str]:
    """Names of this machine and its user that must not leave it; longest first."""
    found = {socket.gethostname(), socket.gethostname().partition(".")[0], Path.home().name}
    with contextlib.suppress(KeyError, OSError):  # an account without a name
        found.add(getpass.getuser())
    return sorted((name for name in found if len(name) > 1 and name not in _COMMON), key=len)[::-1]


def without_names(content: Any, names: Iterable[str]) -> Any:
    """JSON content in which no text holds a path, an address of a network or a device, or one of
    those names."""
    names = list(names)
    if isinstance(content, dict):
        return {
            without_names(key, names): without_names(value, names) for key, value in content.items()
        }
    if isinstance(content, (list, tuple)):
        return [without_names(value, names) for value in content]
    if not isinstance(content, str):
        return content
    text = _MAC.sub(HIDDEN, _PATH.sub(HIDDEN, content))
    for pattern in (_IPV4, _IPV6):
        text = pattern.sub(_hidden_address, text)
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", HIDDEN, text, flags=re.IGNORECASE)
    return text


def _hidden_address(found: re.Match[str]) -> str:
    """HIDDEN in the place of an address; a time of day, say, stays. A colon may follow it."""
    number = found[0].partition("%")[0].partition("/")[0]
    for one in (number, number.removesuffix(":")):
        try:
            ip_address(one)
        except ValueError:
            continue
        return HIDDEN + number.removeprefix(one)
    return found[0]
