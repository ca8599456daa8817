"""Products by packed matrices on a GPU, with Triton's kernel: any kind whose groups fit into it."""

from __future__ import annotations

import torch
from torch import nn

from edgespec.config import Quantisation
from edgespec.kernels.gpu.code_words import (
    PADDED,
    STRIP,
    Codes,
    chunk_of,
    numbers_of,
    pairs_of,
    words_of,
)
from edgespec.kernels.gpu.products import CodesProduct
from edgespec.kernels.products import TILE
from edgespec.model.quantised import int4_kernels, levels, nf4
from edgespec.model.quantised.rounding import Packed
from edgespec.model.tensors import TORCH_DTYPES

_CHUNK = 1 << 20  # codes that are repacked at a time
_BY_GROUP, _BY_BLOCK = {"scales", "zeros"}, {"blocks", "zero_blocks"}


def fits(form: Quantisation, shape: torch.Size) -> bool:
    """Whether the kernel takes a matrix [out, in] of this form; it has no codes of "fp8"."""
    return form.kind != "fp8" and _chunk(form, shape) is not None


def _chunk(form: Quantisation, shape: torch.Size) -> int | None:
    size = 4 if form.kind == "nf4" else 1 if form.double else TORCH_DTYPES[form.scales].itemsize
    return chunk_of(form.group or shape[1], shape[1], size)


class TritonLinear(nn.Module):
    """y = x Wᵀ + bias with a packed W [out, in], which holds its scales as they are stored.

    A row's result does not depend on those beside it (see kernels.gpu.products).
    """

    bias: torch.Tensor | None
    order: torch.Tensor | None

    def __init__(
        self,
        packed: Packed,
        bias: torch.Tensor | None,
        shape: torch.Size,
        form: Quantisation,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        order = packed.get("order")
        self.register_buffer("order", None if order is None else order.to(device), persistent=False)
        group, chunk = form.group or shape[1], _chunk(form, shape)
        assert chunk is not None
        numbers = _numbers(packed, form, shape)
        parts = {
            name: numbers_of(numbers[name], group, chunk) for name in _BY_GROUP & numbers.keys()
        }
        parts |= {name: _turned(numbers[name]) for name in _BY_BLOCK & numbers.keys()}
        if "levels" in numbers:
            parts["levels"] = pairs_of(numbers["levels"].to(dtype))
        parts["words"] = _words(packed, form, shape, chunk, torch.device(device))
        for name, part in parts.items():
            self.register_buffer(name, part.to(device), persistent=False)
        held = dict(self.named_buffers(recurse=False))
        matrix = Codes(
            out=shape[0],
            columns=shape[1],
            group=group,
            scale_type=numbers["scales"].dtype,
            zero_type=numbers["zeros"].dtype if "zeros" in numbers else None,
            zero=form.zeros if "zeros" in numbers else "",
            **{name: held[name] for name in parts},
        )
        # Held by names of its own: a module takes about as long to find a buffer as a launch takes.
        self._product, self._order = CodesProduct(matrix, self.bias), self.order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] in its dtype to [..., out]."""
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        result = self._product(rows)
        return result if x.dim() == 2 else result.reshape(*x.shape[:-1], self.out_features)


def _numbers(packed: Packed, form: Quantisation, shape: torch.Size) -> Packed:
    """Scales and what goes with them, by their names in Codes: [out, groups] or [out, blocks]."""
    if form.kind == "int4" and form.zeros == "middle":
        pairs = packed["scales"][:, : shape[0]]
        return {"scales": pairs[..., 0].T, "zeros": pairs[..., 1].T}
    if form.kind == "nf4":
        parts = nf4.product_parts(packed, form, torch.float32)
        return {"scales": parts["scales"], "levels": parts["levels"]}
    names = _BY_GROUP | _BY_BLOCK
    numbers = {name: packed[name].view(shape[0], -1) for name in names & packed.keys()}
    if form.kind in levels.LEVELS:
        numbers["levels"] = levels.table(form.kind)
    return numbers


def _turned(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [out, n] as [n, rows, filled up]."""
    out, count = numbers.shape
    turned = numbers.new_zeros(count, -(-out // PADDED) * PADDED)
    turned[:, :out] = numbers.T
    return turned


def _words(
    packed: Packed, form: Quantisation, shape: torch.Size, chunk: int, device: torch.device
) -> torch.Tensor:
    """The words of Codes, made on the device some tiles at a time, to need little memory beside."""
    step = max(1, _CHUNK // shape[1] // TILE) * TILE
    paired = _has_levels(form)
    words: torch.Tensor | None = None
    for first in range(0, shape[0], step):
        end = min(first + step, shape[0])
        made = torch.stack(
            [words_of(one, chunk, paired) for one in _planes(packed, form, first, end, device)]
        )
        if words is None:
            strips = -(-shape[0] // PADDED) * (PADDED // STRIP)
            words = made.new_zeros(made.shape[0], strips, *made.shape[2:])
        words[:, first // STRIP : first // STRIP + made.shape[1]] = made
    assert words is not None
    return words


def _has_levels(form: Quantisation) -> bool:
    return form.kind == "nf4" or form.kind in levels.LEVELS


def _planes(
    packed: Packed, form: Quantisation, first: int, end: int, device: torch.device
) -> list[torch.Tensor]:
    """Rows of codes of 4 bits, uint8 [rows, columns]; those of 8 bits + 128 as two, high halves
    first."""
    if form.kind == "int4":
        tiles = packed["tiles"][first // TILE : -(-end // TILE)].to(device)
        return [int4_kernels.codes_of(tiles)[: end - first]]
    codes = packed["codes"][first:end].to(device)
    if _has_levels(form):
        return [levels.unpacked(codes, form.kind)]
    shifted = codes.view(torch.uint8) ^ 128
    return [shifted >> 4, shifted & 15]
