"""Compiled rows: what a layer does beside its products, by rows.c, on tensors in the CPU's memory.

A row's results depend, to the bit, on that row and what it sees alone; rows.c says how. Dtypes are
float32, float16, bfloat16 and float64, which all is reckoned in only if the rows are; gains are for
the others, angles in what is reckoned in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from edgespec.kernels.compiled import load
from edgespec.kernels.products import NUMBERS

UNGATED = "relu2"
"""An activation that multiplies nothing: the square of what is above 0."""
CLAMPED = "clamped"
"""gpt-oss' activation, which a slope and a limit go with (see `Clamp`)."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "sigmoid": 3, UNGATED: 4, CLAMPED: 5}
"""As rows.c has them."""
Clamp = tuple[float, float]
"""Slope and limit: both sides are kept within the limit, and become gate times the sigmoid of slope
times gate, times up + 1."""
WHOLE, LAST, PAIRED = 1, 2, 4
"""Ways to norm and turn, see `turn` in rows_of.h."""

_INT, _LONG, _REAL, _AT = ctypes.c_int, ctypes.c_int64, ctypes.c_double, ctypes.c_void_p

Pieces = tuple[torch.Tensor, ...]
"""Keys or values [1, kv_heads, T, head_dim] of one request, in order."""


class Runs(NamedTuple):
    """The runs of slots that R rows see: `ends` int32 [n, 2], a first slot and one past the last;
    those of row r are firsts[r] to firsts[r + 1], of `firsts` int64 [R + 1]."""

    firsts: torch.Tensor
    ends: torch.Tensor

    def prefixes(self) -> list[int]:
        """How many slots from the first one on each row sees without a gap."""
        first_runs = self.ends[self.firsts[:-1]].tolist()
        return [0 if first else end for first, end in first_runs]


def joined(every: Sequence[Runs]) -> Runs:
    """Those of several requests' rows, one after the other."""
    if len(every) == 1:
        return every[0]
    firsts, before = [], 0
    for one in every:
        firsts.append(one.firsts[:-1] + before)
        before += len(one.ends)
    return Runs(
        torch.cat([*firsts, torch.tensor([before])]), torch.cat([one.ends for one in every])
    )


