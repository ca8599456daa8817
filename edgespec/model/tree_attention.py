"""Attention under a visibility mask, of the rows of one request or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from edgespec.kernels.gpu.places import Paths, Places
from edgespec.kernels.rows import Runs
from edgespec.model.kv_cache import AnyHeld, Held
from edgespec.model.row_codes import decoded
from edgespec.model.state_steps import Steps
from edgespec.tree.ledger import BoolArray


def tree_mask(committed: int, sees: BoolArray, device: torch.device | str = "cpu") -> torch.Tensor:
    """The mask of rows that see all `committed` slots and, after them, what `sees` says.

    `sees` bool [R, S]; returns bool [1, 1, R, committed + S].
    """
    rows, behind = sees.shape
    mask = np.ones((1, 1, rows, committed + behind), np.bool_)
    mask[0, 0, :, committed:] = sees
    return torch.from_numpy(mask).to(device)


class Visibility:
    """Which slots the R rows of one forward pass see; every layer asks for its own kind of mask.

    A mask is made once, for the first of the layers that need it. The slots that a row sees are in
    the order of their positions, one slot for each: committed rows first, then its ancestors, which
    come before it in every cache (see tree.ledger).
    """

    def __init__(self, mask: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """`mask` bool [1, 1, R, T], true where a row may see a slot; `rows` int64 [R] and `slots`
        int64 [T]: the positions of the rows, and of what the slots hold."""
        self._mask = mask
        self.rows, self.slots = rows, slots
        self.runs: dict[int | None, Runs] = {}  # by window, for CompiledRows
        self.places: Places | None = None  # for TritonRows
        self.paths: Paths | None = None  # for TritonStates
        self.states: dict[tuple[int, ...], Steps] = {}  # by the states that are there
        self._made: dict[tuple[int | None, int], torch.Tensor] = {}
        self._biases: dict[tuple[int | None, int], torch.Tensor] = {}
        self._behind: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def mask(self, window: int | None = None, group: int = 1) -> torch.Tensor:
        """The mask, `group` times below each other: bool [1, 1, group * R, T].

        With a `window`, a row sees itself and the window - 1 positions before its own alone.
        """
        kind = window, group
        if kind not in self._made:
            self._made[kind] = self._make(window, group)
        return self._made[kind]

    def bias(self, dtype: torch.dtype, window: int | None, group: int) -> torch.Tensor:
        """The same as what is added to scores, in the one `dtype` of the pass: 0 or -inf."""
        kind = window, group
        if kind not in self._biases:
            # torch makes this of a bool mask itself, but in every layer again.
            seen = self.mask(window, group)
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._biases[kind] = bias.masked_fill_(~seen, float("-inf"))
        return self._biases[kind]

    def behind(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots of the last `count` positions on each row's path, its own the last one, int64
        [R, count], and where there are none as the text has not begun, bool [R, count, 1]."""
        if count not in self._behind:
            # Nothing is asked of the device, so that a CUDA graph can hold it. What is not seen
            # goes into a column of its own.
            apart = count - 1 - (self.rows[:, None] - self.slots[None, :])
            column = torch.where(self.mask(count)[0, 0], apart, count)
            slots = torch.arange(len(self.slots), device=column.device)
            found = column.new_full((len(self.rows), count + 1), -1)
            found.scatter_(1, column, slots.expand_as(column))
            found = found.narrow(1, 0, count)
            self._behind[count] = found.clamp(min=0), (found < 0)[..., None]
        return self._behind[count]

    def _make(self, window: int | None, group: int) -> torch.Tensor:
        if group > 1:
            return self.mask(window).repeat(1, 1, group, 1)
        if window is None:
            return self._mask
        return self._mask & (self.rows[:, None] - self.slots[None, :] < window)


class JointVisibility:
    """What the rows of several requests see, each of its own request's slots."""

    def __init__(self, parts: Sequence[Visibility], rows: list[int]) -> None:
        """`rows`: how many rows each part has."""
        self.parts, self.rows = parts, rows
        self.runs: dict[int | None, Runs] = {}  # see Visibility


Seen = Visibility | JointVisibility
"""What the rows of one request see, or of several."""


class AttentionForm(NamedTuple):
    """How a layer attends. `scaling`: what scores are multiplied by; `softcap` c turns each score
    x into c · tanh(x / c); `window`: see Visibility; `sinks` [heads]: scores of a slot more, which
    has no value."""

    scaling: float
    softcap: float | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None


def pieces(held: Held) -> tuple[torch.Tensor, ...]:
    """What is held, as pieces in any case."""
    return (held,) if isinstance(held, torch.Tensor) else held


def _decoded(held: Held, numbers: int, dtype: torch.dtype) -> Held:
    """What is held, as numbers."""
    if isinstance(held, torch.Tensor):
        return decoded(held, numbers, dtype)
    return tuple(decoded(piece, numbers, dtype) for piece in held)


def tree_attention(
    query: torch.Tensor, key: AnyHeld, value: AnyHeld, seen: Seen, form: AttentionForm
) -> torch.Tensor:
    """Attention of R new rows over T cached rows, in the tensors' own dtype.

    `query` [R, heads, head_dim]; `key`, `value` [1, kv_heads, T, head_dim], whole or in pieces;
    every row must see at least one of the T slots. Under a JointVisibility the rows are those of
    its parts, one after the other, and `key`, `value` lists of each part's. Returns [R, heads *
    head_dim].
    """
    return request_by_request(_attention, query, key, value, seen, form)


def seen_attention(
    query: torch.Tensor, key: AnyHeld, value: AnyHeld, seen: Seen, form: AttentionForm
) -> torch.Tensor:
    """The same row by row, over the slots that the row sees alone: slow, and nothing else that is
    in the pass or the cache has a part in the bits of a row."""
    return request_by_request(_seen_attention, query, key, value, seen, form)


