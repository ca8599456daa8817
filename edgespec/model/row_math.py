"""Row math: what layers do with rows beside products and beside what caches hold.

Exact text needs that a row's result does not depend, to the bit, on which rows are beside it, where
its keys lie, nor how a prompt was cut. CompiledRows and SingleRows hold to that. RowMath itself is
torch's own arithmetic over all rows together, as an accelerator needs it: there the bits of a row
follow from the shape of the pass too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch.nn.functional import gelu, layer_norm, silu

from edgespec.kernels.rows import CLAMPED, LAST, UNGATED, WHOLE, Clamp, RowKernels, Runs, joined
from edgespec.model.kv_cache import AnyHeld, Held
from edgespec.model.rope import Angles, Rotary, apply_rotary
from edgespec.model.row_codes import decoded
from edgespec.model.tree_attention import (
    AttentionForm,
    JointVisibility,
    Seen,
    Visibility,
    pieces,
    seen_attention,
    tree_attention,
)

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    UNGATED: lambda x: torch.relu(x).square(),
}

Made = TypeVar("Made", torch.Tensor, tuple[torch.Tensor, ...])


class Norm:
    """RMSNorm: rows over the root of their mean square, times a gain; less their mean before that
    if it is `centred`.

    Reckoned in float32 at least, and rounded once, where transformers rounds before the gain too.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        eps: float,
        above_one: bool,
        times: float = 1.0,
        centred: bool = False,
    ) -> None:
        """`weight` [n]: the gain, or that above 1, which counts so many `times`. Its dtype is that
        of the rows."""
        self._shape, self.eps, self._dtype = list(weight.shape), eps, weight.dtype
        self.centred = centred
        self._gain = 1.0 + weight.float() if above_one else weight
        if times != 1.0:
            self._gain = self._gain.float() * times
        self._wide = weight.dtype == torch.float64 or self._gain.dtype != weight.dtype
        # None in float64, which is there to be compared with transformers: as it reckons norms and
        # angles in float32 even then, so does torch for us.
        self.gain = None if weight.dtype == torch.float64 else self._gain.float().contiguous()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., n], in new memory, by torch."""
        if self.centred:
            gain = self._gain.float()
            return layer_norm(rows.float(), self._shape, gain, None, self.eps).to(self._dtype)
        if not self._wide:
            return torch.rms_norm(rows, self._shape, self._gain, self.eps)
        rows = rows.float()
        if self._gain.dtype == torch.float32:
            normed = torch.rms_norm(rows, self._shape, self._gain, self.eps)
        else:
            normed = torch.rms_norm(rows, self._shape, None, self.eps) * self._gain
        return normed.to(self._dtype)


class Taps:
    """What a short convolution multiplies each row's numbers by, the furthest row's first."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` [n, 1, taps], `bias` [n]. They are held as what sums are reckoned in."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.weights = weight[:, 0].T.to(wide).contiguous()
        self.bias = None if bias is None else bias.to(wide)

    def __call__(self, held: Held, gates: torch.Tensor, seen: Visibility) -> torch.Tensor:
        """The sum over the rows [1, 1, T, n] before each row and itself, times its gate [R, n], by
        torch: each number by itself, so that nothing beside it counts."""
        slots, absent = seen.behind(len(self.weights))
        first, *others = (decoded(one, gates.shape[1], gates.dtype) for one in pieces(held))
        rows, before = first[0, 0][slots if not others else slots.clamp(max=first.shape[2] - 1)], 0
        for piece, other in zip((first, *others), others, strict=False):
            before += piece.shape[2]
            own = (slots - before).clamp(0, other.shape[2] - 1)
            rows = torch.where((slots < before)[..., None], rows, other[0, 0][own])
        terms = (rows.masked_fill_(absent, 0.0) * self.weights).unbind(1)
        total = terms[0] if self.bias is None else self.bias + terms[0]
        for term in terms[1:]:
            total = total + term
        return total.mul_(gates).to(gates.dtype)


class HeadNorm:
    """The RMSNorm of each head's queries and keys, which stay where they are. `last`: it is behind
    their turning. `whole`: of all queries, and of all keys, as one row each."""

    def __init__(
        self, query: torch.Tensor, key: torch.Tensor, heads: int, kv_heads: int, eps: float,
        above_one: bool, last: bool = False, whole: bool = False,
    ) -> None:  # fmt: skip
        """`query`, `key` [head_dim], or of a `whole` norm [heads * head_dim]: weights, as Norm
        takes them."""
        self.last, self.whole, self.ways = last, None, LAST * last | WHOLE * whole
        if whole:
            self.whole = Norm(query, eps, above_one), Norm(key, eps, above_one)
            self.eps, gain, other = eps, self.whole[0].gain, self.whole[1].gain
            self.gains = None if gain is None or other is None else (gain, other)
            self._heads = [heads, kv_heads]
            return
        gains = torch.cat((query.repeat(heads, 1), key.repeat(kv_heads, 1)))
        self._gains = 1.0 + gains.float() if above_one else gains
        self._shape, self.eps = [len(query)], eps
        self._wide = gains.dtype == torch.float64 or above_one
        real = self._gains.float()
        self.gains = None if gains.dtype == torch.float64 else (real[0].clone(), real[-1].clone())

    def __call__(self, heads: torch.Tensor) -> None:
        """Norm `heads` [R, heads + kv_heads, head_dim], by torch."""
        if self.whole is not None:
            for part, norm in zip(heads.split(self._heads, 1), self.whole, strict=True):
                part.copy_(norm(part.flatten(1)).view_as(part))
            return
        rows = heads.float() if self._wide else heads
        torch.mul(torch.rms_norm(rows, self._shape, None, self.eps), self._gains, out=heads)


