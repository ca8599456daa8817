"""Row math on a GPU, with Triton's kernels: few launches, and rows that nothing beside changes."""

from __future__ import annotations

import torch

from edgespec.kernels.gpu import rows as kernels
from edgespec.kernels.gpu.attention import attention
from edgespec.kernels.gpu.convolutions import convolved
from edgespec.kernels.gpu.places import places_of
from edgespec.kernels.rows import CLAMPED, UNGATED, Clamp
from edgespec.model.kv_cache import AnyHeld, Held
from edgespec.model.rope import Rotary
from edgespec.model.row_math import HeadNorm, Norm, RowMath, Taps
from edgespec.model.tree_attention import (
    AttentionForm,
    JointVisibility,
    Seen,
    Visibility,
    pieces,
    request_by_request,
)

_WIDEST = 512
"""Numbers of a key that the kernel is for; latents have more, and are torch's: there the bits of a
row follow from the shape of the pass too."""


class TritonRows(RowMath):
    """A RowMath of Triton's kernels, for all dtypes but float64. Angles are torch's own: there each
    number stands for itself."""

    kernels = "triton"

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        assert norm.gain is not None
        if norm.centred:
            return super().norm(rows, norm)
        return kernels.norm(rows, norm.gain, norm.eps)

    def add(
        self, rows: torch.Tensor, more: torch.Tensor, share: float, norm: Norm | None
    ) -> torch.Tensor:
        gain, eps = (None, 0.0) if norm is None else (norm.gain, norm.eps)
        return kernels.add(rows, more, share, gain, None, eps)[0]

    def add_and_norm(
        self, rows: torch.Tensor, more: torch.Tensor, share: float, norm: Norm | None, then: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.add(
            rows, more, share, None if norm is None else norm.gain, then.gain, then.eps
        )

    def rotate(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        rotary: Rotary | None,
        norm: HeadNorm | None,
        ways: int = 0,
    ) -> None:
        if rotary is None and norm is None:
            return
        if ways or (rotary is not None and len(rotary) > 2) or (norm is not None and norm.ways):
            return super().rotate(qkv, heads, kv_heads, rotary, norm, ways)  # each row by itself
        gains, eps = (None, 0.0) if norm is None else (norm.gains, norm.eps)
        angles = None if rotary is None else (rotary[0], rotary[1])
        kernels.rotate(qkv, heads, kv_heads, angles, gains, eps)

    def gated(
        self, gate_up: torch.Tensor, activation: str, clamp: Clamp = (0.0, 0.0)
    ) -> torch.Tensor:
        if activation in (UNGATED, CLAMPED):
            return super().gated(gate_up, activation, clamp)  # each number by itself
        return kernels.gated(gate_up, activation)

    def attention(
        self, query: torch.Tensor, key: AnyHeld, value: AnyHeld, seen: Seen, form: AttentionForm
    ) -> torch.Tensor:
        if query.shape[2] > _WIDEST:
            return super().attention(query, key, value, seen, form)
        return request_by_request(_attention, query, key, value, seen, form)

    def convolved(self, held: AnyHeld, mixed: torch.Tensor, seen: Seen, taps: Taps) -> torch.Tensor:
        if isinstance(seen, JointVisibility):
            parts = zip(held, mixed.split(seen.rows), seen.parts, strict=True)
            return torch.cat([self.convolved(*part, taps) for part in parts])
        assert not isinstance(held, list)
        every, behind = [piece[0] for piece in pieces(held)], seen.behind(len(taps.weights))
        return convolved(every, *behind, taps.weights, taps.bias, mixed)


def _attention(
    query: torch.Tensor, key: Held, value: Held, seen: Visibility, form: AttentionForm
) -> torch.Tensor:
    """Attention of the rows of one request."""
    if seen.places is None:
        seen.places = places_of(seen.mask()[0, 0], seen.rows, seen.slots)
    keys, values = ([piece[0] for piece in pieces(held)] for held in (key, value))
    return attention(query, keys, values, seen.places, *form)
