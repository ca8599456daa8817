"""Reader: what a GGUF file says of itself and where its tensors lie; the file is not trusted.

The format is that of ggml's docs/gguf.md, versions 2 and 3, little-endian. Long arrays (a
vocabulary's strings) are passed over, and read when they are asked for: opening takes a fraction of
a second. Whatever the bytes are, what comes is an answer or ModelError, in bounded memory.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import mmap
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError
from edgespec.model.gguf.block_types import BLOCK_TYPES, BlockType, type_name

Digest = Any  # what hashlib makes; its type has no public name
Scalar = int | float | bool | str

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_ENTRIES = 1 << 16  # keys, and tensors; large models have some thousand
_MOST_ELEMENTS = 1 << 20  # of an array; the largest vocabularies have 262,144 tokens
_MOST_HEADER = 1 << 26  # bytes in front of the tensors; the largest known have some 15 MB
_MOST_DIMENSIONS = 4
_MOST_ALIGNMENT = 1 << 16
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SAMPLE = 256  # bytes of each tensor that enter a fingerprint
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class LongArray:
    """An array that was passed over: `count` values of `kind`, from byte `start` of its file."""

    kind: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: from byte `start` of `file`, row by row. `shape` is as torch has it."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows of all its matrices together."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.columns // self.type.columns * self.type.bytes

    @property
    def bytes(self) -> int:
        return self.rows * self.row_bytes

    def read(self, first: int, end: int) -> bytearray:
        """Rows [first, end) as they are stored. Raises ModelError if the file was cut off."""
        wanted = bytearray((end - first) * self.row_bytes)
        try:
            with open(self.file, "rb") as file:
                file.seek(self.start + first * self.row_bytes)
                got = file.readinto(wanted)
        except OSError as error:
            raise ModelError(f"cannot read {self.file} ({error.strerror or error})") from error
        if got != len(wanted):
            raise ModelError(f"{self.file} was cut off while it was in use; download it again")
        return wanted


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file, or all parts of one that was split: `values` are those of the first part."""

    path: Path
    values: Mapping[str, Scalar | LongArray]
    tensors: Mapping[str, StoredTensor]
    header_sha256: str
    """Of all that is in front of the tensors: it names the model's settings and tokenizer."""

    def array(self, key: str) -> list[int] | list[float] | list[bool] | list[str] | None:
        """The values of an array; None if there is no such key. Raises ModelError if it is no
        array, or damaged."""
        place = self.values.get(key)
        if place is None:
            return None
        with _header(self.path) as header:
            if not isinstance(place, LongArray):
                raise ValueError(f"{key} is not a list")
            return header.values(place)


def is_gguf(path: Path) -> bool:
    """By its first bytes, whatever it is called; one that cannot be read is none."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> GgufFile:
    """Read a file's header, and those of the other parts where it is one of several.

    Raises ModelError for a file that is damaged, or not of a kind that is read.
    """
    parts = parts_of(path)
    try:
        stamps = tuple((part.stat().st_size, part.stat().st_mtime_ns) for part in parts)
    except OSError as error:
        raise ModelError(f"cannot read {error.filename} ({error.strerror})") from error
    return _opened(parts, stamps)


def tensor_samples(opened: GgufFile) -> dict[str, list[Any]]:
    """For a fingerprint: each tensor's type, shape, and some bytes from its middle."""
    samples = {}
    for stored in opened.tensors.values():
        middle = stored.rows // 2
        row = stored.read(middle, middle + 1)
        cut = max(0, len(row) - _SAMPLE) // 2
        sample = row[cut : cut + _SAMPLE].hex()
        samples[stored.name] = [stored.type.name, list(stored.shape), sample]
    return samples


def part_names(path: Path) -> tuple[Path, ...]:
    """The file itself, or all parts of the model that it is one of, by their names."""
    part = _PART.fullmatch(path.name)
    if part is None:
        return (path,)
    numbers = range(1, int(part[3]) + 1)
    return tuple(path.with_name(f"{part[1]}-{number:05}-of-{part[3]}.gguf") for number in numbers)


