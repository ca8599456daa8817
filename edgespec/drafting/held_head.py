"""Held heads: a head's matrices as rows are multiplied by them, and what guessers by heads have in
common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from edgespec.config import FILE, QUANTISATIONS, Quantisation
from edgespec.drafting.base import Guesser
from edgespec.drafting.launches import Launches
from edgespec.drafting.ranking import Ranking
from edgespec.errors import ModelError
from edgespec.model.aux_hidden import unpacked
from edgespec.model.ends import InputEmbedding, OutputHead
from edgespec.model.matrices import Product, plain_product
from edgespec.model.quantised.exact import ExactLinear, row_product
from edgespec.model.quantised.linear import linear_from, pack
from edgespec.model.source import TensorSource
from edgespec.model.tensors import compute_dtype
from edgespec.types.features import DraftNeeds, Features

Head = TypeVar("Head", bound=nn.Module)
Embed = Callable[[torch.Tensor], torch.Tensor]
"""The vectors [R, hidden] of tokens int64 [R]."""


class HeadGuesser(Guesser):
    """A Guesser: a head beside the base's ends, which it may borrow."""

    _matrix: Product | None = None
    """The product with its output matrix; None where that is the base's own."""

    def __init__(
        self,
        name: str,
        needs: DraftNeeds,
        base: OutputHead,
        source: TensorSource,
        embedding: torch.Tensor | None,
        tokens: torch.Tensor | None,
        dtype: str,
        device: torch.device | str,
    ) -> None:
        """`embedding` [V, hidden]: None for that of the base, whose tensors are in `source`;
        `tokens` int64 [vocab]: the base's token of each column, None where column v is token v.
        Raises ModelError if the base has nothing to lend."""
        super().__init__(name, needs)
        self._base = base
        self._dtype, self._device = compute_dtype(dtype), torch.device(device)
        self._embed: Embed
        if embedding is None:
            self._embed = InputEmbedding(source, dtype, device, share=base).rows
        else:
            self._embed = embedding.to(self._device, self._dtype, copy=True).__getitem__
        self._tokens = None if tokens is None else tokens.numpy()
        self._launches = Launches(device)
        self._ranking = Ranking(self.ranked, self.allowed)

    def between_layers(self) -> bool:
        self._launches.keep_near()
        return super().between_layers()

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [R, vocab] of rows [R, hidden] as the output matrix takes them, in float32 at
        least."""
        if self._matrix is None:
            return self._base.logits(rows)
        logits = self._matrix(rows)
        return logits if self._dtype == torch.float64 else logits.float()


def filled(
    head: Head,
    weights: Mapping[str, torch.Tensor],
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device,
    kind: str,
    spared: Collection[str] = (),
) -> Head:
    """The head, which has no weights yet, with these by its names, in `dtype` on `device`; `kind`:
    what messages call it.

    Its matrices are held in that quantisation, but for those of one row and those that are
    `spared`. Raises ModelError for one that cannot be.
    """

    def own(name: str) -> torch.Tensor:
        return weights[name].to(device, dtype, copy=True)

    for name, matrix in list(head.named_modules()):
        if not isinstance(matrix, nn.Linear):
            continue
        plain = quantisation.kind == "none" or matrix.out_features == 1 or name in spared
        bias = None if matrix.bias is None else own(f"{name}.bias")
        if plain and device.type == "cpu":
            head.set_submodule(name, ExactLinear(row_product(own(f"{name}.weight"), bias)))
        elif not plain:
            try:
                packed = pack(weights[f"{name}.weight"], quantisation)
            except ModelError as problem:
                raise ModelError(
                    f"cannot hold {name} of the {kind} head as {quantisation.name}: {problem}"
                ) from problem
            held = linear_from(packed, bias, matrix.weight.shape, quantisation, dtype, device)
            head.set_submodule(name, held)
    for name, _ in list(head.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(head.get_submodule(owner), leaf, nn.Parameter(own(name), requires_grad=False))
    return head.eval()


def output_product(
    matrix: torch.Tensor, quantisation: Quantisation, dtype: torch.dtype, device: torch.device
) -> Product:
    """The product with a head's own output matrix [vocab, hidden], held so; in 8 bits where the
    base's head has the codes of its file, of which this matrix has none."""
    if quantisation.kind == "none":
        return plain_product(matrix.to(device, dtype, copy=True))
    form = QUANTISATIONS["int8"] if quantisation == FILE else quantisation
    return linear_from(pack(matrix, form), None, matrix.shape, form, dtype, device)


def tapped(features: Features, layers: Sequence[int], hidden: int) -> torch.Tensor | None:
    """The rows [n, hidden] that enter these layers of the base side by side, [n, layers · hidden];
    None for none. Raises RemoteProtocolError for rows of another base."""
    if features.aux_hidden is None:
        return None
    by_layer = unpacked(features.aux_hidden, len(features.aux_layers), hidden)
    return by_layer[:, [features.aux_layers.index(layer) for layer in layers]].flatten(1)
