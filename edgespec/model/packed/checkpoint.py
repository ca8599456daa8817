"""Packed checkpoint: a folder of another program's quantised matrices as a TensorSource; and the
dialect of bitsandbytes."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

import torch
from msgspec import Meta, MsgspecError, Struct, json

from edgespec.config import FILE, Quantisation
from edgespec.errors import ModelError
from edgespec.model.loader import Checkpoint, TensorPlace, places
from edgespec.model.packed import settings
from edgespec.model.packed.floats import Fp8, Mxfp4
from edgespec.model.packed.grouped import Awq, CompressedTensors, Gptq
from edgespec.model.packed.matrix import REMEDY, Dialect, PackedMatrix, PartReader, Parts
from edgespec.model.packed.settings import Packing
from edgespec.model.quantised import nf4
from edgespec.model.quantised.linear import dequantised, stored
from edgespec.model.quantised.rounding import Packed
from edgespec.model.source import check_shape

_STATE = "weight.quant_state.bitsandbytes__nf4"
_Count = Annotated[int, Meta(gt=0)]


class _State(Struct):
    """What edgespec needs of a matrix' state; its `dtype` is that of the model before."""

    quant_type: Literal["nf4"]
    shape: tuple[_Count, _Count]
    blocksize: _Count
    nested_blocksize: Literal[256] | None = None
    nested_dtype: Literal["float32"] = "float32"
    nested_offset: float = 0.0


class BitsAndBytes:
    """Codes two a byte over the whole matrix, and the state of their quantisation, as bitsandbytes
    saves a layer in NF4.

    `weight` (bytes, or their bits as another dtype), `.absmax` (float32, or with double
    quantisation codes of 8 bits for `.nested_quant_map`, `.nested_absmax` and an offset),
    `.quant_map`, and `.quant_state.bitsandbytes__nf4`, JSON as bytes.
    """

    mark = _STATE
    parts = (
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.nested_absmax",
        "weight.nested_quant_map",
        _STATE,
    )

    def __init__(self, packing: dict[str, Any]) -> None:
        """All that `packing` may say is said by the tensors too."""

    def matrix(self, parts: Parts) -> PackedMatrix:
        read = PartReader(parts)
        state = _state(read)
        shape, group = torch.Size(state.shape), state.blocksize
        if shape[1] % group:
            raise ModelError(
                f"its {shape[1]} columns are no whole number of blocks of {group}; take its "
                "original 16-bit release with --quant int8"
            )
        form = Quantisation("nf4", group, double=state.nested_blocksize is not None)
        return PackedMatrix(shape, form, lambda: _pack(read, state, form))


def _state(read: PartReader) -> _State:
    content = bytes(read.any(_STATE, 1).tolist())
    try:
        return json.decode(content, type=_State)
    except MsgspecError as error:
        raise ModelError(f"its {_STATE!r} cannot be read ({error}); {REMEDY}") from None


def _pack(read: PartReader, state: _State, form: Quantisation) -> Packed:
    shape = torch.Size(state.shape)
    levels = nf4.library().functional.get_4bit_type("nf4", device="cpu")
    if not torch.equal(read.part("weight.quant_map", (16,), torch.float32), levels):
        raise ModelError(f"its 'weight.quant_map' has not the levels of NF4; {REMEDY}")
    # How bytes are spread over two dimensions, and the dtype whose bits they are, mean nothing.
    codes = read.any("weight", 2).flatten().view(torch.uint8)
    if 2 * codes.numel() != shape.numel():
        raise ModelError(f"its 'weight' holds {2 * codes.numel()} codes of {list(shape)}; {REMEDY}")
    expected = nf4.stored_parts(form, shape)
    size, dtype = expected["scales"]
    scales = {"scales": read.part("weight.absmax", (size.numel(),), dtype).view(size)}
    if form.double:
        for part, name in (("nested_scales", "nested_absmax"), ("nested_map", "nested_quant_map")):
            size, dtype = expected[part]
            scales[part] = read.part(f"weight.{name}", tuple(size), dtype)
        scales["nested_mean"] = torch.tensor([state.nested_offset])
    # Copied, as what was read may be a view of the file.
    return stored(codes.view(shape[0], -1).clone(), form, {n: p.clone() for n, p in scales.items()})


