"""Block files: a block, or the output matrix, as one safetensors file that is computed from."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from edgespec.config import FILE, Quantisation
from edgespec.errors import BlockDamaged, ConfigError, ModelError
from edgespec.model.gguf.block_types import NAMED_TYPES
from edgespec.model.inventory import (
    Needed,
    block_inventory,
    head_inventory,
    packed_slots,
    raw_slot,
)
from edgespec.model.manifest import REMEDY, BlockEntry, FileEntry, size_text
from edgespec.model.model_config import ModelConfig
from edgespec.model.quantised.linear import stored_parts
from edgespec.model.safetensors_writer import (
    PADDING,
    OpenFile,
    SafetensorsWriter,
    Slot,
    places_in,
)
from edgespec.model.source import TensorSource, shaped
from edgespec.schema import as_type, parse_json

Progress = Callable[[int, int], None]
"""Hears how much is done, and of how much."""

_FORMS = "forms"
"""The entry of the file's metadata that has the form of each matrix, where they differ."""

_PART = re.compile(r"(.*\.weight)\.[^.]+")


def write_block(
    source: TensorSource,
    first: int,
    end: int,
    path: Path,
    progress: Progress | None = None,
) -> BlockEntry:
    """Write layers [first, end) into a file as the source has them: packed, or plain.

    The first block has the embedding too, the last one the final norm. One tensor at a time is
    read and packed, so that memory holds one of them and the packed form of a few, however large
    the block. `progress` hears of layers. Raises ModelError for what the source cannot give, and
    ConfigError if the file cannot be written.
    """
    needed = block_inventory(source, first, end)
    about = {"layers": f"{first}-{end - 1}", "quantisation": source.quantisation.name}
    if source.quantisation == FILE:
        about[_FORMS] = _forms_text(needed)
    count, sha256 = _write(source, needed, path, about, progress)
    return BlockEntry(path.name, count, sha256, first, end)


def write_head(source: TensorSource, path: Path) -> FileEntry:
    """Write the output matrix (the embedding, where the two are tied) in the form that the source
    has for it. Raises as `write_block`."""
    needed = head_inventory(source)
    about = {"layers": "head", _FORMS: _forms_text(needed)}
    count, sha256 = _write(source, needed, path, about, None)
    return FileEntry(path.name, count, sha256)


def plain_dtype(source: TensorSource, needed: Sequence[Needed]) -> torch.dtype:
    """The dtype of the first tensor that is plain (every layer has such norms, a head may have
    none: then that of the final norm)."""
    plain = (one.name for one in needed if not one.packed and one.blocks is None)
    return source.tensor(next(plain, "model.norm.weight")).dtype


def _write(
    source: TensorSource,
    needed: Sequence[Needed],
    path: Path,
    about: dict[str, str],
    progress: Progress | None,
) -> tuple[int, str]:
    """Bytes and SHA-256 of the file that these tensors make."""
    batches = list(_batches(needed))
    slots = [_slots(source, batch) for batch in batches]
    layers = sorted({one.layer for one in needed if one.layer >= 0})
    writer = SafetensorsWriter([slot for some in slots for slot in some], {"format": "pt", **about})
    try:
        with writer.into(path) as file:
            for index, (batch, some) in enumerate(zip(batches, slots, strict=True)):
                _append(source, batch, some, file)
                layer = batch[0].layer
                last = index + 1 == len(batches) or batches[index + 1][0].layer != layer
                if last and layer >= 0 and progress is not None:
                    progress(layers.index(layer) + 1, len(layers))
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}, which needs {size_text(writer.bytes)} "
            f"({error.strerror or error}); make room, or choose another folder"
        ) from error
    return writer.bytes, file.sha256


def _batches(needed: Sequence[Needed]) -> Iterator[list[Needed]]:
    """In the same order, matrices of one layer that follow each other and have the same columns and
    form together: what multiplies the same rows can be one matrix without a copy if their codes lie
    one behind the other."""

    def alike(one: Needed) -> object:
        return (one.layer, one.form, one.shape[1]) if one.packed else one.name

    for _, batch in groupby(needed, alike):
        yield list(batch)


def _slots(source: TensorSource, batch: Sequence[Needed]) -> list[Slot]:
    """Those of a batch, part by part."""
    if not batch[0].packed:
        (one,) = batch
        if one.blocks is not None:
            return [raw_slot(one, one.blocks)]
        if one.looked_up:
            return [Slot(one.name, one.shape, source.table(one.name)[1].dtype)]
        return [Slot(one.name, one.shape, shaped(source, one.name, one.shape).dtype)]
    parts = zip(*map(packed_slots, batch), strict=True)
    return [slot for same in parts for slot in same]