class RowKernels:
    """The functions of rows.c."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._runs, self._angles = library.row_runs, library.row_angles
        self._norm, self._turn = library.row_norm, library.row_turn
        self._gated, self._attention = library.row_gated, library.row_attention
        self._runs.argtypes = [_AT, _LONG, _LONG, _LONG, _AT, _AT, _AT, _LONG, _AT]
        self._runs.restype = _LONG
        self._angles.argtypes = [_LONG, _LONG, _AT, _AT, ctypes.c_float, _AT, _AT]
        self._norm.argtypes = [_INT, _LONG, _LONG, _AT, _AT, _REAL, _AT, _AT, _REAL, _INT, _AT, _AT]
        self._turn.argtypes = [_INT, *[_LONG] * 6, _INT, *[_AT] * 6, _REAL]
        self._gated.argtypes = [_INT, _LONG, _LONG, _INT, _REAL, _REAL, _AT, _AT]
        self._attention.argtypes = [_INT, _INT, _LONG, *[_AT] * 5, *[_LONG] * 3, _REAL, _REAL]
        self._attention.argtypes += [_AT, _AT, _LONG, _AT, _INT]
        self._convolved = library.row_convolved
        self._convolved.argtypes = [_INT, _INT, _LONG, *[_AT] * 5, _LONG, _LONG, *[_AT] * 4]
        for one in (self._angles, self._norm, self._turn, self._gated, self._convolved):
            one.restype = None

    def runs(
        self, mask: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, window: int | None
    ) -> Runs:
        """Which slots rows see by a mask bool [..., R, T]; `rows` int64 [R], `slots` int64 [T]: the
        positions, of which only those less than `window` behind a row's own are seen."""
        mask, rows, slots = mask.contiguous(), rows.contiguous(), slots.contiguous()
        count, width = mask.shape[-2:]
        firsts = torch.empty(count + 1, dtype=torch.int64)
        room = found = 8 * count
        while found >= room:
            room = found + 1
            ends = torch.empty((room, 2), dtype=torch.int32)
            found = self._runs(
                mask.data_ptr(), count, width, window or 0, rows.data_ptr(), slots.data_ptr(),
                ends.data_ptr(), room, firsts.data_ptr(),
            )  # fmt: skip
        return Runs(firsts, ends[:found])

    def angles(
        self, positions: torch.Tensor, frequencies: torch.Tensor, factor: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines float32 [R, half] of `positions` int64 [R] times `frequencies` float32
        [half], times a factor."""
        positions = positions.contiguous()
        count, half = len(positions), len(frequencies)
        cosines, sines = torch.empty((2, count, half))
        self._angles(
            count, half, positions.data_ptr(), frequencies.data_ptr(), factor,
            cosines.data_ptr(), sines.data_ptr(),
        )  # fmt: skip
        return cosines, sines

    def norm(
        self, rows: torch.Tensor, gain: torch.Tensor, eps: float, centred: bool = False
    ) -> torch.Tensor:
        """RMSNorm of rows [R, n], less their mean if `centred`, with a gain [n], in new memory."""
        rows = rows.contiguous()
        out = torch.empty_like(rows)
        self._norm(
            NUMBERS[rows.dtype], *rows.shape, rows.data_ptr(), None, 1.0, None, gain.data_ptr(),
            eps, centred, None, out.data_ptr(),
        )  # fmt: skip
        return out

    def add(
        self,
        rows: torch.Tensor,
        more: torch.Tensor,
        share: float,
        more_gain: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Rows [R, n] with `share` times `more` added, in new memory; if that has a gain [n], it is
        normed before."""
        rows, more = rows.contiguous(), more.contiguous()
        out = torch.empty_like(rows)
        self._norm(
            NUMBERS[rows.dtype], *rows.shape, rows.data_ptr(), more.data_ptr(), share,
            _address(more_gain), None, eps, 0, out.data_ptr(), None,
        )  # fmt: skip
        return out

    def add_and_norm(
        self,
        rows: torch.Tensor,
        more: torch.Tensor,
        share: float,
        more_gain: torch.Tensor | None,
        gain: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `add` gives, and RMSNorm of that with `gain` [n]."""
        rows, more = rows.contiguous(), more.contiguous()
        out, normed = torch.empty_like(rows), torch.empty_like(rows)
        self._norm(
            NUMBERS[rows.dtype], *rows.shape, rows.data_ptr(), more.data_ptr(), share,
            _address(more_gain), gain.data_ptr(), eps, 0, out.data_ptr(), normed.data_ptr(),
        )  # fmt: skip
        return out, normed

    def rotate(
        self,
        qkv: torch.Tensor,
        heads: int,
        kv_heads: int,
        angles: tuple[torch.Tensor, ...] | None,
        gains: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        ways: int = 0,
    ) -> None:
        """Norm the first `heads` and the next `kv_heads` heads of contiguous `qkv` [R, ...,
        head_dim] by their gains, if there are, turn them by `angles` (see there), and multiply the
        first ones by [R] numbers that these may have beside them. `ways`: of WHOLE, LAST, PAIRED.
        """
        rows, head_dim = qkv.shape[0], qkv.shape[-1]
        cosines, sines, scales = (*(angles or (None, None)), None)[:3]
        query_gain, key_gain = gains or (None, None)
        self._turn(
            NUMBERS[qkv.dtype], rows, qkv.stride(0), heads, kv_heads, head_dim,
            0 if cosines is None else cosines.shape[1], ways, qkv.data_ptr(), _address(cosines),
            _address(sines), _address(scales), _address(query_gain), _address(key_gain), eps,
        )  # fmt: skip

    def gated(
        self, gate_up: torch.Tensor, activation: str, clamp: Clamp = (0.0, 0.0)
    ) -> torch.Tensor:
        """Of rows [R, 2 * n] the activation of the first half times the second: [R, n]. Of rows [R,
        n] alone, where it is UNGATED. `clamp`: of CLAMPED."""
        gate_up = gate_up.contiguous()
        rows, width = gate_up.shape
        inner = width if activation == UNGATED else width // 2
        out = gate_up.new_empty((rows, inner))
        self._gated(
            NUMBERS[gate_up.dtype], rows, inner, ACTIVATIONS[activation], *clamp,
            gate_up.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def convolved(
        self,
        held: Sequence[Pieces],
        part_rows: Sequence[int],
        runs: Runs,
        weights: torch.Tensor,
        bias: torch.Tensor | None,
        mixed: torch.Tensor,
    ) -> torch.Tensor:
        """Of contiguous `mixed` [R, 3 * n] the second n numbers of each row, times a sum over the
        slots that it sees: what is held there [n] times `weights` [taps, n], the last one's by the
        last, and `bias` [n]. Weights are of what sums are reckoned in; the rest as in `attention`.
        """
        numbers, pieces, after = [], [0], [0]
        for own, own_rows in zip(held, part_rows, strict=True):
            numbers += [
                n for one in own for n in (one.data_ptr(), 0, 0, one.shape[3], one.shape[2])
            ]
            pieces.append(len(numbers) // 5)
            after.append(after[-1] + own_rows)
        rows, n = mixed.shape[0], mixed.shape[1] // 3
        assert after[-1] == rows
        out = mixed.new_empty((rows, n))
        self._convolved(
            NUMBERS[mixed.dtype], NUMBERS[held[0][0].dtype], len(part_rows),
            (_LONG * len(after))(*after), (_LONG * len(pieces))(*pieces),
            (_LONG * len(numbers))(*numbers), runs.firsts.data_ptr(), runs.ends.data_ptr(), n,
            len(weights), weights.data_ptr(), _address(bias), mixed.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out

    def attention(
        self,
        query: torch.Tensor,
        keys: Sequence[Pieces],
        values: Sequence[Pieces],
        part_rows: Sequence[int],
        runs: Runs,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of `query` [R, heads, head_dim], `part_rows` rows of one request after the
        other, over what each request holds: [R, heads * head_dim].

        A row's sums go over the slots that it sees alone, in their order. See AttentionForm for the
        rest. Raises MemoryError.
        """
        rows, heads, head_dim = query.shape
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        numbers, pieces, after, ends = [], [0], [0], 0
        for own_keys, own_values, own_rows in zip(keys, values, part_rows, strict=True):
            for key, value in zip(own_keys, own_values, strict=True):
                assert key.stride()[1:] == value.stride()[1:]
                assert key.stride(3) == 1
                numbers += [key.data_ptr(), value.data_ptr(), *key.stride()[1:3], key.shape[2]]
            ends += own_rows
            pieces.append(len(numbers) // 5)
            after.append(ends)
        assert ends == rows
        if sinks is not None:
            wide = torch.float64 if query.dtype == torch.float64 else torch.float32
            sinks = sinks.to(wide).contiguous()
        out = query.new_empty((rows, heads * head_dim))
        parts = len(part_rows)
        if self._attention(
            NUMBERS[query.dtype], NUMBERS[keys[0][0].dtype], parts, (_LONG * (parts + 1))(*after),
            (_LONG * (parts + 1))(*pieces), (_LONG * len(numbers))(*numbers),
            runs.firsts.data_ptr(), runs.ends.data_ptr(), heads, keys[0][0].shape[1], head_dim,
            scaling, softcap or 0.0, _address(sinks), query.data_ptr(), query.stride(0),
            out.data_ptr(), torch.get_num_threads(),
        ):  # fmt: skip
            raise MemoryError("no memory for the scores of attention")
        return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def compiled_rows() -> RowKernels | None:
    """None without a compiler (see kernels.compiled)."""
    library = load("rows")
    return None if library is None else RowKernels(library)
