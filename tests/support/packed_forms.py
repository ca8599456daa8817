"""Packed forms: matrices in every form that files come in, with the weights they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from edgespec.config import FILE, Quantisation
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised import levels
from edgespec.model.quantised.group_scales import BLOCK
from edgespec.model.quantised.linear import stored
from edgespec.model.quantised.rounding import Packed
from edgespec.model.tensors import TORCH_DTYPES

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
    "Q2_K": Quantisation("int4", 16, double=True, zeros="low", scales="float16"),
    "Q3_K": Quantisation("int4", 16, double=True, scales="float16"),
    "IQ4_NL": Quantisation("iq4", 32, scales="float16"),
    "IQ4_XS": Quantisation("iq4", 32, double=True, scales="float16"),
    "MXFP4": Quantisation("fp4", 32, scales="bfloat16"),
    "FP8": Quantisation("fp8", 128, scales="float32"),
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
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, columns, generator=generator) / 16
    return rounded(weight, replace(form, group=columns) if form.group < 0 else form)


def rounded(weight: torch.Tensor, form: Quantisation) -> Sample:
    """A weight in this form, as a simple program would quantise it."""
    scales: Packed = {}
    out, columns = weight.shape
    order = torch.arange(columns)
    if form.ordered:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        scales["order"] = order.to(torch.int32)
    grouped = weight.float()[:, order].view(out, -1, form.group)
    if form.kind in ("iq4", "fp4", "fp8"):
        return _looked_up(grouped, form)
    least, most = (0, 15) if form.kind == "int4" else (-127, 127)
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if not form.zeros:
        scale = torch.maximum(high, -low) / (most - _middle(form))
        zero = _middle(form) * -scale
    else:
        scale, zero = (high - low) / (most - least), low - least * (high - low) / (most - least)
    if form.double:
        scales["blocks"], scales["scales"], scale = _in_two_levels(scale, form)
        if form.zeros:
            scales["zero_blocks"], scales["zeros"], zero = _in_two_levels(-zero, form)
            zero = -zero
    else:
        dtype = TORCH_DTYPES[form.scales]
        scales["scales"] = scale.to(dtype)
        if form.zeros == "low":
            scales["zeros"] = zero.to(dtype)
        elif form.zeros == "points":
            points = (-zero / scale).round().clamp(-128, 127)
            scales["zeros"], zero = points.to(torch.int8), -points * scale
    codes = ((grouped - zero.unsqueeze(2)) / scale.unsqueeze(2)).round().clamp(least, most)
    codes = codes.view(weight.shape).to(torch.uint8 if form.kind == "int4" else torch.int8)
    packed = stored(codes, form, scales)
    return Sample(form, weight.shape, packed, _weight(codes.double(), form, scales))


def _looked_up(grouped: torch.Tensor, form: Quantisation) -> Sample:
    """The nearest numbers of the form's table."""
    table = levels.table(form.kind).nan_to_num(0)
    scales: Packed = {}
    scale = grouped.abs().amax(2) / table.abs().max()
    if form.double:
        scales["blocks"], scales["scales"], scale = _in_two_levels(scale, form)
    else:
        scale = scales["scales"] = scale.to(TORCH_DTYPES[form.scales])
    wide = scale.double().unsqueeze(2)
    inner, numbers = table.double().sort()
    codes = numbers[torch.searchsorted(inner, grouped / wide).clamp(max=len(table) - 1)]
    weight = (table.double()[codes] * wide).flatten(1)
    packed = stored(codes.flatten(1).to(torch.uint8), form, scales)
    return Sample(form, weight.shape, packed, weight)


def _in_two_levels(
    fine: torch.Tensor, form: Quantisation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors of blocks, whole numbers of groups, and what both give."""
    of_blocks = fine.view(fine.shape[0], -1, BLOCK // form.group)
    blocks = (of_blocks.abs().amax(2) / 63).to(torch.float16)
    wide = blocks.float().unsqueeze(2)
    whole = (of_blocks / wide).round()
    return blocks, whole.to(torch.int8).view(fine.shape), (whole * wide).view(fine.shape)


def _middle(form: Quantisation) -> int:
    return 8 if form.kind == "int4" else 0


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
    if form.zeros == "low":
        weight = codes * scale + zero
    elif form.zeros == "points":
        weight = (codes - zero) * scale
    else:
        weight = (codes - _middle(form)) * scale
    if form.ordered:
        weight[:, scales["order"].long()] = weight.clone()
    return weight


class MixedSource:
    """A TensorSource over a checkpoint, as one over a file that packs its matrices differently.

    Each form that fits comes in turn, and plain matrices are among them.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._plain = checkpoint
        self.path, self.config, self.layers = checkpoint.path, checkpoint.config, checkpoint.layers
        self.mapped = checkpoint.mapped
        self.quantisation = FILE
        self.names = checkpoint.names

    def form(self, name: str) -> Quantisation:
        matrices = sorted(one for one in self.names if one.endswith("_proj.weight"))
        turn = [*matrices, "lm_head.weight", "model.embed_tokens.weight"].index(name)
        forms = [Quantisation(), *FORMS.values()]
        columns = self._plain.tensor(name).shape[1]
        for form in forms[turn % len(forms) :] + forms:
            if columns % (form.group or 1) == 0 and not (form.double and columns % BLOCK):
                return form
        raise AssertionError(name)

    def tensor(self, name: str) -> torch.Tensor:
        return self._plain.tensor(name)

    def packed(self, name: str, shape: torch.Size) -> Packed:
        one = rounded(self._plain.tensor(name), self.form(name))
        assert one.shape == shape
        return one.packed

    def weight(self, name: str) -> torch.Tensor:
        """What a matrix stands for, by the definition of its form."""
        plain, form = self._plain.tensor(name), self.form(name)
        return plain if form.kind == "none" else rounded(plain, form).weight