def request_by_request(
    attend: Callable[[torch.Tensor, Held, Held, Visibility, AttentionForm], torch.Tensor],
    query: torch.Tensor,
    key: AnyHeld,
    value: AnyHeld,
    seen: Seen,
    form: AttentionForm,
) -> torch.Tensor:
    """What `attend`, for the rows of one request, gives for those of one or several (see
    tree_attention)."""
    if isinstance(seen, JointVisibility):
        parts = zip(query.split(seen.rows), key, value, seen.parts, strict=True)
        return torch.cat([attend(*part, form) for part in parts])
    assert not isinstance(key, list)
    assert not isinstance(value, list)
    return attend(query, key, value, seen, form)


def _seen_attention(
    query: torch.Tensor, key: Held, value: Held, seen: Visibility, form: AttentionForm
) -> torch.Tensor:
    keys, values = (torch.cat(pieces(held), 2)[0] for held in (key, value))
    wide = torch.promote_types(query.dtype, torch.float32)
    mask, kv_heads = seen.mask(form.window)[0, 0], keys.shape[0]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for row, own in enumerate(query):
        slots = mask[row].nonzero().squeeze(1)
        # Tensors of their own, as a product may depend on where in memory its factors begin.
        near = [decoded(held.index_select(1, slots), own.shape[1], wide) for held in (keys, values)]
        grouped = own.reshape(kv_heads, -1, own.shape[1]).to(wide, copy=True)
        scores = torch.matmul(grouped, near[0].transpose(1, 2)).mul_(form.scaling)
        if form.softcap is not None:
            scores.div_(form.softcap).tanh_().mul_(form.softcap)
        if form.sinks is not None:
            sinks = form.sinks.to(wide).view(kv_heads, -1, 1)
            weights = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
        else:
            weights = torch.softmax(scores, -1)
        out[row] = torch.matmul(weights, near[1]).view_as(own)
    return out.flatten(1)


def _attention(
    query: torch.Tensor, key: Held, value: Held, seen: Visibility, form: AttentionForm
) -> torch.Tensor:
    """Attention of the rows of one request."""
    rows, heads, head_dim = query.shape
    key, value = (_decoded(held, head_dim, query.dtype) for held in (key, value))
    kv_heads = (key if isinstance(key, torch.Tensor) else key[0]).shape[1]
    group = heads // kv_heads
    # The queries that share a key head become rows of that head: no kernel needs to know of
    # grouped heads then, and the cache is never copied to repeat it for each of them.
    query = query.transpose(0, 1).reshape(1, kv_heads, group * rows, head_dim)
    scaling = form.scaling
    if form.sinks is not None:
        sinks = form.sinks.view(1, kv_heads, group, 1).repeat_interleave(rows, 2)
        out = _sinking_attention(query, key, value, seen.mask(form.window, group), scaling, sinks)
    else:
        bias = seen.bias(query.dtype, form.window, group)
        if form.softcap is not None:
            out = _capped_attention(query, key, value, bias, scaling, form.softcap)
        elif isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor):
            out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
        else:
            out = _attention_in_pieces(query, key, value, bias, scaling)
    return out.reshape(heads, rows, out.shape[3]).transpose(0, 1).reshape(rows, -1)


def _attention_in_pieces(
    query: torch.Tensor, key: Held, value: Held, bias: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention over keys and values that lie in several places, none of which is copied."""
    scores = _scores(query, key).mul_(scaling).add_(bias)
    # In float32 at least, as scaled_dot_product_attention takes it.
    wide = torch.promote_types(query.dtype, torch.float32)
    return _weighed(torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype), value)


def _scores(query: torch.Tensor, key: Held) -> torch.Tensor:
    """What queries [1, kv_heads, rows, head_dim] have in common with each key: [..., rows, T]."""
    if isinstance(key, torch.Tensor):
        return torch.matmul(query, key.transpose(2, 3))
    return torch.cat([torch.matmul(query, piece.transpose(2, 3)) for piece in key], -1)


def _weighed(weights: torch.Tensor, value: Held) -> torch.Tensor:
    """The sum of the values by weights [1, kv_heads, rows, T]: [1, kv_heads, rows, head_dim]."""
    if isinstance(value, torch.Tensor):
        return torch.matmul(weights, value)
    shares = weights.split([piece.shape[2] for piece in value], -1)
    sums = [torch.matmul(share, piece) for share, piece in zip(shares, value, strict=True)]
    return torch.stack(sums).sum(0)


def _capped_attention(
    query: torch.Tensor, key: Held, value: Held, bias: torch.Tensor, scaling: float, softcap: float
) -> torch.Tensor:
    """Attention with capped scores, step by step as transformers' own eager form takes them."""
    scores = _scores(query, key).mul_(scaling)
    scores.div_(softcap).tanh_().mul_(softcap).add_(bias)
    # transformers takes the softmax in float32 whatever the dtype.
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return _weighed(weights, value)


def _sinking_attention(
    query: torch.Tensor,
    key: Held,
    value: Held,
    mask: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention with a sink [1, kv_heads, rows, 1] for each row, as transformers' eager form."""
    scores = _scores(query, key) * scaling
    scores = torch.cat([scores.masked_fill(~mask, float("-inf")), sinks.to(scores.dtype)], dim=-1)
    # transformers takes this softmax in the scores' own dtype, and rounds once more before it.
    weights = torch.softmax(scores - scores.amax(-1, keepdim=True), dim=-1)
    return _weighed(weights[..., :-1], value)