class RowMath:
    """What a layer asks for, by torch's operations over all rows: their bits depend on the shape of
    the pass. Rows are [R, n] in the layers' dtype, results in new memory.

    `kernels`: what does it, as profiles name it (planning.profile.KERNELS).
    """

    kernels = "torch"

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        """RMSNorm of rows."""
        return norm(rows)

    def add(
        self, rows: torch.Tensor, more: torch.Tensor, share: float, norm: Norm | None
    ) -> torch.Tensor:
        """Rows plus `share` times `more`, or times its RMSNorm."""
        return torch.add(rows, more if norm is None else norm(more), alpha=share)

    def add_and_norm(
        self, rows: torch.Tensor, more: torch.Tensor, share: float, norm: Norm | None, then: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and RMSNorm of it by `then`."""
        rows = self.add(rows, more, share, norm)
        return rows, self.norm(rows, then)

    def angles(self, angles: Angles, positions: torch.Tensor) -> Rotary:
        """What `rotate` takes for rows at `positions` int64 [R]."""
        return angles(positions)

    def rotate(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        rotary: Rotary | None,
        norm: HeadNorm | None,
        ways: int = 0,
    ) -> None:
        """Norm and rotate the queries' and keys' heads of `qkv` [R, heads + 2 * kv_heads,
        head_dim], where they are; PAIRED `ways` rotate neighbours together. Where `rotary` has
        numbers [R] beside angles, queries are multiplied by these."""
        rotated = qkv.narrow(1, 0, heads + kv_heads)
        if norm is not None and not norm.last:
            norm(rotated)
        if rotary is not None:
            apply_rotary(rotated, rotary[0], rotary[1], bool(ways))
            if len(rotary) > 2:
                qkv.narrow(1, 0, heads).mul_(rotary[2][:, None, None])
        if norm is not None and norm.last:
            norm(rotated)

    def gated(
        self, gate_up: torch.Tensor, activation: str, clamp: Clamp = (0.0, 0.0)
    ) -> torch.Tensor:
        """Of rows [R, 2 * n] the activation of the first half times the second: [R, n]. Of rows [R,
        n] alone, where it is UNGATED. `clamp`: of CLAMPED."""
        if activation == UNGATED:
            return _ACTIVATIONS[activation](gate_up)
        gate, up = gate_up.chunk(2, 1)
        if activation == CLAMPED:
            slope, limit = clamp
            gate = gate.clamp(max=limit)
            return (up.clamp(-limit, limit) + 1).mul_(gate * torch.sigmoid(gate * slope))
        return _ACTIVATIONS[activation](gate).mul_(up)

    def attention(
        self, query: torch.Tensor, key: AnyHeld, value: AnyHeld, seen: Seen, form: AttentionForm
    ) -> torch.Tensor:
        """See tree_attention."""
        return tree_attention(query, key, value, seen, form)

    def convolved(self, held: AnyHeld, mixed: torch.Tensor, seen: Seen, taps: Taps) -> torch.Tensor:
        """Convolution over what is held, times the second third of `mixed` [R, 3 * n]: [R, n]."""
        gates = mixed.chunk(3, 1)[1]
        if isinstance(seen, JointVisibility):
            parts = zip(held, gates.split(seen.rows), seen.parts, strict=True)
            return torch.cat([taps(*part) for part in parts])
        assert not isinstance(held, list)
        return taps(held, gates, seen)

    def by_row(self, work: Callable[..., Made], *rows: torch.Tensor) -> Made:
        """What `work`, by torch, makes of rows [R, ...]: one or several tensors [R, ...]."""
        return work(*rows)


class SingleRows(RowMath):
    """A RowMath of torch's operations on one row after the other, over what it sees alone: slow,
    for a CPU without a compiler."""

    def by_row(self, work: Callable[..., Made], *rows: torch.Tensor) -> Made:
        # Rows of their own memory: a product may depend on where its factors begin.
        split = zip(*(one.split(1) for one in rows), strict=True)
        made = [work(*(one.clone() for one in each)) for each in split]
        if isinstance(made[0], torch.Tensor):
            return torch.cat(made)
        return tuple(torch.cat(of) for of in zip(*made, strict=True))

    def add(
        self, rows: torch.Tensor, more: torch.Tensor, share: float, norm: Norm | None
    ) -> torch.Tensor:
        whole = super().add
        return self.by_row(lambda one, other: whole(one, other, share, norm), rows, more)

    def angles(self, angles: Angles, positions: torch.Tensor) -> Rotary:
        made = zip(*(angles(one) for one in positions.split(1)), strict=True)
        return tuple(torch.cat(each) for each in made)

    def rotate(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        rotary: Rotary | None,
        norm: HeadNorm | None,
        ways: int = 0,
    ) -> None:
        for number, row in enumerate(qkv.split(1)):
            own = None if rotary is None else tuple(one[number : number + 1] for one in rotary)
            super().rotate(row, heads, kv_heads, own, norm, ways)

    def gated(
        self, gate_up: torch.Tensor, activation: str, clamp: Clamp = (0.0, 0.0)
    ) -> torch.Tensor:
        whole = super().gated
        return self.by_row(lambda one: whole(one, activation, clamp), gate_up)

    def attention(
        self, query: torch.Tensor, key: AnyHeld, value: AnyHeld, seen: Seen, form: AttentionForm
    ) -> torch.Tensor:
        return seen_attention(query, key, value, seen, form)


class CompiledRows(SingleRows):
    """A RowMath of compiled functions."""

    kernels = "compiled"

    def __init__(self, kernels: RowKernels) -> None:
        self._kernels = kernels

    def norm(self, rows: torch.Tensor, norm: Norm) -> torch.Tensor:
        if norm.gain is None:
            return norm(rows)
        return self._kernels.norm(rows, norm.gain, norm.eps, norm.centred)

    def add(
        self, rows: torch.Tensor, more: torch.Tensor, share: float, norm: Norm | None
    ) -> torch.Tensor:
        if norm is None:
            return self._kernels.add(rows, more, share)
        if norm.gain is None:
            return self._kernels.add(rows, norm(more), share)
        return self._kernels.add(rows, more, share, norm.gain, norm.eps)

    def add_and_norm(
        self, rows: torch.Tensor, more: torch.Tensor, share: float, norm: Norm | None, then: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if then.gain is None:
            return super().add_and_norm(rows, more, share, norm, then)
        gain = None if norm is None else norm.gain
        return self._kernels.add_and_norm(rows, more, share, gain, then.gain, then.eps)

    def angles(self, angles: Angles, positions: torch.Tensor) -> Rotary:
        if angles.dtype != torch.float64:
            made = self._kernels.angles(positions, angles.frequencies, angles.factor)
            return (*made, *angles.scales(positions))
        cosines, sines, *scales = super().angles(angles, positions)
        half = len(angles.frequencies)
        return cosines[:, 0, :half].contiguous(), sines[:, 0, half:].contiguous(), *scales

    def rotate(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        rotary: Rotary | None,
        norm: HeadNorm | None,
        ways: int = 0,
    ) -> None:
        gains, last = None if norm is None else norm.gains, norm is not None and norm.last
        by_torch = norm if gains is None else None
        if by_torch is not None and not last:
            by_torch(qkv.narrow(1, 0, heads + kv_heads))
        if rotary is not None or gains is not None:
            eps, own = (0.0, 0) if norm is None else (norm.eps, norm.ways)
            self._kernels.rotate(qkv, heads, kv_heads, rotary, gains, eps, own | ways)
        if by_torch is not None and last:
            by_torch(qkv.narrow(1, 0, heads + kv_heads))

    def gated(
        self, gate_up: torch.Tensor, activation: str, clamp: Clamp = (0.0, 0.0)
    ) -> torch.Tensor:
        return self._kernels.gated(gate_up, activation, clamp)

    def attention(
        self, query: torch.Tensor, key: AnyHeld, value: AnyHeld, seen: Seen, form: AttentionForm
    ) -> torch.Tensor:
        keys = key if isinstance(key, list) else [key]
        values = value if isinstance(value, list) else [value]
        return self._kernels.attention(
            query,
            [pieces(held) for held in keys],
            [pieces(held) for held in values],
            [len(query)] if isinstance(seen, Visibility) else seen.rows,
            self.runs(seen, form.window),
            form.scaling,
            form.softcap,
            form.sinks,
        )

    def convolved(self, held: AnyHeld, mixed: torch.Tensor, seen: Seen, taps: Taps) -> torch.Tensor:
        every = held if isinstance(held, list) else [held]
        return self._kernels.convolved(
            [pieces(one) for one in every],
            [len(mixed)] if isinstance(seen, Visibility) else seen.rows,
            self.runs(seen, len(taps.weights)),
            taps.weights,
            taps.bias,
            mixed.contiguous(),
        )

    def runs(self, seen: Seen, window: int | None) -> Runs:
        """Which slots the rows see, made once a pass."""
        if window not in seen.runs:
            seen.runs[window] = (
                self._kernels.runs(seen.mask(), seen.rows, seen.slots, window)
                if isinstance(seen, Visibility)
                else joined([self.runs(part, window) for part in seen.parts])
            )
        return seen.runs[window]


BATCHED = RowMath()
"""Torch's operations alone."""
