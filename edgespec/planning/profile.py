"""Profile: one device's costs, whatever the model; each figure with its origin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from edgespec.config import QUANTISATIONS
from edgespec.errors import ConfigError

FORMAT = 1
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""The rows of a forward pass at which a row table has figures."""

_TABLES = ("four_bit", "sixteen_bit")
_POSITIVE = ("memory_bytes", "memory_bandwidth", "copy_bandwidth", "link_bandwidth")
_NOT_NEGATIVE = ("layer_seconds", "link_latency")
_NEEDED = ("format", "name", "title", *_TABLES, *_POSITIVE, *_NOT_NEGATIVE)
_MEASURED = (
    "quantisation",
    "quantisations",
    "unusable",
    "disk_bandwidth",
    "draft_seconds",
    "board",
)
"""Keys that only profiles measured on a device have."""
_OPTIONAL = ("cost_model", *_MEASURED)
_PACKED = tuple(name for name in QUANTISATIONS if name != "none")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number, and where it comes from: measured how on what, or estimated from what."""

    value: float
    origin: str

    def to_dict(self) -> dict[str, object]:
        """What a profile's file holds for this figure."""
        return {"value": self.value, "origin": self.origin}


@dataclass(frozen=True, slots=True)
class RowTable:
    """Seconds that a forward pass takes, one entry for each of ROWS.

    For 10^9 bytes of weights; the draft's table: for the whole draft model.
    """

    seconds: tuple[float, ...]
    origin: str

    def at(self, rows: int) -> float:
        """Seconds at `rows` >= 1 rows.

        Linear between two entries; beyond the last one the last slope goes on.
        """
        assert rows >= 1
        end = min(bisect_right(ROWS, rows), len(ROWS) - 1)
        left, right = self.seconds[end - 1], self.seconds[end]
        return left + (right - left) * (rows - ROWS[end - 1]) / (ROWS[end] - ROWS[end - 1])

    def to_dict(self) -> dict[str, object]:
        """What a profile's file holds for this table."""
        seconds = {str(rows): value for rows, value in zip(ROWS, self.seconds, strict=True)}
        return {"seconds": seconds, "origin": self.origin}


@dataclass(frozen=True, slots=True)
class Profile:
    """One device (profiles/README.md has the file format). Bytes, seconds, bytes a second.

    `memory_bytes`: RAM that models may use. `memory_bandwidth`: of the data sheet, or measured
    (its origin says which). `four_bit`, `sixteen_bit`: time to run rows through weights packed in
    4 bits (a scale of 16 bits for each 64 is counted in the bytes) or held in 16. `layer_seconds`:
    what a layer costs on top in every forward pass, whatever its size. `copy_bandwidth`: at which
    attention reads cache rows and a gather moves them. `link_latency`: one way, from application
    to application. `cost_model`: the model that the figures were fitted with, used when the user
    names none; "" if they fit any.

    What only a device can tell, empty or None in a profile that was not measured:
    `quantisations`: a table for each quantisation that runs here, by name, for 10^9 bytes as
    packed by it; `unusable`: why the others do not. `quantisation`: the one that `four_bit` was
    taken from. `disk_bandwidth`: at which a block file is read. `draft_seconds`: one forward pass
    of the draft model that its origin names, head included. `board`: facts, for people.
    """

    name: str
    title: str
    memory_bytes: Figure
    memory_bandwidth: Figure
    four_bit: RowTable
    sixteen_bit: RowTable
    layer_seconds: Figure
    copy_bandwidth: Figure
    link_latency: Figure
    link_bandwidth: Figure
    cost_model: str = ""
    quantisation: str = ""
    quantisations: Mapping[str, RowTable] = field(default_factory=dict, hash=False)
    unusable: Mapping[str, str] = field(default_factory=dict, hash=False)
    disk_bandwidth: Figure | None = None
    draft_seconds: RowTable | None = None
    board: Mapping[str, str] = field(default_factory=dict, hash=False)

    @staticmethod
    def from_dict(data: object, where: str) -> Profile:
        """The profile in a parsed JSON file; `where` names the file in messages.

        Raises ConfigError for a missing or unknown key, and for a value that is not what its key
        needs.
        """
        if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise ConfigError(
                f"{where}: format is {data['format']!r}; this program reads format {FORMAT}"
            )
        entries = _entries(data, where, "the profile", _NEEDED, _OPTIONAL)
        positive = {key: _figure(entries, where, key, positive=True) for key in _POSITIVE}
        other = {key: _figure(entries, where, key, positive=False) for key in _NOT_NEGATIVE}
        return Profile(
            name=_text(entries["name"], where, "name"),
            title=_text(entries["title"], where, "title"),
            memory_bytes=positive["memory_bytes"],
            memory_bandwidth=positive["memory_bandwidth"],
            four_bit=_table(entries, where, "four_bit"),
            sixteen_bit=_table(entries, where, "sixteen_bit"),
            layer_seconds=other["layer_seconds"],
            copy_bandwidth=positive["copy_bandwidth"],
            link_latency=other["link_latency"],
            link_bandwidth=positive["link_bandwidth"],
            cost_model=_text(entries.get("cost_model", ""), where, "cost_model", empty=True),
            **_measured(entries, where),
        )

    def to_dict(self) -> dict[str, object]:
        """What `from_dict` reads: dicts, text and numbers only, in the order of the format."""
        return {
            "format": FORMAT,
            "name": self.name,
            "title": self.title,
            "cost_model": self.cost_model,
            **{key: getattr(self, key).to_dict() for key in (*_POSITIVE, *_NOT_NEGATIVE, *_TABLES)},
            **{key: _plain(getattr(self, key)) for key in _MEASURED if getattr(self, key)},
        }