def _append(
    source: TensorSource, batch: Sequence[Needed], slots: Sequence[Slot], file: OpenFile
) -> None:
    """Write a batch. A function of its own, so that it is freed before the next is read."""
    if not batch[0].packed:
        (one,) = batch
        tensor = source.table(one.name)[1] if one.looked_up else source.tensor(one.name)
        file.append(slots[0].name, tensor.contiguous())
        return
    packed = {
        f"{one.name}.{part}": tensor
        for one in batch
        for part, tensor in source.packed(one.name, one.shape).items()
    }
    for slot in slots:
        file.append(slot.name, packed[slot.name])


def _forms_text(needed: Sequence[Needed]) -> str:
    forms = {one.name: asdict(one.form) for one in needed if one.packed}
    return json.dumps(forms, separators=(",", ":"))


def _forms_in(metadata: Mapping[str, str], path: Path) -> dict[str, Quantisation]:
    """The form of each matrix that is packed, by its name. Raises BlockDamaged."""
    where = f"{_FORMS} of {path}"
    try:
        forms = parse_json(metadata.get(_FORMS, "{}"), where, REMEDY)
        return as_type(dict[str, Quantisation], forms, where, REMEDY)
    except (ConfigError, RecursionError) as problem:
        raise BlockDamaged(str(problem)) from None


class BlockFile:
    """A TensorSource over one block file, or over the head's, that stays mapped.

    Nothing is copied: tensors are views of the file, which the system reads as they are used. It
    is for BlockFolder to open one, as only a file that was verified may be loaded.
    """

    mapped = True

    def __init__(self, path: Path, config: ModelConfig, quantisation: Quantisation) -> None:
        """Raises BlockDamaged if it cannot be opened."""
        self.path = path
        self.config = config
        self.layers = int(config.num_hidden_layers)
        self.quantisation = quantisation
        try:
            with safe_open(str(path), framework="pt", device="cpu") as checked:
                self._forms = _forms_in(checked.metadata() or {}, path)
            # Mapped once as a whole, so that tensors that lie side by side can be seen as one.
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._file = torch.frombuffer(self._map, dtype=torch.uint8)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise BlockDamaged(f"cannot open {path} ({error}); {REMEDY}") from error
        self._places = {
            name: place
            for name, place in places_in(self._file).items()
            if not name.startswith(PADDING)
        }

        self._read: list[tuple[int, int]] = []

    def give_back(self) -> None:
        """Let the system drop from its memory what was asked for since the last time: after
        this, tensors are read from the disk again if they are used again."""
        with self.path.open("rb") as file:
            for begin, size in self._read:
                first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
                whole = (begin + size) // mmap.PAGESIZE * mmap.PAGESIZE - first
                if whole > 0:
                    # What is mapped stays in the system's cache.
                    self._map.madvise(mmap.MADV_DONTNEED, first, whole)
                    os.posix_fadvise(file.fileno(), first, whole, os.POSIX_FADV_DONTNEED)
        self._read.clear()

    @property
    def names(self) -> frozenset[str]:
        parts = ((name, _PART.fullmatch(name)) for name in self._places)
        return frozenset(name if part is None else part[1] for name, part in parts)

    def form(self, name: str) -> Quantisation:
        if self.quantisation != FILE:
            return self.quantisation
        return self._forms.get(name, Quantisation())

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._places:
            raise ModelError(f"{self.path} has no tensor {name!r}; {REMEDY}")
        slot, begin = self._places[name]
        self._read.append((begin, slot.bytes))
        data = self._file.narrow(0, begin, slot.bytes)
        return data.view(slot.dtype).view(slot.shape)

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        kind = next((one for one in NAMED_TYPES if f"{name}.{one}" in self._places), "")
        return kind, self.tensor(f"{name}.{kind}" if kind else name)

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        parts = {}
        form = self.form(name)
        for part, expected in stored_parts(form, shape).items():
            tensor = self.tensor(f"{name}.{part}")
            if (tensor.shape, tensor.dtype) != expected:
                raise ModelError(
                    f"'{name}.{part}' in {self.path} is {tensor.dtype} of {list(tensor.shape)}, "
                    f"but {form.name} has {expected[1]} of {list(expected[0])}; {REMEDY}"
                )
            parts[part] = tensor
        return parts
