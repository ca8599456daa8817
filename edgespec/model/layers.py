"""Layers: how a block makes those of its model, edgespec's own or, where need be, transformers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from edgespec.model.decoder_layer import OwnLayers
from edgespec.model.joint import JointCache, RowCache
from edgespec.model.layer_form import layer_form
from edgespec.model.model_config import ModelConfig
from edgespec.model.rope import Rotary
from edgespec.model.row_math import BATCHED, RowMath
from edgespec.model.source import TensorSource
from edgespec.model.tree_attention import Seen


class Layer(Protocol):
    """One decoder layer."""

    def __call__(
        self, hidden: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Hidden rows [R, H] behind the layer, in new memory; keys and values go into `cache`.

        `rotary`: what `ModelLayers.rotary` made of the rows' positions.
        """


class ModelLayers(Protocol):
    """Layers [first, end) of a model, by their numbers in it, and what goes with them."""

    head_dim: int
    has_experts: bool
    """Whether some layer is a mixture, whose rows choose the matrices that they go through."""

    def shapes(self, index: int) -> Mapping[str, torch.Size]:
        """The tensors of a layer, by their names within it."""

    def matrices(self, index: int) -> frozenset[str]:
        """Of these, the weights [out, in] that rows are multiplied by, which may come packed."""

    def layer(
        self, index: int, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Layer:
        """Read a layer. Raises ModelError as the source does."""

    def norm(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Read the final norm, of rows [R, H]. Raises ModelError as the source does."""

    def rotary(
        self, kind: str | None, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], Rotary]:
        """Makes of positions int64 [R] what the layers of a kind are told of them.

        `kind`: the layer type that has rotary embeddings of its own; None: all share one.
        """


def layers_of(config: ModelConfig, first: int, end: int, math: RowMath = BATCHED) -> ModelLayers:
    """The way to make layers [first, end) of a model, which compute by `math`."""
    forms = {index: layer_form(config, index) for index in range(first, end)}
    own = {index: form for index, form in forms.items() if form is not None}
    if len(own) == len(forms):
        return OwnLayers(config, own, math)
    # transformers' modelling code takes seconds to import: only for those who need it.
    from edgespec.model.library_layers import LibraryLayers

    return LibraryLayers(config, first, end, math)