def _plain(entry: Figure | RowTable | Mapping[str, Any] | str) -> object:
    """An entry of a profile as its file holds it."""
    if isinstance(entry, Figure | RowTable):
        return entry.to_dict()
    if isinstance(entry, Mapping):
        return {key: _plain(value) for key, value in entry.items()}
    return entry


def _measured(entries: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields of _MEASURED that a file has."""
    found: dict[str, Any] = {}
    if "quantisations" in entries:
        tables = _entries(entries["quantisations"], where, "quantisations", (), _PACKED)
        found["quantisations"] = {
            name: _table(tables, where, name, f"quantisations.{name}") for name in tables
        }
    if "unusable" in entries:
        reasons = _entries(entries["unusable"], where, "unusable", (), QUANTISATIONS)
        found["unusable"] = _texts(reasons, where, "unusable")
    if "quantisation" in entries:
        name = _text(entries["quantisation"], where, "quantisation")
        if name not in found.get("quantisations", ()):
            raise ConfigError(f"{where}: quantisation is {name!r}, which has no table of its own")
        found["quantisation"] = name
    if "disk_bandwidth" in entries:
        found["disk_bandwidth"] = _figure(entries, where, "disk_bandwidth", positive=True)
    if "draft_seconds" in entries:
        found["draft_seconds"] = _table(entries, where, "draft_seconds")
    if "board" in entries:
        if not isinstance(entries["board"], dict):
            raise ConfigError(f"{where}: board must be an object, not {entries['board']!r}")
        found["board"] = _texts(entries["board"], where, "board")
    return found


def _texts(entries: dict[str, Any], where: str, path: str) -> dict[str, str]:
    return {key: _text(value, where, f"{path}.{key}") for key, value in entries.items()}


def _entries(
    data: object, where: str, what: str, needed: Collection[str], optional: Collection[str] = ()
) -> dict[str, Any]:
    """`data` if it is an object with exactly these keys."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {what} must be an object, not {data!r}")
    unknown = [repr(key) for key in data if key not in needed and key not in optional]
    if unknown:
        raise ConfigError(
            f"{where}: {what} has unknown keys: {', '.join(unknown)}; "
            f"known ones: {', '.join((*needed, *optional))}"
        )
    missing = [key for key in needed if key not in data]
    if missing:
        raise ConfigError(f"{where}: {what} lacks keys: {', '.join(missing)}")
    return data


def _figure(profile: dict[str, Any], where: str, path: str, *, positive: bool) -> Figure:
    entries = _entries(profile[path], where, path, ("value", "origin"))
    value = _number(entries["value"], where, f"{path}.value", positive=positive)
    return Figure(value, _text(entries["origin"], where, f"{path}.origin"))


def _table(profile: dict[str, Any], where: str, key: str, path: str = "") -> RowTable:
    path = path or key
    entries = _entries(profile[key], where, path, ("seconds", "origin"))
    column = _entries(entries["seconds"], where, f"{path}.seconds", [str(rows) for rows in ROWS])
    seconds: list[float] = []
    for rows in ROWS:
        at = f"{path}.seconds.{rows}"
        value = _number(column[str(rows)], where, at, positive=True)
        if seconds and value < seconds[-1]:
            raise ConfigError(
                f"{where}: {at} is {value!r}, less than for fewer rows; more rows take no less time"
            )
        seconds.append(value)
    return RowTable(tuple(seconds), _text(entries["origin"], where, f"{path}.origin"))


def _number(value: object, where: str, path: str, *, positive: bool) -> float:
    kind = "a positive number" if positive else "a number of at least 0"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"{where}: {path} is {value!r}; it must be {kind}")
    # The upper limit keeps integers out that no float can hold; every sane figure is far below.
    if not (0 < value < 1e30 or (value == 0 and not positive)):  # NaN fails every comparison
        raise ConfigError(f"{where}: {path} is {value!r}; it must be {kind}, below 1e30")
    return value


def _text(value: object, where: str, path: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (empty or value.strip()):
        raise ConfigError(f"{where}: {path} is {value!r}; it must be a text that is not empty")
    return value
