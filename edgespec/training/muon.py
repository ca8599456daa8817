"""Muon: steps of matrices along the nearest orthogonal matrix to their momentum.

Keller Jordan's optimiser, scaled to steps of AdamW's size as Liu et al. do (arXiv 2502.16982,
§2.2). It is in torch from 2.9 on, which JetPack does not have yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic that drives singular values to about 1
_ITERATIONS = 5
_MOMENTUM = 0.95


class Muon(torch.optim.Optimizer):
    """For parameters with two dimensions."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, low: bool = False
    ) -> None:
        """`low`: iterate in bfloat16, which is enough for a direction (Jordan's code does)."""
        super().__init__(parameters, {"lr": lr})
        self._low = low

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One step along the gradients. A closure is not called: nothing here uses one."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - _MOMENTUM)
                ahead = parameter.grad.lerp(momentum, _MOMENTUM)
                size = 0.2 * max(parameter.shape) ** 0.5
                along = orthogonal(ahead.bfloat16() if self._low else ahead)
                parameter.sub_(along.to(parameter.dtype), alpha=group["lr"] * size)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the orthogonal matrix nearest to `matrix`, by Newton and Schulz's iteration."""
    first, second, third = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: torch.Tensor = wide / (wide.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        square = x @ x.T
        x = first * x + (second * square + third * square @ square) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T
