"""Norms, angles and gates for GPUs, interpreted: against float64, and each row alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import gelu, silu

from edgespec.kernels.gpu import rows as kernels
from edgespec.model import row_codes
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.row_codes import CODED, as_held, decoded

ROUNDING = {torch.float32: 3e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}
EPS = 1e-5


def by_chance(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def normed(rows: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    rows = rows.double()
    return rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * gain.double()


def alone_too(work: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The result of all rows, which is that of each alone."""
    whole = work(rows)
    for number in range(len(rows)):
        assert torch.equal(work(rows[number : number + 1])[0], whole[number]), number
    return whole


def check_norms() -> None:
    gain, other = by_chance(96), by_chance(96) + 1
    for dtype, limit in ROUNDING.items():
        both = by_chance(4, 192, dtype=dtype)
        rows, more = (one.contiguous() for one in both.chunk(2, 1))

        result = alone_too(lambda some: kernels.norm(some, gain, EPS), rows)
        assert relative_error(result, normed(rows, gain)) < limit, dtype

        result = alone_too(lambda some: torch.cat(added(some, other, gain), 1), both)
        exact = rows.double() + 0.5 * normed(more, other)
        assert relative_error(result[:, :96], exact) < limit, dtype
        assert relative_error(result[:, 96:], normed(exact, gain)) < 2 * limit, dtype

        whole, same = added(both, None, None)
        assert relative_error(whole, rows.double() + 0.5 * more.double()) < limit, dtype
        assert same is whole


def added(
    both: torch.Tensor, other: torch.Tensor | None, gain: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, more = both.chunk(2, 1)
    return kernels.add(rows, more, 0.5, other, gain, EPS)


def check_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit those of torch: of heads beside others, of sizes that do not fill words, of rows
    of zeros, of what is too large, and of no number."""
    for dtype in ROUNDING:
        for width in (16, 20, 33):
            rows = by_chance(4, 5, 3, width, dtype=dtype)[:, :, 1:].permute(1, 2, 0, 3)[:2]
            rows[0, 0, 1], rows[1, 1, 2, 3], rows[1, 0, 0, 5] = 0.0, torch.inf, torch.nan
            expected = as_held(rows, CODED)
            with monkeypatch.context() as patched:
                patched.setattr(row_codes, "usable", lambda _: True)
                out = as_held(rows, CODED)
            assert torch.equal(out[0], expected[0]), (dtype, width)
            found, wanted = (decoded(one, width, torch.float32) for one in (out, expected))
            assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), (dtype, width)


def check_turns() -> None:
    """Heads that are turned whole or in part, normed or not; values stay."""
    heads, kv_heads = 3, 1
    for dtype, limit in ROUNDING.items():
        for dim, turned, with_gains in ((16, 16, False), (20, 12, True), (32, None, True)):
            qkv = by_chance(3, heads + 2 * kv_heads, dim, dtype=dtype)
            gains = (by_chance(dim), by_chance(dim) + 1) if with_gains else None
            angles = None
            if turned is not None:
                angle = by_chance(3, 1, turned // 2).repeat(1, 1, 2)
                signs = torch.ones(turned)
                signs[: turned // 2] = -1
                angles = angle.cos().to(dtype), (angle.sin() * signs).to(dtype)
            expected = qkv.double().clone()
            part = expected[:, : heads + kv_heads]
            if gains is not None:
                both = torch.cat((gains[0].repeat(heads, 1), gains[1].repeat(kv_heads, 1)))
                part.copy_(normed(part, both))
            if angles is not None and turned is not None:
                first = part[..., :turned].clone()
                exchanged = first.roll(turned // 2, -1)
                part[..., :turned] = first * angles[0].double() + exchanged * angles[1].double()
            result = qkv.clone()
            kernels.rotate(result, heads, kv_heads, angles, gains, EPS)
            assert relative_error(result, expected) < limit, (dtype, dim)
            assert torch.equal(result[:, heads + kv_heads :], qkv[:, heads + kv_heads :])
            for row in range(3):
                alone = qkv[row : row + 1].clone()
                own = None if angles is None else tuple(one[row : row + 1] for one in angles)
                kernels.rotate(alone, heads, kv_heads, own, gains, EPS)
                assert torch.equal(alone[0], result[row]), (dtype, dim, row)


def check_gates() -> None:
    activations = {
        "silu": silu,
        "gelu": gelu,
        "gelu_pytorch_tanh": lambda x: gelu(x, approximate="tanh"),
    }
    for dtype, limit in ROUNDING.items():
        rows = by_chance(3, 2 * 1030, dtype=dtype)
        gate, up = rows.double().chunk(2, 1)
        for name, activation in activations.items():
            result = alone_too(lambda some, name=name: kernels.gated(some, name), rows)
            assert relative_error(result, activation(gate) * up) < 2 * limit, (dtype, name)
