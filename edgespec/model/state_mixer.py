"""State mixer: what mixes a row with those before it in layers that keep a state in place of keys,
by Mamba2 (arXiv:2405.21060) or the gated delta rule (arXiv:2412.06464).

A token adds a term of its own to the state: with its key k, what stands for it d and its decay a,
the state [key, value] becomes a · state + k dᵀ; a query q reads stateᵀ q. So a row of the cache
is (k, d, a), and beside it what the short convolution reads of it. A row at position p reads
the state of the committed tokens before b(p) = 16 · ⌊(p − 32) / 16⌋, then its own ancestors from
there on in the order of their positions, then itself: its bits follow from its path and its
position, whatever else is in the tree or in the pass, and pruning a guess drops its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import pad, silu, softplus

from edgespec.kernels.layers import Memory
from edgespec.kernels.rows import Runs
from edgespec.kernels.states import CompiledMixer, StateKernels, compiled_states
from edgespec.model.joint import JointCache, RowCache
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.matrices import MatrixReader
from edgespec.model.row_math import CompiledRows, RowMath
from edgespec.model.source import TensorSource, load_parameter
from edgespec.model.tree_attention import JointVisibility, Seen, Visibility

STRIDE, AHEAD = 16, 32
"""Of the boundaries: positions between two of them, and how far a row's position is behind its own
at least. No guess may be more positions than `AHEAD` behind the committed tokens."""

_NUMBERS = ("eps", "delta", "heads", "groups", "key", "value", "kernel", "normed")
"""Of a StateForm what a compiled mixer takes as it is."""
_LINE = 64
"""Bytes: a row takes a multiple of them, as kernels/states_of.h has it."""


Vectors = dict[str, torch.Tensor | None]
"""What CompiledMixer takes, but on any device."""

States = dict[int, dict[int, torch.Tensor]]
"""By layer and boundary, what the rows in the slots before the boundary have left: [heads, key,
value]."""


def boundary_of(position: int) -> int:
    """The boundary whose state a row at this position reads."""
    return max(0, (position - AHEAD) // STRIDE * STRIDE)


@dataclass(frozen=True, slots=True)
class StateForm:
    """One such mixer: a projection, a short convolution of queries, keys and values, the state, a
    gated norm and a last product.

    `delta`: by the gated delta rule, else Mamba2's. `name`: of the module in its layer. `entering`:
    names and rows of the matrices that make, in this order, the gate [heads * value], what is
    convolved, and one number a head, or two. `heads` share the keys of `groups`, which have `key`
    numbers, values have `value`. `kernel`: taps of the convolution. `normed`: numbers that are
    normed together, 0: none. `steps`: bounds of a step.
    """

    delta: bool
    name: str
    entering: tuple[tuple[str, int], ...]
    hidden: int
    heads: int
    groups: int
    key: int
    value: int
    kernel: int
    eps: float
    normed: int
    bias: bool = False
    conv_bias: bool = False
    steps: tuple[float, float] = (0.0, math.inf)

    @property
    def keys(self) -> int:
        """Numbers in the keys of a row."""
        return self.groups * self.key

    @property
    def inner(self) -> int:
        """Numbers in its values."""
        return self.heads * self.value

    @property
    def conv(self) -> int:
        """Numbers of a row that are convolved."""
        return 2 * self.keys + self.inner

    @property
    def terms(self) -> int:
        """Numbers that it adds to the state."""
        return self.keys + self.inner + self.heads

    def width(self, held_as: torch.dtype) -> int:
        """`held_as` numbers that a row takes in the cache: its terms, of another type, and behind
        them the inputs of its convolution."""
        bytes_each = held_as.itemsize
        used = self.terms * _wide(held_as).itemsize + self.conv * bytes_each
        return -(-used // _LINE) * _LINE // bytes_each

    def shapes(self) -> dict[str, torch.Size]:
        """The tensors of the module, by their names in the layer."""
        found = {f"{name}.weight": (rows, self.hidden) for name, rows in self.entering}
        if self.bias:
            found |= {f"{name}.bias": (rows,) for name, rows in self.entering}
            found["out_proj.bias"] = (self.hidden,)
        found |= {"out_proj.weight": (self.hidden, self.inner)}
        found |= {"conv1d.weight": (self.conv, 1, self.kernel)}
        if self.conv_bias:
            found["conv1d.bias"] = (self.conv,)
        found |= {"dt_bias": (self.heads,), "A_log": (self.heads,)}
        if not self.delta:
            found["D"] = (self.heads,)
        if self.normed:
            found["norm.weight"] = (self.value if self.delta else self.inner,)
        return {f"{self.name}.{name}": torch.Size(shape) for name, shape in found.items()}


class StateMixer:
    """A mixer of this form, read from a source."""

    def __init__(
        self,
        index: int,
        form: StateForm,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        row_math: RowMath,
    ) -> None:
        """Of layer `index`. Raises ModelError for tensors that the source does not have so."""
        self._index, self._form = index, form
        wide, shapes = _wide(dtype), form.shapes()
        reader = MatrixReader(source, dtype, device)

        def product(*names: str) -> Callable[[torch.Tensor], torch.Tensor]:
            every = [f"{form.name}.{name}" for name in names]
            of = [shapes[f"{name}.weight"] for name in every]
            return reader.product([f"model.layers.{index}.{n}" for n in every], of, form.bias)

        def vector(leaf: str) -> torch.Tensor:
            name = f"{form.name}.{leaf}"
            shape = shapes[name]
            # As stored, not first rounded to the rows' dtype: some are powers of e.
            key = f"model.layers.{index}.{name}"
            return load_parameter(source, key, shape, wide, device).data

        self._enter = product(*(name for name, _ in form.entering))
        self._leave = product("out_proj")
        gain = vector("norm.weight") if form.normed else None
        vectors: Vectors = {
            "taps": vector("conv1d.weight")[:, 0].T.contiguous(),
            "bias": vector("conv1d.bias") if form.conv_bias else None,
            "step_bias": vector("dt_bias"),
            "decay": -vector("A_log").exp(),
            "skip": None if form.delta else vector("D"),
            "gain": gain.repeat(form.heads) if form.delta and gain is not None else gain,
        }
        compiled = compiled_states() if isinstance(row_math, CompiledRows) else None
        self._math: _StateMath = (
            _TorchStates(form, vectors)
            if compiled is None
            else _CompiledStates(form, vectors, compiled, row_math)
        )

    def __call__(
        self, rows: torch.Tensor, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Normed rows [R, H] to what is added to the rows, [R, H]; what they keep goes into the
        cache."""
        projected = self._enter(rows)
        if isinstance(cache, JointCache):
            assert isinstance(seen, JointVisibility)
            shares = zip(cache.caches, projected.split(seen.rows), seen.parts, strict=True)
            return self._leave(torch.cat([self._mix(*share) for share in shares]))
        assert isinstance(cache, TwoRegionCache)
        assert isinstance(seen, Visibility)
        return self._leave(self._mix(cache, projected, seen))

    def _mix(
        self, cache: TwoRegionCache, projected: torch.Tensor, seen: Visibility
    ) -> torch.Tensor:
        """The rows [R, inner] before the last product, of one request, whose slots have room."""
        first, made = 0, []
        given = self._math.given(cache, self._index, len(projected), seen)
        places = seen.rows.tolist()
        while first < len(places):
            boundary, end = boundary_of(places[first]), first + 1
            shared = given.prefix(first) >= boundary
            while shared and end < len(places) and boundary_of(places[end]) == boundary:
                if given.prefix(end) < boundary:
                    break
                end += 1
            state = self._state(cache.states, boundary, given, first, shared)
            made.append(given.rows(projected[first:end], first, end, boundary, state))
            first = end
        return torch.cat(made) if len(made) > 1 else made[0]

    def _state(
        self, states: States, boundary: int, given: _Given, row: int, shared: bool
    ) -> torch.Tensor:
        """The state that a row reads: of the first slots, which caches that begin alike share, so
        none that is there is written to; or else of its own path, which is not kept."""
        mine = states.setdefault(self._index, {})
        if shared and boundary in mine:
            return mine[boundary]
        begin = max((at for at in mine if at <= min(boundary, given.prefix(row))), default=0)
        state = mine[begin].clone() if begin else given.zeros()
        if not shared:
            for slot, count in given.path(row, begin, boundary):
                given.fold(slot, count, state)
            return state
        for slot in range(begin, boundary, STRIDE):
            given.fold(slot, STRIDE, state)
        mine[boundary] = state
        for at in [at for at in mine if at < boundary - AHEAD]:
            del mine[at]
        return state


