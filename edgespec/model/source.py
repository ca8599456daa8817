"""Tensor source: where a block's tensors come from: a checkpoint, or a block file."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.model_config import ModelConfig

EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


class TensorSource(Protocol):
    """A model's tensors on request, by the names that its checkpoint has for them.

    The weight of an nn.Linear of a layer comes packed in its `form`, or plain where that is of the
    kind "none"; all else comes plain.
    """

    path: Path
    """Where it is, for messages."""
    config: ModelConfig
    quantisation: Quantisation
    """How the layers' matrices come, by the name that users, rings and manifests have for it."""
    mapped: bool
    """Whether tensors may be kept as they are, as views of a file that does not change; else what
    is kept must be copied."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors, packed ones under the name of the weight that they stand for."""

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""

    def form(self, name: str) -> Quantisation:
        """The form of one matrix of a layer; never of the kind "file".

        Raises ModelError if there is none of this name.
        """

    def tensor(self, name: str) -> torch.Tensor:
        """A plain tensor, as stored, on the CPU.

        Raises ModelError if there is none of this name, or it cannot be read.
        """

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        """A matrix of which only rows are looked up, where it lies: "" and its numbers, or the name
        of a block type of GGUF and its rows of bytes, uint8 [rows, bytes].

        Raises ModelError as `tensor` does.
        """

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """The stored form (see model.quantised) of the weight `name` of this shape, on the CPU.

        Raises ModelError as `tensor` does, and for another shape.
        """


def shaped(source: TensorSource, name: str, shape: torch.Size) -> torch.Tensor:
    """A plain tensor; raises ModelError if it has another shape."""
    stored = source.tensor(name)
    check_shape(source, name, stored.shape, shape)
    return stored


def load_parameter(
    source: TensorSource,
    name: str,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Parameter:
    """Read one tensor, into memory of its own unless it may be kept mapped.

    Raises ModelError if it has another shape.
    """
    stored = shaped(source, name, shape)
    return nn.Parameter(stored.to(device, dtype, copy=not source.mapped), requires_grad=False)


def check_shape(source: TensorSource, name: str, stored: torch.Size, shape: torch.Size) -> None:
    """Raise ModelError if the tensor's shape is not the configuration's."""
    if stored != shape:
        raise ModelError(
            f"{name!r} in {source.path} has shape {list(stored)}, config.json says "
            f"{list(shape)}; download the model again"
        )


def check_layers(source: TensorSource, first: int, end: int) -> None:
    """Raise ModelError if layers [first, end) are not a block of the model."""
    if not 0 <= first < end <= source.layers:
        raise ModelError(
            f"layers {first} to {end - 1} are not a block of {source.path}, which has "
            f"{source.layers} layers, numbered from 0"
        )


def check_names(source: TensorSource, prefix: str, wanted: set[str]) -> None:
    """Raise ModelError if more tensors have this prefix: leaving a bias or norm out would compute
    something else than the model."""
    strange = {name for name in source.names - wanted if name.startswith(prefix)}
    strange = {name for name in strange if not name.endswith("rotary_emb.inv_freq")}
    # AutoGPTQ wrote biases of zeros for layers that have none.
    strange = {n for n in strange if not n.endswith(".bias") or source.tensor(n).any()}
    if strange:
        raise ModelError(
            f"{source.path} holds {min(strange)!r}, which its config.json does not provide for; "
            "download the model again or, if an older edgespec cut it, make the folder of blocks "
            "again with `edgespec shard`"
        )
