"""Trying a kernel: a kernel of some library is used only after it gave the right result once."""

from __future__ import annotations

from collections.abc import Callable

import torch

ROWS = (1, 4, 5, 16, 33)
"""Numbers of rows to try: kernels have code of their own for one row, few rows and remainders."""

_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}
"""Root mean square error against that of the result, beyond which a product is wrong."""


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference, against that of `expected`; NaN if either has one."""
    difference = (result.detach().cpu().double() - expected).square().mean()
    return float((difference / expected.square().mean().clamp(min=1e-300)).sqrt())


def agrees(
    multiply: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether `multiply(x)` is x Wᵀ for W = `weight`, float64 [out, in], and x in `dtype`."""
    return not complaint(multiply, weight, dtype, device)


def complaint(
    multiply: Callable[[torch.Tensor], torch.Tensor],
    weight: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> str:
    """What is wrong with `multiply(x)`, which should be x Wᵀ; the empty string if nothing is."""
    generator = torch.Generator().manual_seed(1)
    for count in ROWS:
        rows = torch.randn(count, weight.shape[1], generator=generator).to(dtype)
        try:
            result = multiply(rows.to(device)).cpu()
        except Exception as error:  # kernels raise what they like
            return f"its first kernel failed: {_first_line(error)}"
        expected = rows.double() @ weight.T
        if result.shape != expected.shape:
            return f"its result has shape {list(result.shape)}, not {list(expected.shape)}"
        if not relative_error(result, expected) <= _TOLERANCE[dtype]:
            return f"its result for {count} rows is wrong"
    return ""


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
