"""Weights: a head's layer as it is held, its matrices quantised if that is wanted."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from edgespec.config import Quantisation
from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.shape import HeadShape
from edgespec.errors import ModelError
from edgespec.model.quantised.linear import linear_from, pack


def filled_head(
    shape: HeadShape,
    weights: Mapping[str, torch.Tensor],
    quantisation: Quantisation,
    dtype: torch.dtype,
    device: torch.device,
) -> EagleHead:
    """A head of that shape with these weights, by EagleHead's names, in `dtype` on `device`.

    Raises ModelError for a matrix that cannot be held in that quantisation.
    """
    with torch.device("meta"):
        head = EagleHead(shape)

    def own(name: str) -> torch.Tensor:
        return weights[name].to(device, dtype, copy=True)

    for name, linear in list(head.named_modules()):
        if quantisation.kind != "none" and isinstance(linear, nn.Linear):
            bias = None if linear.bias is None else own(f"{name}.bias")
            try:
                packed = pack(weights[f"{name}.weight"], quantisation)
            except ModelError as problem:
                raise ModelError(
                    f"cannot hold {name} of the {shape.kind} head as {quantisation.name}: {problem}"
                ) from problem
            held = linear_from(packed, bias, linear.weight.shape, quantisation, dtype, device)
            head.set_submodule(name, held)
    for name, _ in list(head.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(head.get_submodule(owner), leaf, nn.Parameter(own(name), requires_grad=False))
    return head.eval()
