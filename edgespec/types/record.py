"""Record: the base of what crosses the wire, its fields' bounded types, and arrays in it.

A record is an array of its fields' values in their order. msgspec holds each field to its type when
it was read, so that no peer can put in anything else, or more of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import asdict, force_setattr

LARGEST = sys.float_info.max

INT64 = np.dtype("<i8")
"""Of an array in a record; numpy's own int64 where that is little-endian, as on all devices."""

MOST_CHARS = 1 << 20
"""Of a text."""

MOST_NUMBERS = 1 << 18
"""Of a list of integers."""

MOST_RECORDS = 256
"""Of a list of records, or of texts."""

T = TypeVar("T")

Whole = Annotated[int, Meta(ge=0)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0.0, le=LARGEST)]
Text = Annotated[str, Meta(max_length=MOST_CHARS)]
Numbers = Annotated[tuple[Int64, ...], Meta(max_length=MOST_NUMBERS)]
Some = Annotated[tuple[T, ...], Meta(max_length=MOST_RECORDS)]

if TYPE_CHECKING:
    IntArray = npt.NDArray[np.int64]
    Buffer = bytes | memoryview
else:  # as they are read
    IntArray = Annotated[memoryview, Meta(max_length=8 * MOST_NUMBERS)]
    Buffer = memoryview


NO_IDS: IntArray = np.zeros(0, np.int64)
NO_IDS.flags.writeable = False


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Values that cross the wire together. Within a message fields at the end that have a default
    may be left out there."""

    def check(self) -> None:
        """Raise ValueError if the fields do not fit each other; called when it was received."""


def take_arrays(record: Record, *names: str) -> None:
    """In `__post_init__`: make read-only arrays of the bytes that were read for these fields."""
    for name in names:
        value = getattr(record, name)
        if type(value) is memoryview:
            force_setattr(record, name, np.frombuffer(value, INT64) if value else NO_IDS)


def as_dict(record: Record) -> dict[str, Any]:
    """A record's fields by their names, those of records in it too."""
    return {name: _as_dicts(value) for name, value in asdict(record).items()}


def _as_dicts(value: object) -> object:
    if isinstance(value, Record):
        return as_dict(value)
    return tuple(map(_as_dicts, value)) if isinstance(value, tuple) else value
