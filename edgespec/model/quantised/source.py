"""Quantising source: a model's tensors, packed one at a time as they are asked for."""

from __future__ import annotations

import torch

from edgespec.config import FILE, Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised.linear import pack
from edgespec.model.source import TensorSource, shaped


class QuantisingSource:
    """A TensorSource over a checkpoint: what that has, the weights of layers packed on request.

    Packs at each request and keeps nothing, so that memory holds one tensor at a time.
    """

    def __init__(self, checkpoint: TensorSource, quantisation: Quantisation) -> None:
        self._plain = checkpoint
        self.path, self.config, self.layers = checkpoint.path, checkpoint.config, checkpoint.layers
        self.mapped = checkpoint.mapped
        self.quantisation = quantisation

    @property
    def names(self) -> frozenset[str]:
        return self._plain.names

    def form(self, name: str) -> Quantisation:
        return self.quantisation

    def tensor(self, name: str) -> torch.Tensor:
        return self._plain.tensor(name)

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        weight = shaped(self._plain, name, shape)
        try:
            return pack(weight, self.quantisation)
        except ModelError as error:
            raise ModelError(
                f"cannot hold {name!r} of {self.path} as {self.quantisation.name}: {error}"
            ) from error


def quantising(checkpoint: TensorSource, quantisation: Quantisation) -> TensorSource:
    """The checkpoint, quantised on the way if that is wanted.

    Raises ModelError for "file" if nothing of the checkpoint is packed.
    """
    if quantisation == checkpoint.quantisation:
        return checkpoint
    if quantisation == FILE:
        raise ModelError(
            f"{checkpoint.path} holds plain tensors, which have no packed form of their own; "
            "choose another quantisation than 'file'"
        )
    return QuantisingSource(checkpoint, quantisation)
