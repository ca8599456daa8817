"""Tensor source: where a block's tensors come from: a checkpoint, or a block file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import PretrainedConfig

from edgespec.config import Quantisation


class TensorSource(Protocol):
    """A model's tensors on request, by the names that its checkpoint has for them.

    Where `quantisation` is not "none", the weight of every nn.Linear of a layer comes in packed
    form, and all else plain.
    """

    @property
    def path(self) -> Path:
        """Where it is, for messages."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration."""

    @property
    def quantisation(self) -> Quantisation:
        """How the layers' matrices come."""

    @property
    def mapped(self) -> bool:
        """Whether tensors may be kept as they are, as views of a file that does not change.

        Otherwise what is kept must be copied.
        """

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, packed ones under the name of the weight that they stand for."""

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor, as stored, on the CPU.

        Raises ModelError if there is none of this name, or it cannot be read.
        """

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """The stored form (see model.quantised) of the weight `name` of this shape, on the CPU.

        Raises ModelError as `tensor` does, and for another shape.
        """
