"""GGUF files taken apart and put together again, whatever their parts say."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

NUMBERS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i"},
    **{6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"},
}
STRING, ARRAY = 8, 9


class Raw(bytes):
    """A value as it stands in the file."""


@dataclass
class Key:
    """`value`: a number, bytes for a string, (kind, values) for an array, or Raw."""

    name: bytes
    kind: int
    value: Any


@dataclass
class Entry:
    """A tensor: its sizes, the innermost first, its type and its place in the data."""

    name: bytes
    sizes: list[int]
    kind: int
    place: int


@dataclass
class Parts:
    """A whole file. `counts`: of tensors and keys, where the header says others than there are."""

    keys: list[Key]
    tensors: list[Entry]
    data: bytes
    version: int = 3
    counts: tuple[int, int] | None = None

    @classmethod
    def of(cls, file: bytes) -> Parts:
        version, tensors, keys = struct.unpack_from("<IQQ", file, 4)
        reader = _Reader(file, 24)
        found = [reader.key() for _ in range(keys)]
        entries = [reader.entry() for _ in range(tensors)]
        return cls(found, entries, file[-(-reader.place // 32) * 32 :], version)

    def key(self, name: bytes) -> Key:
        return next(key for key in self.keys if key.name == name)

    def set(self, name: bytes, kind: int, value: Any) -> None:
        self.keys = [key for key in self.keys if key.name != name]
        self.keys.append(Key(name, kind, value))

    def file(self) -> bytes:
        counts = self.counts or (len(self.tensors), len(self.keys))
        made = [b"GGUF", struct.pack("<IQQ", self.version, *counts)]
        for key in self.keys:
            made += [_string(key.name), struct.pack("<I", key.kind), _value(key.kind, key.value)]
        for one in self.tensors:
            sizes = struct.pack(f"<I{len(one.sizes)}Q", len(one.sizes), *one.sizes)
            made += [_string(one.name), sizes, struct.pack("<IQ", one.kind, one.place)]
        header = b"".join(made)
        return header + bytes(-len(header) % 32) + self.data


class _Reader:
    def __init__(self, file: bytes, place: int) -> None:
        self._file, self.place = file, place

    def _take(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._file, self.place)
        self.place += struct.calcsize(code)
        return value

    def _string(self) -> bytes:
        length = self._take("<Q")
        self.place += length
        return self._file[self.place - length : self.place]

    def key(self) -> Key:
        name, kind = self._string(), self._take("<I")
        return Key(name, kind, self._value(kind))

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._take(NUMBERS[kind])
        inner, count = self._take("<I"), self._take("<Q")
        return inner, [self._value(inner) for _ in range(count)]

    def entry(self) -> Entry:
        name = self._string()
        sizes = [self._take("<Q") for _ in range(self._take("<I"))]
        return Entry(name, sizes, self._take("<I"), self._take("<Q"))


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    if isinstance(value, Raw):
        return value
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        inner, values = value
        return struct.pack("<IQ", inner, len(values)) + b"".join(_value(inner, v) for v in values)
    return struct.pack(NUMBERS[kind], value)
