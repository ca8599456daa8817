"""Quantising source: a model's tensors, packed one at a time as they are asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PretrainedConfig

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import pack
from edgespec.model.source import TensorSource


class QuantisingSource:
    """A TensorSource over a checkpoint: what that has, the weights of layers packed on request.

    Packs at each request and keeps nothing, so that memory holds one tensor at a time.
    """

    def __init__(self, checkpoint: Checkpoint, quantisation: Quantisation) -> None:
        self._plain = checkpoint
        self.path: Path = checkpoint.path
        self.config: PretrainedConfig = checkpoint.config
        self.mapped: bool = checkpoint.mapped
        self.quantisation = quantisation

    @property
    def names(self) -> frozenset[str]:
        return self._plain.names

    @property
    def layers(self) -> int:
        return self._plain.layers

    def tensor(self, name: str) -> torch.Tensor:
        return self._plain.tensor(name)

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        weight = self._plain.tensor(name)
        if weight.shape != shape:
            raise ModelError(
                f"{name!r} in {self.path} has shape {list(weight.shape)}, config.json says "
                f"{list(shape)}; download the model again"
            )
        try:
            return pack(weight, self.quantisation)
        except ModelError as error:
            raise ModelError(
                f"cannot hold {name!r} of {self.path} as {self.quantisation.name}: {error}"
            ) from error


def quantising(checkpoint: Checkpoint, quantisation: Quantisation) -> TensorSource:
    """The checkpoint, quantised on the way if that is wanted."""
    if quantisation.kind == "none":
        return checkpoint
    return QuantisingSource(checkpoint, quantisation)
