"""Packed forms: random matrices in every form that files come in, with what they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from edgespec.config import Quantisation
from edgespec.model.quantised.group_scales import BLOCK
from edgespec.model.quantised.linear import stored, stored_parts
from edgespec.model.quantised.rounding import Packed

FORMS = {
    "Q4_0": Quantisation("int4", 32, scales="float16"),
    "Q4_1": Quantisation("int4", 32, zeros="low", scales="float16"),
    "Q4_K": Quantisation("int4", 32, double=True, zeros="low", scales="float16"),
    "Q5_0, Q8_0": Quantisation("int8", 32, scales="float16"),
    "Q5_1": Quantisation("int8", 32, zeros="low", scales="float16"),
    "Q5_K": Quantisation("int8", 32, double=True, zeros="low", scales="float16"),
    "Q6_K": Quantisation("int8", 16, double=True, scales="float16"),
    "AWQ": Quantisation("int4", 128, zeros="points", scales="float16"),
    "GPTQ": Quantisation("int4", 64, zeros="points", scales="float16", ordered=True),
    "GPTQ in 8 bits": Quantisation("int8", 128, zeros="points", scales="float16"),
    "compressed-tensors": Quantisation("int4", 128, scales="bfloat16"),
}
"""By the formats that have them."""


@dataclass(frozen=True)
class Sample:
    """A matrix in packed form, and the weight [out, columns] that it stands for, float64."""

    form: Quantisation
    shape: torch.Size
    packed: Packed
    weight: torch.Tensor


def sample(form: Quantisation, out: int, columns: int, seed: int = 0) -> Sample:
    """A random one; a form with a group of -1 has one group a row."""
    if form.group < 0:
        form = replace(form, group=columns)
    shape = torch.Size((out, columns))
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 16) if form.kind == "int4" else (-128, 128)
    codes = torch.randint(low, high, shape, generator=generator)
    scales: Packed = {}
    for name, (size, dtype) in stored_parts(form, shape).items():
        if name == "order":
            scales[name] = torch.randperm(columns, generator=generator).to(dtype)
        elif dtype.is_floating_point:
            scales[name] = ((torch.rand(size, generator=generator) + 0.1) / 400).to(dtype)
        elif name not in ("tiles", "codes"):
            scales[name] = torch.randint(0, 16, size, generator=generator).to(dtype)
    packed = stored(codes.to(torch.uint8 if form.kind == "int4" else torch.int8), form, scales)
    return Sample(form, shape, packed, _weight(codes.double(), form, scales))


def _weight(codes: torch.Tensor, form: Quantisation, scales: Packed) -> torch.Tensor:
    """By the formulas of docs/quantisation.md."""
    scale, zero = scales["scales"].double(), scales.get("zeros", torch.zeros(1)).double()
    if form.double:
        blocks = BLOCK // form.group
        scale = scale * scales["blocks"].double().repeat_interleave(blocks, 1)
        if form.zeros:
            zero = -zero * scales["zero_blocks"].double().repeat_interleave(blocks, 1)
    scale, zero = (
        one.expand(scale.shape).repeat_interleave(form.group, 1) for one in (scale, zero)
    )
    middle = 8 if form.kind == "int4" else 0
    if form.zeros == "low":
        weight = codes * scale + zero
    elif form.zeros == "points":
        weight = (codes - zero) * scale
    else:
        weight = (codes - middle) * scale
    if form.ordered:
        weight[:, scales["order"].long()] = weight.clone()
    return weight
