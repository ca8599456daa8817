"""Safetensors writer: a file written tensor by tensor, so that it never lies in memory whole.

And where its tensors lie then, for those who map it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edgespec.files import replacing

PADDING = "__padding__"
"""How the names of tensors begin that only fill gaps; readers pass over them."""

_ALIGNMENT = 64  # bytes: a cache line, and more than any vector load wants
_CHUNK = 1 << 20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class Slot:
    """A tensor that is going to be written."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What its data takes."""
        return self.shape.numel() * self.dtype.itemsize


class SafetensorsWriter:
    """A safetensors file to which tensors are appended, in the order of its slots.

    The format has its header first, so all slots are known before the first tensor. Every
    tensor starts at a multiple of 64 bytes, so that it can be computed with where the file is
    mapped; the format allows no gaps, so these are tensors too, called PADDING and a number.
    """

    def __init__(self, slots: Sequence[Slot], metadata: Mapping[str, str]) -> None:
        """`slots`: the tensors to be written, in this order, by names that are all different."""
        self._slots = list(_padded(slots))
        self._header = _header(self._slots, metadata)
        self.bytes = len(self._header) + sum(slot.bytes for slot in self._slots)

    @contextmanager
    def into(self, path: Path) -> Iterator[OpenFile]:
        """Write the file under a temporary name; at the end it is on the disk and takes its name.

        An exception leaves nothing behind. Raises OSError as writing does.
        """
        with replacing(path) as file:
            opened = OpenFile(file.fileno(), self._slots)
            opened.put(memoryview(self._header))
            yield opened
            assert opened.complete, "not all tensors were written"


class OpenFile:
    """What SafetensorsWriter gives out to append to."""

    def __init__(self, descriptor: int, slots: Sequence[Slot]) -> None:
        self._descriptor = descriptor
        self._expected = iter(slots)
        self._next: Slot | None = next(self._expected, None)
        self._hash = hashlib.sha256()

    @property
    def complete(self) -> bool:
        """Whether every slot is filled."""
        return self._next is None

    @property
    def sha256(self) -> str:
        """Hash of all that was written so far; 64 hex digits."""
        return self._hash.hexdigest()

    def append(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor, which has to be the one that its slot says."""
        slot = self._next
        assert slot == Slot(name, tensor.shape, tensor.dtype), f"{name} where {slot} was due"
        # Any dtype's bytes, bfloat16 included, which numpy does not have.
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        array: np.ndarray = flat.numpy()
        self.put(array.data)
        self._next = next(self._expected, None)
        if self._next is not None and self._next.name.startswith(PADDING):
            self.put(memoryview(bytes(self._next.bytes)))
            self._next = next(self._expected, None)

    def put(self, data: memoryview) -> None:
        """Write and hash bytes, in pieces that stay in the processor's cache between the two."""
        for start in range(0, len(data), _CHUNK):
            piece = data[start : start + _CHUNK]
            self._hash.update(piece)
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]


def _padded(slots: Sequence[Slot]) -> Iterator[Slot]:
    gaps = 0
    for slot in slots:
        yield slot
        if gap := -slot.bytes % _ALIGNMENT:
            yield Slot(f"{PADDING}{gaps}", torch.Size((gap,)), torch.uint8)
            gaps += 1


def _header(slots: Sequence[Slot], metadata: Mapping[str, str]) -> bytes:
    """The length of the JSON that describes the tensors, 8 bytes, and it; a multiple of 64."""
    described: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for slot in slots:
        described[slot.name] = {
            "dtype": _NAMES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [start, start + slot.bytes],
        }
        start += slot.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def places_in(file: torch.Tensor) -> dict[str, tuple[Slot, int]]:
    """The tensors of a file that a writer made, uint8 [bytes], and at which byte each begins."""
    length = int.from_bytes(bytes(file[:8].tolist()), "little")
    described = json.loads(file[8 : 8 + length].numpy().tobytes())
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    return {
        name: (
            Slot(name, torch.Size(entry["shape"]), dtypes[entry["dtype"]]),
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in described.items()
        if name != "__metadata__"
    }
