"""Profile: one device's costs, whatever the model; each figure with its origin."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, field, to_builtins

from edgespec.config import NAMED
from edgespec.schema import FileStruct, Text, as_type, check_version
from edgespec.types.draft_pass import TokenChoice

FORMAT = 2
ROWS = (1, 2, 4, 8, 16, 32, 64)
"""The rows of a forward pass at which a row table has figures."""

DATA_SHEET: Literal["data-sheet"] = "data-sheet"
RowPrice: TypeAlias = float | Literal["data-sheet"]
"""What a further row of a pass costs in the place of what a profile's tables say: a share of a pass
of one row, or the least that the data sheet allows (see Profile.least_row_seconds)."""

_KEYS = tuple(map(str, ROWS))
_REMEDY = "profiles/README.md describes the format"
_MEASURE_AGAIN = "measure it again with `edgespec profile`"

# The upper limit keeps integers out that no float can hold; every sane figure is far below.
Positive = Annotated[float, Meta(gt=0, lt=1e30)]
NotNegative = Annotated[float, Meta(ge=0, lt=1e30)]


class Figure(FileStruct, frozen=True):
    """One number, and where it comes from: measured how on what, or estimated from what."""

    value: NotNegative
    origin: Text


class RowTable(FileStruct, frozen=True):
    """Seconds that a forward pass takes, one entry for each of ROWS.

    For 10^9 bytes of weights; the draft's table: for the whole draft model.
    """

    seconds: dict[str, Positive]
    origin: Text

    def __post_init__(self) -> None:
        if missing := [rows for rows in _KEYS if rows not in self.seconds]:
            raise ValueError(f"seconds lacks the keys {', '.join(missing)}")
        if unknown := [rows for rows in self.seconds if rows not in _KEYS]:
            raise ValueError(f"seconds has unknown keys: {', '.join(map(repr, unknown))}")
        for fewer, rows in pairwise(_KEYS):
            if self.seconds[rows] < self.seconds[fewer]:
                raise ValueError(
                    f"seconds.{rows} is {self.seconds[rows]!r}, less than for fewer rows; more "
                    "rows take no less time"
                )

    def __hash__(self) -> int:
        return hash((*self.seconds.values(), self.origin))

    @staticmethod
    def of(seconds: Iterable[float], origin: str) -> RowTable:
        """From the seconds for each of ROWS."""
        return RowTable(dict(zip(_KEYS, seconds, strict=True)), origin)

    def at(self, rows: int) -> float:
        """Seconds at `rows` >= 1 rows.

        Linear between two entries; beyond the last one the last slope goes on.
        """
        assert rows >= 1
        end = min(bisect_right(ROWS, rows), len(ROWS) - 1)
        left, right = self.seconds[_KEYS[end - 1]], self.seconds[_KEYS[end]]
        return left + (right - left) * (rows - ROWS[end - 1]) / (ROWS[end] - ROWS[end - 1])


KERNELS = {
    "triton": "edgespec's kernels for GPUs",
    "compiled": "edgespec's kernels in C",
    "torch": "torch's own operations",
}
"""What the rows of a measured device may have been multiplied by."""


class LogitTime(FileStruct, frozen=True):
    """Seconds of a piece of work on logits: `call`, and `million` for each 10^6 of them."""

    call: NotNegative
    million: NotNegative

    def seconds(self, logits: int) -> float:
        return self.call + self.million * logits / 1e6


class LogitTimes(FileStruct, frozen=True):
    """The times of one kind of work on logits, for each way to take tokens from them."""

    greedy: LogitTime
    sampled: LogitTime
    filtered: LogitTime
    origin: Text

    def of(self, way: TokenChoice) -> LogitTime:
        return {"greedy": self.greedy, "sampled": self.sampled, "filtered": self.filtered}[way]


class LoopSeconds(FileStruct, frozen=True):
    """Seconds that the coordinator's own loop takes: for an event, and for each row that comes or
    goes with it (see backends.charged_time)."""

    event: NotNegative
    row: NotNegative
    origin: Text

    def seconds(self, rows: int) -> float:
        return self.event + self.row * rows


class Profile(FileStruct, frozen=True, kw_only=True):
    """One device (profiles/README.md has the file format). Bytes, seconds, bytes a second.

    `memory_bytes`: RAM that models may use. `memory_bandwidth`: of the data sheet, or measured
    (its origin says which). `four_bit`, `sixteen_bit`: time to run rows through weights packed in
    4 bits (a scale of 16 bits for each 64 is counted in the bytes) or held in 16. `layer_seconds`:
    what the device takes for a layer on top in every forward pass, whatever its size, were it a
    CUDA graph. `launch_seconds`: what the host takes to launch the operations one by one of a
    layer that has USUAL_OPERATIONS (see planning.operations);
    `launches_ahead`: whether the device computes meanwhile, as GPUs do. `least_row_seconds`: by the
    data sheet's arithmetic, of one row through 10^9 bytes in 4 bits; None: as the tables have it.
    `choosing`: taking the
    token after one row of logits, on the host; `ranking`: the best guesses of some rows at once,
    where the draft's logits are; both without making noise. `noise`: making that of one position,
    for 10^6 tokens. `copy_bandwidth`: at which attention reads cache rows and a gather moves them.
    `link_latency`: one way, from application to application. `loop_seconds`: of the coordinator's
    own Python; None: free, as in profiles measured before there was such a figure. `cost_model`:
    the model that the figures were fitted with, used when the user names none; "" if they fit any.

    Known only from measurements on a device; empty or None in other profiles:
    `quantisations`: a table for each quantisation that runs here, by name, for 10^9 bytes as
    packed by it ("file": in the file of the model that was measured); `unusable`: why the others
    do not. `quantisation`: the one that `four_bit` was taken from. `kernels`: what multiplied the
    rows, one of KERNELS. `board`: facts for users.
    """

    name: Text
    title: Text
    cost_model: str = ""
    memory_bytes: Figure
    memory_bandwidth: Figure
    copy_bandwidth: Figure
    link_bandwidth: Figure
    layer_seconds: Figure
    launch_seconds: Figure
    launches_ahead: bool
    least_row_seconds: Figure | None = None
    choosing: LogitTimes
    ranking: LogitTimes
    noise: Figure
    link_latency: Figure
    four_bit: RowTable
    sixteen_bit: RowTable
    loop_seconds: LoopSeconds | None = None
    quantisation: str = ""
    kernels: str = ""
    quantisations: dict[str, RowTable] = field(default_factory=dict)
    unusable: dict[str, Text] = field(default_factory=dict)
    board: dict[str, Text] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bandwidth", "copy_bandwidth", "link_bandwidth"):
            _check_positive(name, getattr(self, name))
        packed = [name for name in NAMED if name != "none"]
        for where, names, known in (
            ("quantisations", self.quantisations, packed),
            ("unusable", self.unusable, list(NAMED)),
        ):
            if unknown := [name for name in names if name not in known]:
                raise ValueError(
                    f"{where} has unknown keys: {', '.join(map(repr, unknown))}; known ones: "
                    f"{', '.join(known)}"
                )
        if self.kernels not in ("", *KERNELS):
            raise ValueError(f"kernels is {self.kernels!r}; known ones: {', '.join(KERNELS)}")
        if self.quantisation and self.quantisation not in self.quantisations:
            raise ValueError(
                f"quantisation is {self.quantisation!r}, which has no table of its own"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.memory_bytes, self.four_bit, self.sixteen_bit))

    @property
    def has_timed_kernel(self) -> bool:
        """Whether `four_bit` comes from a kernel that ran on the device."""
        return bool(self.quantisation)

    @staticmethod
    def from_dict(data: object, where: str) -> Profile:
        """The profile in a parsed JSON file; `where` names the file. Raises ConfigError."""
        content = check_version(data, where, _REMEDY, ("format", FORMAT), _MEASURE_AGAIN)
        return as_type(Profile, content, where, _REMEDY)

    def to_dict(self) -> dict[str, object]:
        """What `from_dict` reads: dicts, text and numbers only, in the order of the format."""
        content = to_builtins(self)
        empty: tuple[object, ...] = (None, "", {})
        kept = {k: value for k, value in content.items() if value not in empty or k == "cost_model"}
        return {"format": FORMAT, **kept}


def _check_positive(name: str, figure: Figure) -> None:
    if figure.value == 0:
        raise ValueError(f"{name}.value is 0; it must be a number > 0")
