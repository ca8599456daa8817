"""Products: x Wᵀ + bias on the CPU, each row to the bit the same whatever rows are beside it.

By compiled kernels (products.c), or by torch in blocks of one shape where nothing can compile them.
docs/arithmetic.md says which sums a result is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from edgespec.kernels.compiled import load

TILE = 64
"""Outputs of a stored tile of 4-bit codes."""

NUMBERS = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float64: 3,
    torch.int8: 4,
}
"""Types of numbers as numbers.h has them; int8: what model.row_codes makes."""

_CODES = {"int8": 4, "nf4": 5, "iq4": 5, "fp4": 5, "int4": 6, "fp8": 7}
_BLOCK = 16  # rows of torch's own product, always
_SLICE = 1 << 20  # weights that are dequantised at a time


class _Matrix(ctypes.Structure):
    """Matrix of products.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "zeros", "order", "bias")),
        ("levels", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("out", "columns", "group")),
        *((name, ctypes.c_int32) for name in ("kind", "scale_kind", "middle")),
    )


class RowProduct:
    """Rows [R, columns] of one dtype to [R, out], by a matrix in the form in which it is stored."""

    def __init__(
        self,
        weight: torch.Tensor,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        codes: str = "",
        scales: torch.Tensor | None = None,
        zeros: torch.Tensor | None = None,
        group: int = 0,
        middle: int = 0,
        levels: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        dequantised: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        """`shape`: (out, columns); `dtype`: of the rows. All tensors are contiguous, on the CPU.

        `weight` is plain, [out, columns] in `dtype`, or holds `codes`: "int8", int8 of that shape;
        "nf4", "iq4" or "fp4", uint8 [out, columns / 2], the even column in the high nibble, for the
        16 `levels` in float32; "fp8", uint8 [out, columns], E4M3 without NaNs; or "int4", uint8
        [tiles, columns, TILE / 2], of a tile output j in the low nibble of byte j, or in the high
        one of byte j - TILE / 2.

        A weight is code * scale + zero, of int4 code - `middle`. `scales` and `zeros` [out, groups]
        are of so many columns (`group`); int4 has both as pairs, [groups, tiles * TILE, 2]. They
        may be of any type to compute in. `order` int32 [columns]: the column that each stored one
        is. `bias` [out].

        `dequantised(first, end)` gives outputs [first, end) of codes, [end - first, columns] in
        float64 where that is `dtype`, else in float32: all that is used where nothing can compile.
        """
        self.out_features, self.in_features = shape
        self.dtype = dtype
        self._wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._weight, self._order, self._dequantised = weight, order, dequantised
        self._bias = None if bias is None else bias.detach().to(self._wide).contiguous()
        parts = {"weight": weight, "scales": scales, "zeros": zeros, "levels": levels}
        parts |= {"order": order, "bias": self._bias}
        self.held = {name: part for name, part in parts.items() if part is not None}
        assert all(part.is_contiguous() for part in self.held.values())
        self._multiply = _multiply()
        self._kind = NUMBERS[dtype]
        self.matrix = _Matrix(
            **{name: part.data_ptr() for name, part in self.held.items()},
            out=shape[0],
            columns=shape[1],
            group=group or shape[1],
            kind=_CODES[codes] if codes else NUMBERS[weight.dtype],
            scale_kind=0 if scales is None else NUMBERS[scales.dtype],
            middle=middle,
        )

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + bias, in new memory."""
        count, columns = rows.shape
        assert rows.dtype == self.dtype
        assert columns == self.in_features
        multiply = self._multiply
        if multiply is None:
            return self._in_blocks(rows)
        rows = rows.contiguous()
        result = rows.new_empty(count, self.out_features)
        if multiply(
            ctypes.byref(self.matrix),
            rows.data_ptr(),
            result.data_ptr(),
            count,
            self._kind,
            torch.get_num_threads(),
        ):
            raise MemoryError("no memory for a product of matrices")
        return result

    def _in_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """The same by torch: always _BLOCK rows by the same slices, whatever fills them."""
        count, wide = rows.shape[0], self._wide
        if self._order is not None:
            rows = rows.index_select(1, self._order)
        result = torch.empty(count, self.out_features, dtype=self.dtype)
        # Where columns suit no alignment, torch's sums depend on the place of a row in its block.
        more = -self.in_features % _BLOCK
        blocks = torch.zeros(-(-count // _BLOCK) * _BLOCK, self.in_features + more, dtype=wide)
        blocks[:count, : self.in_features] = rows
        step = max(1, _SLICE // self.in_features // TILE) * TILE
        for first in range(0, self.out_features, step):
            end = min(first + step, self.out_features)
            weight = pad(self._slice(first, end), (0, more))
            for row in range(0, count, _BLOCK):
                part = blocks[row : row + _BLOCK] @ weight.T
                if self._bias is not None:
                    part += self._bias[first:end]
                result[row : row + _BLOCK, first:end] = part[: count - row]
        return result

    def _slice(self, first: int, end: int) -> torch.Tensor:
        if self._dequantised is None:
            return self._weight[first:end].to(self._wide)
        return self._dequantised(first, end)


class EachProduct:
    """Several products of one shape and dtype, each for rows of its own, as one."""

    def __init__(self, products: Sequence[RowProduct]) -> None:
        self._products = products
        at = [ctypes.addressof(one.matrix) for one in products]
        self._matrices = (ctypes.c_void_p * len(at))(*at)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Of contiguous rows [products, R, columns] those that each makes, [products, R, out]."""
        library, first = load("products"), self._products[0]
        if library is None or _multiply() is None:
            pairs = zip(self._products, rows, strict=True)
            return torch.stack([product(own) for product, own in pairs])
        count, each, columns = rows.shape
        assert rows.dtype == first.dtype
        assert (count, columns) == (len(self._products), first.in_features)
        result = rows.new_empty(count, each, first.out_features)
        if library.multiply_each(
            self._matrices,
            ctypes.c_int64(count),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(result.data_ptr()),
            ctypes.c_int64(each),
            NUMBERS[first.dtype],
            torch.get_num_threads(),
        ):
            raise MemoryError("no memory for a product of matrices")
        return result


@functools.cache
def _multiply() -> Callable[..., int] | None:
    """`multiply` of products.c, where it can be compiled."""
    library = load("products")
    if library is None:
        return None
    function = library.multiply
    function.argtypes = (
        *(ctypes.c_void_p for _ in range(3)),
        ctypes.c_int64,
        ctypes.c_int,
        ctypes.c_int,
    )
    function.restype = ctypes.c_int
    return function
