"""Packed checkpoint: a folder of another program's quantised matrices as a TensorSource."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from edgespec.config import FILE, Quantisation
from edgespec.errors import ModelError
from edgespec.model.loader import Checkpoint
from edgespec.model.packed import settings
from edgespec.model.packed.bitsandbytes import BitsAndBytes
from edgespec.model.packed.grouped import Awq, CompressedTensors, Gptq
from edgespec.model.packed.matrix import Dialect, PackedMatrix
from edgespec.model.packed.settings import Packing
from edgespec.model.quantised.linear import dequantised
from edgespec.model.quantised.rounding import Packed
from edgespec.model.source import check_shape

_DIALECTS: dict[str, Any] = {
    settings.GPTQ: Gptq,
    settings.AWQ: Awq,
    settings.COMPRESSED: CompressedTensors,
    settings.BITSANDBYTES: BitsAndBytes,
}
_PLAIN = Quantisation()


class PackedCheckpoint:
    """A TensorSource over a checkpoint whose config.json has a quantization_config.

    Which matrices are packed is what its files say: they hold other tensors for those. Codes and
    scales are taken as they are; nothing is rounded. Memory holds one matrix at a time.
    """

    mapped = False

    def __init__(
        self, checkpoint: Checkpoint, packing: Packing, quantisation: Quantisation
    ) -> None:
        """`quantisation`: FILE, or "none" for the values that codes stand for."""
        self._files = checkpoint
        self.path, self.config, self.layers = checkpoint.path, checkpoint.config, checkpoint.layers
        self.quantisation = quantisation
        self._dialect: Dialect = _DIALECTS[packing.method](packing.settings)
        self._forms: dict[str, Quantisation] = {}

    @cached_property
    def _packed(self) -> frozenset[str]:
        """The names of packed weights."""
        mark = f".{self._dialect.mark}"
        marked = (name.removesuffix(mark) for name in self._files.names if name.endswith(mark))
        return frozenset(f"{module}.weight" for module in marked)

    @cached_property
    def names(self) -> frozenset[str]:
        modules = [name.removesuffix("weight") for name in self._packed]
        parts = {module + part for module in modules for part in self._dialect.parts}
        return self._files.names - parts | self._packed

    def form(self, name: str) -> Quantisation:
        if self.quantisation != FILE or name not in self._packed:
            return _PLAIN
        if name not in self._forms:
            self._forms[name] = self._matrix(name).form
        return self._forms[name]

    def tensor(self, name: str) -> torch.Tensor:
        """What is not packed as it is stored, what is as float32 values."""
        if name not in self._packed:
            return self._files.tensor(name)
        matrix = self._matrix(name)
        return dequantised(self._pack(name, matrix), matrix.shape, matrix.form, torch.float32)

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