class _Given(Protocol):
    """One pass of rows of one request."""

    def prefix(self, row: int) -> int:
        """How many slots from the first one on a row of it sees without a gap."""

    def path(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Where its path's rows at these positions are: runs of slots, a first one and how many."""

    def rows(
        self, projected: torch.Tensor, first: int, end: int, boundary: int, state: torch.Tensor
    ) -> torch.Tensor:
        """What rows `first` to `end` of the pass, which read the state of one boundary, read."""

    def zeros(self) -> torch.Tensor:
        """The state before all rows."""

    def fold(self, slot: int, count: int, state: torch.Tensor) -> None:
        """Take the rows in `count` slots into a state, where it is."""


class _StateMath(Protocol):
    def given(self, cache: TwoRegionCache, index: int, rows: int, seen: Visibility) -> _Given:
        """For new rows of layer `index`, whose slots are there."""


class _CompiledStates:
    def __init__(
        self, form: StateForm, vectors: Vectors, kernels: StateKernels, row_math: CompiledRows
    ) -> None:
        self.form, self.kernels, self._row_math = form, kernels, row_math
        numbers = {name: getattr(form, name) for name in _NUMBERS}
        low, high = form.steps
        last = int(form.delta)
        self.mixer = CompiledMixer(vectors, step_low=low, step_high=high, gate_last=last, **numbers)

    def given(
        self, cache: TwoRegionCache, index: int, rows: int, seen: Visibility
    ) -> _CompiledPass:
        return _CompiledPass(self, cache.memory(rows), index, seen, self._row_math.runs(seen, None))


class _CompiledPass:
    def __init__(
        self, states: _CompiledStates, memory: Memory, layer: int, seen: Visibility, runs: Runs
    ) -> None:
        self._states, self._held_as, self._slots = states, memory.dtype, memory.pieces[layer]
        self._runs, self._places = runs, seen.rows
        self._firsts, self._ends = runs.firsts.tolist(), runs.ends.tolist()

    def prefix(self, row: int) -> int:
        first, end = self._ends[self._firsts[row]]
        return 0 if first else int(end)

    def path(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        position = 0
        for begin, after in self._ends[self._firsts[row] : self._firsts[row + 1]]:
            low, high = max(first, position), min(end, position + after - begin)
            if low < high:
                yield begin + low - position, high - low
            position += after - begin

    def rows(
        self, projected: torch.Tensor, first: int, end: int, boundary: int, state: torch.Tensor
    ) -> torch.Tensor:
        runs = Runs(self._runs.firsts[first : end + 1], self._runs.ends)
        kernels, mixer = self._states.kernels, self._states.mixer
        places = self._places[first:end]
        return kernels.rows(
            mixer, projected, runs, places, boundary, self._held_as, self._slots, state
        )

    def zeros(self) -> torch.Tensor:
        form = self._states.form
        return torch.zeros((form.heads, form.key, form.value), dtype=_wide(self._held_as))

    def fold(self, slot: int, count: int, state: torch.Tensor) -> None:
        kernels, mixer = self._states.kernels, self._states.mixer
        kernels.fold(mixer, self._held_as, self._slots, slot, count, state)


class _TorchStates:
    """The same by torch's operations on one row after the other: slow, for where nothing is
    compiled."""

    def __init__(self, form: StateForm, vectors: Vectors) -> None:
        self.form, self.vectors = form, vectors

    def given(self, cache: TwoRegionCache, index: int, rows: int, seen: Visibility) -> _TorchPass:
        return _TorchPass(self, cache.pieces(index), seen)


class _TorchPass:
    def __init__(
        self, states: _TorchStates, held: Sequence[torch.Tensor], seen: Visibility
    ) -> None:
        self._states, self._held = states, held
        mask = seen.mask()[0, 0]
        self._paths = [row.nonzero().squeeze(1).tolist() for row in mask]

    def prefix(self, row: int) -> int:
        path = self._paths[row]
        return next((at for at, slot in enumerate(path) if at != slot), len(path))

    def path(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        return ((slot, 1) for slot in self._paths[row][first:end])

    def _kept(self, slot: int) -> torch.Tensor:
        """What the row in a slot keeps, [width], where it is."""
        for piece in self._held:
            if slot < len(piece):
                return piece[slot]
            slot -= len(piece)
        raise AssertionError(slot)

    def _terms(self, kept: torch.Tensor) -> torch.Tensor:
        """Of rows [..., width] what they add to the state, [..., terms]."""
        return kept.view(_wide(kept.dtype))[..., : self._states.form.terms]

    def _inputs(self, kept: torch.Tensor) -> torch.Tensor:
        form = self._states.form
        begin = form.terms * _wide(kept.dtype).itemsize // kept.dtype.itemsize
        return kept[..., begin : begin + form.conv]

    def zeros(self) -> torch.Tensor:
        form, like = self._states.form, self._held[0]
        return self._terms(like).new_zeros((form.heads, form.key, form.value))

    def fold(self, slot: int, count: int, state: torch.Tensor) -> None:
        form = self._states.form
        for at in range(slot, slot + count):
            keys, adds, decays = self._split(self._terms(self._kept(at)))
            state.mul_(decays[:, None, None])
            state.add_(
                keys.repeat_interleave(form.heads // form.groups, 0)[:, :, None] * adds[:, None]
            )

    def _split(self, terms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys [..., groups, key], what they stand for [..., heads, value], decays [..., heads]."""
        form = self._states.form
        keys, adds, decays = terms.split([form.keys, form.inner, form.heads], -1)
        before = terms.shape[:-1]
        keys = keys.reshape(*before, form.groups, form.key)
        return keys, adds.reshape(*before, form.heads, form.value), decays

    def rows(
        self, projected: torch.Tensor, first: int, end: int, boundary: int, state: torch.Tensor
    ) -> torch.Tensor:
        paths = self._paths[first:end]
        each = zip(projected, paths, strict=True)
        return torch.stack([self._row(row, path[boundary:], state) for row, path in each])

    def _row(self, projected: torch.Tensor, path: list[int], state: torch.Tensor) -> torch.Tensor:
        form, by = self._states.form, self._states.vectors
        kept = [self._kept(slot) for slot in path]
        gate, inputs, steps = projected.to(state.dtype).split(
            [form.inner, form.conv, (1 + form.delta) * form.heads]
        )
        self._inputs(kept[-1]).copy_(inputs)
        near = torch.stack([self._inputs(one) for one in kept[-form.kernel :]]).to(state.dtype)
        mixed = (near * by["taps"][-len(near) :]).sum(0)
        mixed = silu(mixed if by["bias"] is None else mixed + by["bias"])
        step = softplus(steps[-form.heads :] + by["step_bias"])
        every = self._terms(torch.stack(kept))
        keys, adds, decays = (one[:-1] for one in self._split(every))
        ratio = form.heads // form.groups
        left = decays.flip(0).cumprod(0).flip(0)  # of what came before a row
        whole = left[0] if len(left) else torch.ones_like(step)
        left = pad(left[1:], (0, 0, 0, min(1, len(left))), value=1.0)

        def read(vector: torch.Tensor) -> torch.Tensor:
            """What the rows before give for a vector [groups, key]: [heads, value]."""
            dots = (keys * vector).sum(-1).repeat_interleave(ratio, -1) * left
            of_state = (state * vector.repeat_interleave(ratio, 0)[:, :, None]).sum(1)
            return whole[:, None] * of_state + (dots[:, :, None] * adds).sum(0)

        if form.delta:
            query, key, value = mixed.split([form.keys, form.keys, form.inner])
            query, key = (one.view(form.groups, form.key) for one in (query, key))
            query, key = (one / (one.square().sum(-1, True) + 1e-6).sqrt() for one in (query, key))
            query = query / form.key**0.5
        else:
            step = step.clamp(*form.steps)
            value, key, query = mixed.split([form.inner, form.keys, form.keys])
            query, key = (one.view(form.groups, form.key) for one in (query, key))
        value = value.view(form.heads, form.value)
        decay = torch.exp(by["decay"] * step)[:, None]
        if form.delta:
            share = torch.sigmoid(steps[: form.heads])[:, None]
            new = share * (value - decay * read(key))
        else:
            new = step[:, None] * value
        self._terms(kept[-1]).copy_(torch.cat((key.flatten(), new.flatten(), decay[:, 0])))
        out = decay * read(query) + (key * query).sum(-1).repeat_interleave(ratio)[:, None] * new
        if by["skip"] is not None:
            out = out + by["skip"][:, None] * value
        out = out.flatten()
        if not form.delta:
            out = out * silu(gate)
        if by["gain"] is not None:
            groups = out.view(-1, form.normed)
            out = (groups / (groups.square().mean(1, True) + form.eps).sqrt()).flatten()
            out = out * by["gain"]
        if form.delta:
            out = out * silu(gate)
        return out.to(projected.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What states and terms are of."""
    return torch.float64 if dtype == torch.float64 else torch.float32
