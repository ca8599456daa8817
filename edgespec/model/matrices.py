"""Matrices: what rows are multiplied by, read from a source, several of one input as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.functional import linear

from edgespec.config import Quantisation
from edgespec.kernels.gpu.usable import DTYPES, usable
from edgespec.kernels.products import RowProduct
from edgespec.model.quantised.exact import ExactLinear, row_product
from edgespec.model.quantised.linear import joined, linear_from
from edgespec.model.quantised.rounding import Packed
from edgespec.model.source import TensorSource, load_parameter, shaped
from edgespec.model.tensors import one_view

Product = Callable[[torch.Tensor], torch.Tensor]
"""Rows [R, in] to x Wᵀ + bias, [R, out], in memory that the caller may write to."""


class MatrixReader:
    """Reads matrices of a source for one device, to multiply rows in one dtype."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._dtype, self._device = source, dtype, device
        # What may stay mapped takes no memory of its own, so it is not copied to be joined.
        self._stays = source.mapped and device.type == "cpu"

    def product(
        self, names: Sequence[str], shapes: Sequence[torch.Size], biased: bool = False
    ) -> Product:
        """By matrices [out, in] of the same columns, one below the other.

        Each is NAME.weight and, if `biased`, NAME.bias. They are one matrix where they can be
        joined, else multiplied one by one. Raises ModelError as the source does.
        """
        one = self._joined(names, shapes, biased)
        if one is not None:
            return one
        return SideBySide(
            [self.product([n], [s], biased) for n, s in zip(names, shapes, strict=True)]
        )

    def _joined(
        self, names: Sequence[str], shapes: Sequence[torch.Size], biased: bool
    ) -> Product | None:
        """Their product as one matrix; None where they have no common form."""
        form = self._source.form(f"{names[0]}.weight")
        if any(self._source.form(f"{name}.weight") != form for name in names):
            return None
        bias = self._bias(names, shapes) if biased else None
        if form.kind == "none":
            weight = self._plain(names, shapes)
            return None if weight is None else plain_product(weight, bias)
        packed = self._packed(names, shapes, form)
        if packed is None:
            return None
        whole = torch.Size((sum(shape[0] for shape in shapes), shapes[0][1]))
        held = linear_from(packed, bias, whole, form, self._dtype, self._device)
        return held.product if isinstance(held, ExactLinear) else held.forward

    def _plain(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> torch.Tensor | None:
        source, keys = self._source, [f"{name}.weight" for name in names]
        if len(keys) == 1:
            return load_parameter(source, keys[0], shapes[0], self._dtype, self._device)
        if self._stays:
            stored = [shaped(source, key, shape) for key, shape in zip(keys, shapes, strict=True)]
            if all(one.dtype == self._dtype for one in stored):
                return one_view(stored)
        whole: torch.Tensor | None = None
        first = 0
        for key, shape in zip(keys, shapes, strict=True):
            # One at a time, so that loading needs no more than the result and one as stored.
            part = shaped(source, key, shape)
            if whole is None:  # after the first, as config.json may say any shapes
                size = sum(shape[0] for shape in shapes), shapes[0][1]
                whole = torch.empty(size, dtype=self._dtype, device=self._device)
            whole[first : first + shape[0]].copy_(part)
            first += shape[0]
            del part
        return whole

    def _packed(
        self, names: Sequence[str], shapes: Sequence[torch.Size], form: Quantisation
    ) -> Packed | None:
        keys = [f"{name}.weight" for name in names]
        every = [self._source.packed(k, s) for k, s in zip(keys, shapes, strict=True)]
        return every[0] if len(every) == 1 else joined(every, form, shapes, not self._stays)

    def _bias(self, names: Sequence[str], shapes: Sequence[torch.Size]) -> torch.Tensor:
        return torch.cat(
            [
                load_parameter(
                    self._source, f"{name}.bias", shape[:1], self._dtype, self._device
                ).data
                for name, shape in zip(names, shapes, strict=True)
            ]
        )


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """By a plain matrix [out, in], and a bias [out], of one dtype, where they are."""
    if weight.device.type == "cpu":
        return row_product(weight, bias)
    if weight.dtype in DTYPES and usable(weight.device):
        from edgespec.kernels.gpu import plain_product  # only here, as it needs triton

        return partial(plain_product.plain_product, weight=weight, bias=bias)
    return partial(linear, weight=weight, bias=bias)


class SideBySide:
    """Products of the same rows, whose results are one row."""

    def __init__(self, products: Sequence[Product]) -> None:
        self.products = products

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([product(rows) for product in self.products], 1)


def row_products(product: Product) -> list[RowProduct] | None:
    """The compiled products that it is made of, side by side; None for one of another kind."""
    every = product.products if isinstance(product, SideBySide) else [product]
    found = [one for one in every if isinstance(one, RowProduct)]
    return found if len(found) == len(every) else None
