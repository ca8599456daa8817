"""GGUF checkpoint: a TensorSource over a GGUF file, one tensor at a time, packed ones in the stored
forms of model.quantised, nothing rounded again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from edgespec.config import FILE, Quantisation
from edgespec.errors import ModelError
from edgespec.model.families import key_owners
from edgespec.model.gguf.architectures import Place, places
from edgespec.model.gguf.block_types import BlockType
from edgespec.model.gguf.files import GgufFiles
from edgespec.model.gguf.unpacking import PLAIN, Unpacked, numbers_of, unpack
from edgespec.model.latent import latent_form
from edgespec.model.loader import open_config
from edgespec.model.quantised.linear import stored
from edgespec.model.quantised.rounding import Packed
from edgespec.model.reading import reading
from edgespec.model.source import check_shape

_FORMS = {
    "Q4_0": Quantisation("int4", 32, scales="float16"),
    "Q4_1": Quantisation("int4", 32, zeros="low", scales="float16"),
    "Q5_0": Quantisation("int8", 32, scales="float16"),
    "Q5_1": Quantisation("int8", 32, zeros="low", scales="float16"),
    "Q8_0": Quantisation("int8", 32, scales="float16"),
    "Q2_K": Quantisation("int4", 16, double=True, zeros="low", scales="float16"),
    "Q3_K": Quantisation("int4", 16, double=True, scales="float16"),
    "Q4_K": Quantisation("int4", 32, double=True, zeros="low", scales="float16"),
    "Q5_K": Quantisation("int8", 32, double=True, zeros="low", scales="float16"),
    "Q6_K": Quantisation("int8", 16, double=True, scales="float16"),
    "IQ4_NL": Quantisation("iq4", 32, scales="float16"),
    "IQ4_XS": Quantisation("iq4", 32, double=True, scales="float16"),
    "MXFP4": Quantisation("fp4", 32, scales="bfloat16"),
}
"""What each type is, code for code. Codes of 2 and 3 bits take 4, those of 5 and 6 take 8."""

_MIDDLE = 8  # of the codes of "int4"

Rows = torch.Tensor | slice
"""Which rows of a matrix."""


def form_of(kind: BlockType) -> Quantisation:
    """The form that holds a type as it is; plain types stay plain."""
    return _FORMS.get(kind.name, Quantisation())


def stored_form(
    kind: BlockType, shape: torch.Size, chunks: Iterable[tuple[Rows, torch.Tensor]]
) -> Packed:
    """The stored form of a matrix [out, columns] of a packed type.

    `chunks`: all its rows, some at a time: which they are, and their bytes [n, row bytes].
    """
    form = form_of(kind)
    codes = torch.empty(shape, dtype=torch.int8 if form.kind == "int8" else torch.uint8)
    scales: Packed = {}
    for rows, data in chunks:
        unpacked = unpack(kind, data.reshape(-1, kind.bytes))
        # Of a type without offsets the codes have their middle at 0.
        low = _MIDDLE if form.kind == "int4" and not form.zeros else 0
        codes[rows] = (unpacked.codes + low).view(codes.dtype).view(data.shape[0], -1)
        for name, part in _scales(unpacked).items():
            flat = part.view(data.shape[0], -1)
            if name not in scales:
                scales[name] = torch.empty(shape[0], flat.shape[1], dtype=flat.dtype)
            scales[name][rows] = flat
    return stored(codes, form, scales)


def _scales(unpacked: Unpacked) -> Packed:
    """As `group_scales.scale_parts` has them, by blocks."""
    parts: Packed = {}
    if unpacked.scale_steps is None:
        parts["scales"] = unpacked.scale
    else:
        parts |= {"scales": unpacked.scale_steps, "blocks": unpacked.scale}
    if unpacked.offset is None:
        return parts
    if unpacked.offset_steps is None:
        return parts | {"zeros": unpacked.offset}
    return parts | {"zeros": unpacked.offset_steps, "zero_blocks": -unpacked.offset}


_CHUNK = 1 << 22  # bytes of numbers in float32 that are unpacked at a time


class GgufCheckpoint:
    """The model in a GGUF file: its configuration, and its tensors, in their codes or dequantised.

    Opening it reads the header, no weights. Raises ModelError for a file that cannot be used.
    """

    mapped = True
    """What `tensor` returns is memory of its own, and may be kept."""

    def __init__(self, files: GgufFiles, quantisation: Quantisation) -> None:
        """`quantisation`: FILE, or "none" for the values that codes stand for."""
        self.path: Path = files.path
        self.quantisation = quantisation
        self.config = open_config(files.file("config.json"), files.path)
        self.layers = int(self.config.num_hidden_layers)
        self._files = files

    @cached_property
    def _places(self) -> dict[str, Place]:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        unread, latent = frozenset(key_owners(self.config)), latent_form(self.config)
        sizes = int(heads), int(kv_heads), self.layers
        how = *sizes, unread, latent.straight if latent else 0
        found, head = places(self._files.opened, *how), self._files.head
        if head is not None:
            last = f"model.layers.{self.layers}."
            found |= {n: one for n, one in places(head, *how).items() if n.startswith(last)}
        return found

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def form(self, name: str) -> Quantisation:
        if self.quantisation != FILE:
            return self.quantisation
        place = self._place(name)
        # Of two types, or groups that are columns: their values.
        mixed = place.behind is not None and place.behind.type != place.stored.type
        return Quantisation() if mixed or place.mirrored else form_of(place.stored.type)

    def tensor(self, name: str) -> torch.Tensor:
        """See TensorSource: float32 where it is packed, else as it is stored."""
        halves = [self._numbers(name, half) for half in _halves(self._place(name))]
        return halves[0] if len(halves) == 1 else torch.cat(halves)

    def _numbers(self, name: str, place: Place) -> torch.Tensor:
        """Of one stored tensor."""
        dtype = PLAIN.get(place.stored.type.name, torch.float32)
        made = torch.empty(place.shape, dtype=dtype)
        rows = made.view(-1, place.shape[-1])
        for target, data in _chunks(self.path, name, place):
            rows[target] = numbers_of(place.stored.type, data)
        if place.heads and made.dim() == 1:
            order = _unpaired(self.path, name, made.shape[0], place.heads)
            made = torch.empty_like(made).index_copy_(0, order, made)
        if place.decay:
            if not bool((made < 0).all() and made.isfinite().all()):
                raise ModelError(
                    f"{name!r} in {self.path} is of states that grow; take another file of the "
                    "model"
                )
            made = made.double().neg_().log_().float()
        if place.flat:
            made = made.flatten()
        if place.mirrored:
            made = made.T.contiguous()
        return made.sub_(place.less) if place.less else made

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        """See TensorSource; the file stays mapped."""
        place = self._place(name)
        stored, count = place.stored, torch.Size(place.shape[:-1]).numel()
        with reading(stored.file):
            rows = np.memmap(
                stored.file, np.uint8, "c", stored.start, (stored.rows, stored.row_bytes)
            )
        first = stored.type.row_bytes(place.column)
        end = first + stored.type.row_bytes(place.shape[-1])
        own = torch.from_numpy(rows[place.first : place.first + count, first:end])
        return ("", numbers_of(stored.type, own)) if stored.type.plain else (stored.type.name, own)

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        place = self._place(name)
        if self.form(name).kind == "none":
            raise ModelError(f"{name!r} in {self.path} is not packed")
        check_shape(self, name, torch.Size(place.shape), shape)
        chunks = (
            (_later(rows, number * half.stored.rows), data)
            for number, half in enumerate(_halves(place))
            for rows, data in _chunks(self.path, name, half)
        )
        return stored_form(place.stored.type, shape, chunks)

    def _place(self, name: str) -> Place:
        if name not in self._places:
            raise ModelError(
                f"the model in {self.path} has no tensor {name!r}, which models of its "
                "architecture have; take another file of the model"
            )
        return self._places[name]


def _halves(place: Place) -> list[Place]:
    """What it is made of: itself, unless it is two stored tensors."""
    if place.behind is None:
        return [place]
    each = replace(place, shape=place.stored.shape, behind=None)
    return [each, replace(each, stored=place.behind)]


def _later(rows: Rows, by: int) -> Rows:
    return slice(rows.start + by, rows.stop + by) if isinstance(rows, slice) else rows + by


def _chunks(path: Path, name: str, place: Place) -> Iterator[tuple[Rows, torch.Tensor]]:
    """Some rows at a time: where they belong among the tensor's, and their bytes [n, row bytes]."""
    stored = place.stored
    count = torch.Size(place.shape[:-1]).numel()
    order = (
        _unpaired(path, name, count, place.heads) if place.heads and len(place.shape) > 1 else None
    )
    step = max(1, _CHUNK // (4 * stored.columns))
    begin = stored.type.row_bytes(place.column)
    own = slice(begin, begin + stored.type.row_bytes(place.shape[-1]))
    for first in range(0, count, step):
        end = min(first + step, count)
        data = torch.frombuffer(
            stored.read(place.first + first, place.first + end), dtype=torch.uint8
        )
        target = slice(first, end) if order is None else order[first:end]
        yield target, data.view(end - first, -1)[:, own]


def _unpaired(path: Path, name: str, rows: int, heads: int) -> torch.Tensor:
    """Where each stored row belongs: in the file those of a pair are neighbours, in transformers'
    models half a head apart."""
    if rows % (2 * heads):
        raise ModelError(
            f"{name!r} in {path} has {rows} rows for {heads} heads; take another file of the model"
        )
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()
