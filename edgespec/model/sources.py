"""Sources: the one way to open a model for its tensors, whatever form its files have,
with the matrices of its layers quantised as they are read if that is asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from edgespec.config import FILE, Quantisation
from edgespec.errors import ModelError
from edgespec.model.gguf.checkpoint import GgufCheckpoint
from edgespec.model.gguf.files import GgufFiles
from edgespec.model.hub import model_files
from edgespec.model.loader import Checkpoint
from edgespec.model.packed.checkpoint import PackedCheckpoint
from edgespec.model.packed.settings import packing_of
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

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        return self._plain.table(name)

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


PLAIN = Quantisation()


def open_source(model: str | Path, quantisation: Quantisation = PLAIN) -> TensorSource:
    """A model's tensors, those of its layers quantised on the way if that is asked for.

    `model`: a folder, a GGUF file, or either of the hub. Raises ModelError for one that cannot be
    used, saying where and what to do.
    """
    files = model_files(model)
    held = FILE if quantisation == FILE else PLAIN
    if isinstance(files, GgufFiles):
        return quantising(GgufCheckpoint(files, held), quantisation)
    checkpoint = Checkpoint(model)
    packing = packing_of(checkpoint.path, checkpoint.config.settings)
    if packing is None:
        return quantising(checkpoint, quantisation)
    return quantising(PackedCheckpoint(checkpoint, packing, held), quantisation)