_DIALECTS: dict[str, Any] = {
    settings.GPTQ: Gptq,
    settings.AWQ: Awq,
    settings.COMPRESSED: CompressedTensors,
    settings.BITSANDBYTES: BitsAndBytes,
    settings.MXFP4: Mxfp4,
    settings.FP8: Fp8,
}
_PLAIN = Quantisation()


def _dialect(packing: Packing) -> Dialect:
    floats = packing.method == settings.COMPRESSED and settings.float_weights(packing.settings)
    made: Dialect = _DIALECTS[settings.FP8 if floats else packing.method](packing.settings)
    return made


class PackedCheckpoint:
    """A TensorSource over a checkpoint whose config.json has a quantization_config.

    Which matrices are packed is what its files say: they hold other tensors for those. Codes and
    scales are taken as they are; nothing is rounded. Of a matrix for all heads of latents each head
    has values. Memory holds one matrix at a time.
    """

    mapped = False

    def __init__(
        self, checkpoint: Checkpoint, packing: Packing, quantisation: Quantisation
    ) -> None:
        """`quantisation`: FILE, or "none" for the values that codes stand for."""
        self._files = checkpoint
        self.path, self.config, self.layers = checkpoint.path, checkpoint.config, checkpoint.layers
        self.quantisation = quantisation
        self._dialect = _dialect(packing)
        self._forms: dict[str, Quantisation] = {}
        self._last: tuple[str, torch.Tensor] = "", torch.empty(0)

    @cached_property
    def _packed(self) -> frozenset[str]:
        """The names of packed weights."""
        mark = f".{self._dialect.mark}"
        marked = (name.removesuffix(mark) for name in self._files.names if name.endswith(mark))
        return frozenset(f"{module}.weight" for module in marked)

    @cached_property
    def _by_head(self) -> dict[str, TensorPlace]:
        """What each head has of packed weights for all, by its name."""
        found = places(dict.fromkeys(self._packed, ""), self.config)
        return {name: place for name, place in found.items() if place.cut}

    @cached_property
    def names(self) -> frozenset[str]:
        modules = [name.removesuffix("weight") for name in self._packed]
        parts = {module + part for module in modules for part in self._dialect.parts}
        whole = {place.name for place in self._by_head.values()}
        return self._files.names - parts | self._packed - whole | self._by_head.keys()

    def form(self, name: str) -> Quantisation:
        if self.quantisation != FILE or name not in self._packed:
            return _PLAIN
        if name not in self._forms:
            self._forms[name] = self._matrix(name).form
        return self._forms[name]

    def tensor(self, name: str) -> torch.Tensor:
        """What is not packed as it is stored, what is as float32 values."""
        place = self._by_head.get(name)
        if place is not None:
            if self._last[0] != place.name:
                self._last = place.name, self.tensor(place.name)
            return place.part_of(self._last[1])
        if name not in self._packed:
            return self._files.tensor(name)
        matrix = self._matrix(name)
        return dequantised(self._pack(name, matrix), matrix.shape, matrix.form, torch.float32)

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        return "", self.tensor(name)

    def packed(self, name: str, shape: torch.Size) -> Packed:
        if name not in self._packed:
            return self._files.packed(name, shape)  # raises
        matrix = self._matrix(name)
        check_shape(self, name, matrix.shape, shape)
        return self._pack(name, matrix)

    def _pack(self, name: str, matrix: PackedMatrix) -> Packed:
        try:
            return matrix.pack()
        except ModelError as error:
            raise self._named(name, error) from error

    def _matrix(self, name: str) -> PackedMatrix:
        module = name.removesuffix("weight")
        names = self._files.names
        held = [part for part in self._dialect.parts if module + part in names]
        stored = self._files.stored([module + part for part in held])
        try:
            return self._dialect.matrix({part: stored[module + part] for part in held})
        except ModelError as error:
            raise self._named(name, error) from error

    def _named(self, name: str, error: ModelError) -> ModelError:
        return ModelError(f"cannot take {name!r} of {self.path} as it is packed: {error}")
