"""Unrolled steps: a head trained on its own outputs, as it will meet them down a tree.

EAGLE-3 §3.2 (training-time test): step 0 reads the base's true features, step i what step i - 1
gave out for the position before. A row of step i sees true rows up to i positions back, and then
the one row of each later step that lies on its own path.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from edgespec.drafting.eagle.head import EagleHead, rope_at


class _Paths:
    """Attention (see head.Attend) of one step after the other over rows [B, heads, R, head_dim]."""

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(group, 1))
        self._values.append(value.repeat_interleave(group, 1))
        step, rows = len(self._keys) - 1, query.shape[2]
        if step == 0:
            return scaled_dot_product_attention(
                query, self._keys[0], self._values[0], is_causal=True
            )
        query = query * query.shape[-1] ** -0.5
        far = torch.ones((rows, rows), dtype=torch.bool, device=query.device).tril(-step)
        scores = (query @ self._keys[0].transpose(2, 3)).masked_fill(~far, float("-inf"))
        near = [
            (query * _later(key, step - made)).sum(-1, keepdim=True)
            for made, key in enumerate(self._keys[1:], start=1)
        ]
        weights = torch.softmax(torch.cat([scores, *near], -1).float(), -1).to(query.dtype)
        seen = weights[..., :rows] @ self._values[0]
        for made, value_rows in enumerate(self._values[1:], start=1):
            column = weights[..., rows + made - 1 : rows + made]
            seen = seen + column * _later(value_rows, step - made)
        return seen


def unrolled(
    head: EagleHead, given: torch.Tensor, embedded: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """The features [B, R, hidden] that come out of each of `steps` steps.

    `given` (see EagleHead.features) and `embedded` [B, R, hidden] are of the pairs at positions
    0 to R - 1. Row p of step i is what a guess i levels below the root p + 1 - i gives; rows below
    i mean nothing.
    """
    rows = given.shape[1]
    positions = torch.arange(rows, device=given.device)
    angles = rope_at(positions, head.shape.ropes[0], head.shape.head_dim, embedded.dtype)
    attend = _Paths()
    features = head.features(given)
    for step in range(steps):
        if step:
            features = _later(features, 1)
        features = head(features, embedded, angles, attend)
        yield features


def _later(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Rows moved `by` positions on; what has no row before it becomes 0."""
    if by == 0:
        return rows
    return pad(rows, (0, 0, by, 0))[..., : rows.shape[-2], :]