def parts_of(path: Path) -> tuple[Path, ...]:
    """As `part_names`. Raises ModelError if a part is missing."""
    names = part_names(path)
    missing = next((name for name in names if not name.is_file()), None)
    if len(names) != 1 and missing is not None:
        raise ModelError(
            f"{path} is one of {len(names)} parts of a model, and {missing.name} is not beside it; "
            "put all parts into one folder"
        )
    return names


@functools.lru_cache(maxsize=4)
def _opened(parts: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> GgufFile:
    """`stamps`: sizes and times of change, so that a file that was replaced is read again."""
    values: Mapping[str, Scalar | LongArray] = {}
    tensors: dict[str, StoredTensor] = {}
    digest = hashlib.sha256()
    for number, part in enumerate(parts):
        found, listed = _read(part, digest)
        _check_part(part, found, number, len(parts))
        values = values or found
        if twice := tensors.keys() & listed.keys():
            raise ModelError(f"{part} holds {min(twice)!r} again; download the model again")
        tensors |= listed
    return GgufFile(parts[0], values, tensors, digest.hexdigest())


def _check_part(part: Path, values: Mapping[str, object], number: int, count: int) -> None:
    told = (values.get("split.no", 0), values.get("split.count", 0) or 1)
    if told != (number, count):
        raise ModelError(
            f"{part} says that it is part {told[0]} of {told[1]}, its name says {number} of "
            f"{count} (from 0); give all parts the names that they were published with"
        )


def _read(
    path: Path, digest: Digest
) -> tuple[dict[str, Scalar | LongArray], dict[str, StoredTensor]]:
    with _header(path) as header:
        if (first := header.bytes(4)) != _MAGIC:
            pointer = " but Git LFS' pointer to one" if first == b"vers" else ""
            raise ModelError(f"{path} is not a GGUF file{pointer}; download it again")
        version = header.u32()
        if version not in _VERSIONS:
            if version.to_bytes(4, "big") in (v.to_bytes(4, "little") for v in _VERSIONS):
                raise ModelError(f"{path} is written for big-endian machines; take the usual file")
            raise ModelError(
                f"{path} is GGUF version {version}, edgespec reads 2 and 3; take a newer file of "
                "the model, or a newer edgespec"
            )
        tensor_count, key_count = header.count(_MOST_ENTRIES), header.count(_MOST_ENTRIES)
        values: dict[str, Scalar | LongArray] = {}
        for _ in range(key_count):
            key = header.string()
            if key in values:
                raise ValueError(f"{key} is there twice")
            values[key] = header.value()
        entries = [header.entry() for _ in range(tensor_count)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT:
            raise ValueError(f"its alignment is {alignment!r}")
        digest.update(header.seen())
        start = -(-header.place // alignment) * alignment
        tensors = dict(_tensors(path, entries, start, header.size))
        _check_apart(tensors.values())
        return values, tensors


def _tensors(
    path: Path, entries: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int
) -> Iterator[tuple[str, StoredTensor]]:
    names = set()
    for name, shape, number, offset in entries:
        if number not in BLOCK_TYPES:
            known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
            raise ModelError(
                f"{path} holds {name!r} as {type_name(number)}, which edgespec does not read; it "
                f"reads {known}: take a file of this model in Q4_K_M, Q4_0 or Q8_0"
            )
        kind = BLOCK_TYPES[number]
        tensor = StoredTensor(name, kind, shape, path, start + offset)
        if shape[-1] % kind.columns:
            raise ValueError(f"{name!r} has {shape[-1]} columns of type {kind.name}")
        if tensor.start + tensor.bytes > size:
            raise ValueError(
                f"it has {size} bytes, and {name!r} ends at {tensor.start + tensor.bytes}"
            )
        if name in names:
            raise ValueError(f"{name!r} is there twice")
        names.add(name)
        yield name, tensor


def _check_apart(tensors: Iterable[StoredTensor]) -> None:
    """A small file in which all layers are the same bytes would load as a large one."""
    for one, after in itertools.pairwise(sorted(tensors, key=lambda tensor: tensor.start)):
        if one.start + one.bytes > after.start:
            raise ValueError(f"{one.name!r} and {after.name!r} lie in the same bytes")


@contextmanager
def _header(path: Path) -> Iterator[_Header]:
    """The file, mapped; whatever is wrong with it becomes ModelError."""
    try:
        with open(path, "rb") as file:
            if not (size := os.fstat(file.fileno()).st_size):
                raise ValueError("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield _Header(data, size)
    except OSError as error:
        raise ModelError(f"cannot read {path} ({error.strerror or error})") from error
    except (ValueError, OverflowError, struct.error) as error:
        raise ModelError(f"{path} is damaged or cut off ({error}); download it again") from error


class _Header:
    """A place in a mapped file from which numbers and strings are read, within its bounds."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data = data
        self.size = size
        self._end = min(size, _MOST_HEADER)
        self.place = 0

    def seen(self) -> bytes:
        return self._data[: self.place]

    def bytes(self, count: int) -> bytes:
        first = self._pass(count)
        return self._data[first : first + count]

    def u32(self) -> int:
        return int(_U32.unpack_from(self._data, self._pass(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._data, self._pass(8))[0])

    def count(self, most: int) -> int:
        count = self.u64()
        if count > most:
            raise ValueError(f"it counts {count} where {most} is the most")
        return count

    def string(self) -> str:
        return self.bytes(self.count(_MOST_HEADER)).decode("utf-8", "replace")

    def value(self) -> Scalar | LongArray:
        kind = self.u32()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self._number(kind)
        inner, count = self.u32(), self.count(_MOST_ELEMENTS)
        start = self.place
        if inner == _STRING:
            self._pass_strings(count)
        else:
            self._pass(count * _width(inner))
        return LongArray(inner, count, start)

    def values(self, array: LongArray) -> list[int] | list[float] | list[bool] | list[str]:
        """The values of an array, wherever it begins."""
        self.place = array.start
        if array.kind == _STRING:
            return [self.string() for _ in range(array.count)]
        code = f"<{array.count}{_NUMBERS[array.kind][1]}"
        numbers = struct.unpack_from(code, self._data, self._pass(struct.calcsize(code)))
        return [bool(one) for one in numbers] if array.kind == _BOOL else list(numbers)

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape as torch has it, type and place behind the header."""
        name = self.string()
        dimensions = self.u32()
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name!r} has {dimensions} dimensions")
        shape = tuple(reversed([self.u64() for _ in range(dimensions)]))
        if 0 in shape:
            raise ValueError(f"{name!r} has shape {list(shape)}")
        return name, shape, self.u32(), self.u64()

    def _number(self, kind: int) -> int | float | bool:
        _width(kind)
        (number,) = struct.unpack_from(_NUMBERS[kind], self._data, self._pass(_width(kind)))
        return bool(number) if kind == _BOOL else number

    def _pass_strings(self, count: int) -> None:
        """The loop over a whole vocabulary, hence written for speed."""
        place, end, read = self.place, self._end - 8, _U64.unpack_from
        for _ in range(count):
            if place > end:
                raise ValueError("it ends within a list of strings")
            place += 8 + read(self._data, place)[0]
        self.place = place
        self._pass(0)

    def _pass(self, count: int) -> int:
        """Go on by that many bytes; returns where they begin."""
        first = self.place
        if first + count > self._end:
            raise ValueError("it ends within its header")
        self.place = first + count
        return first


def _width(kind: int) -> int:
    if kind not in _NUMBERS:
        raise ValueError(f"it has a value of type {kind}, which edgespec does not know")
    return struct.calcsize(_NUMBERS[kind])
