"""Record: the base of what crosses the wire, its fields' bounded types, and arrays in it.

A record is an array of its fields' values in their order, as msgspec writes and reads it. Reading
holds each field to its type, so that no peer can put in anything else, or more of it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import DecodeError, Meta, Struct, msgpack
from msgspec.structs import asdict, fields, force_setattr

LARGEST = sys.float_info.max

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


class Record(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Values that cross the wire together. Within a message fields at the end that have a default
    may be left out there."""

    def check(self) -> None:
        """Raise ValueError if the fields do not fit each other; called when it was received."""


def take_arrays(record: Record, *names: str) -> None:
    """In `__post_init__`: make arrays of the bytes that were read for these fields.

    They are copied, as received bytes are read-only and may be unaligned.
    """
    for name in names:
        value = getattr(record, name)
        if type(value) is memoryview:
            force_setattr(record, name, np.frombuffer(value, "<i8").astype(np.int64))


def packed_array(value: object) -> object:
    """What msgspec does not know as what it knows. Raises TypeError for anything but numbers of
    numpy, and arrays of one axis and 64 bits."""
    if isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1:
        return np.ascontiguousarray(value, "<i8").tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot cross the wire")


def wrong_field(record: Record) -> str:
    """The first field that cannot cross the wire, and why; "" if all can."""
    for known in fields(record):
        value = getattr(record, known.name)
        try:
            msgpack.decode(msgpack.encode(value, enc_hook=packed_array), type=known.type)
        except (DecodeError, TypeError, ValueError, OverflowError) as problem:
            within = wrong_field(value) if isinstance(value, Record) else ""
            return f"{known.name}.{within}" if within else f"{known.name}: {problem}"
    return ""


def as_dict(record: Record) -> dict[str, Any]:
    """A record's fields by their names, those of records in it too."""
    return {name: _as_dicts(value) for name, value in asdict(record).items()}


def _as_dicts(value: object) -> object:
    if isinstance(value, Record):
        return as_dict(value)
    return tuple(map(_as_dicts, value)) if isinstance(value, tuple) else value
