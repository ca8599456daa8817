"""Random layers: a source of made-up matrices in any form, to measure how long they take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from edgespec.config import FILE, QUANTISATIONS, Quantisation
from edgespec.errors import ModelError
from edgespec.model.layers import layers_of
from edgespec.model.model_config import ModelConfig
from edgespec.model.quantised.linear import held_bytes, pack, stored_parts
from edgespec.model.quantised.selftest import made_up
from edgespec.model.source import EMBEDDING, LM_HEAD


class RandomLayers:
    """A TensorSource (see model.source) of random weights: equal matrices are drawn once."""

    path = Path("random weights")
    mapped = False

    def __init__(
        self,
        config: ModelConfig,
        quantisation: Quantisation,
        forms: Mapping[str, Quantisation] = MappingProxyType({}),
    ) -> None:
        """Layers of this configuration; `forms` as in Shape, for the quantisation "file".

        Raises ModelError for one that no profile describes.
        """
        self.config = config
        self.quantisation = quantisation
        self._forms = forms
        layers = layers_of(config, 0, self.layers)
        hidden = int(config.hidden_size)
        ends = torch.Size((int(config.vocab_size), hidden))
        self._shapes = {EMBEDDING: ends, LM_HEAD: ends, "model.norm.weight": torch.Size((hidden,))}
        for index in range(self.layers):
            for name, shape in layers.shapes(index).items():
                self._shapes[f"model.layers.{index}.{name}"] = shape
        if any(".experts." in name for name in self._shapes):
            raise ModelError(
                "a mixture of experts does not read all its weights in a pass, so its times are "
                "no times a byte; measure with a dense model, or without --model"
            )
        kinds = (".conv.conv.weight", ".conv1d.weight")
        if any(name.endswith(kinds) for name in self._shapes):
            raise ModelError(
                "its layers are of two kinds, so that the times of one are not those of the other; "
                "measure with another model, or without --model"
            )
        matrices = layers.matrices(0)
        self._linear = {n: shape for n, shape in layers.shapes(0).items() if n in matrices}
        self._plain: dict[torch.Size, torch.Tensor] = {}
        self._packed: dict[tuple[torch.Size, Quantisation], dict[str, torch.Tensor]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def size(self) -> tuple[int, int]:
        """(weights, bytes as packed) of the matrices of one layer."""
        weights = sum(shape.numel() for shape in self._linear.values())
        return weights, sum(
            _packed_bytes(shape, self.form(name)) for name, shape in self._linear.items()
        )

    def form(self, name: str) -> Quantisation:
        if self.quantisation != FILE:
            return self.quantisation
        return self._forms[in_layer(name)]

    def tensor(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if shape not in self._plain:
            self._plain[shape] = _random(shape)
        return self._plain[shape]

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        return "", self.tensor(name)

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """A random matrix in packed form; each call allocates."""
        form = self.form(name)
        if (shape, form) not in self._packed:
            self._packed[shape, form] = _packed(shape, form)
        return {part: tensor.clone() for part, tensor in self._packed[shape, form].items()}


def in_layer(name: str) -> str:
    """A tensor's name within its layer: without "model.layers.N."."""
    return re.sub(r"^model\.layers\.\d+\.", "", name)


def _packed_bytes(shape: torch.Size, form: Quantisation) -> int:
    """As planning counts it: a file's forms are held otherwise than they are stored."""
    if form.kind == "none" or form.name not in QUANTISATIONS:
        return held_bytes(form, shape, torch.bfloat16)
    return sum(part.numel() * dtype.itemsize for part, dtype in stored_parts(form, shape).values())


def _packed(shape: torch.Size, form: Quantisation) -> dict[str, torch.Tensor]:
    """A random matrix; nothing rounds to a form that only files have."""
    return pack(_random(shape), form) if form.name in QUANTISATIONS else made_up(form, shape)


def _random(shape: torch.Size) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16) * 0.02
