"""Held heads: a head's matrices as rows are multiplied by them, and what a head is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from edgespec.config import FILE, QUANTISATIONS, Quantisation
from edgespec.errors import ModelError
from edgespec.model.aux_hidden import unpacked
from edgespec.model.matrices import Product, plain_product
from edgespec.model.quantised.exact import ExactLinear, row_product
from edgespec.model.quantised.linear import linear_from, pack
from edgespec.types.features import Features

Head = TypeVar("Head", bound=nn.Module)


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


def tapped(features: Features, layers: Sequence[int]) -> torch.Tensor | None:
    """The rows that enter these layers of the base side by side, [n, layers · H]; None for none."""
    if features.aux_hidden is None:
        return None
    by_layer = unpacked(features.aux_hidden, len(features.aux_layers))
    return by_layer[:, [features.aux_layers.index(layer) for layer in layers]].flatten(1)
