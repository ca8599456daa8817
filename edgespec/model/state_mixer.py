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

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from edgespec.kernels.rows import Runs
from edgespec.kernels.states import CompiledMixer, StateKernels, compiled_states
from edgespec.model.folded_rows import FoldedRows
from edgespec.model.joint import JointCache, RowCache
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.matrices import MatrixReader
from edgespec.model.rope import Rotary
from edgespec.model.row_math import CompiledRows, RowMath
from edgespec.model.source import TensorSource, load_parameter
from edgespec.model.state_form import StateForm, wide
from edgespec.model.state_steps import NONE, Step, steps_of
from edgespec.model.state_torch import TorchStates, Vectors
from edgespec.model.tree_attention import JointVisibility, Seen, Visibility
from edgespec.types.boundaries import STRIDE

_NUMBERS = (
    *("eps", "delta", "heads", "groups", "key", "value", "kernel", "normed", "tiled"),
    "gate_last",
)
"""Of a StateForm what a compiled mixer takes as it is."""


class StateMixer:
    """A mixer of this form, read from a source. `products`: before and behind it; `compiled`: what
    is between them, if that is compiled, and all that is."""

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
        shapes = form.shapes()
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
            return load_parameter(source, key, shape, wide(dtype), device).data

        self._enter = product(*(name for name, _ in form.entering))
        self._leave = product("out_proj")
        order = form.order
        self._order = None if order is None else order.to(device)
        self.products = self._enter, self._leave
        self.compiled: CompiledMixer | None = None
        vectors: Vectors = {
            "taps": vector("conv1d.weight")[:, 0].T.contiguous(),
            "step_bias": vector("dt_bias"),
            "decay": -vector("A_log").exp(),
        }
        if form.conv_bias:
            vectors["bias"] = vector("conv1d.bias")
        if not form.delta:
            vectors["skip"] = vector("D")
        if form.normed:
            gain = vector("norm.weight")
            vectors["gain"] = gain.repeat(form.heads) if form.delta else gain
        if form.scale:
            vectors["scale"] = form.scales().to(device, wide(dtype))
        self._math: _StateMath = TorchStates(form, vectors)
        kernels = compiled_states()
        if isinstance(row_math, CompiledRows) and kernels is not None:
            self._math = states = _CompiledStates(form, vectors, kernels, row_math)
            self.compiled = states.mixer if order is None else None

    def __call__(
        self, rows: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Normed rows [R, H] to what is added to the rows, [R, H]; what they keep goes into the
        cache. No angles are needed."""
        projected = self._enter(rows)
        if self._order is not None:
            projected = projected.index_select(1, self._order)
        if isinstance(cache, JointCache):
            assert isinstance(seen, JointVisibility)
            shares = zip(cache.caches, projected.split(seen.rows), seen.parts, strict=True)
            return self._leave(torch.cat([self._mix(*share) for share in shares]))
        assert isinstance(seen, Visibility)
        return self._leave(self._mix(cache, projected, seen))

    def _mix(self, cache: RowCache, projected: torch.Tensor, seen: Visibility) -> torch.Tensor:
        """The rows [R, inner] before the last product, of one request, whose slots have room."""
        assert isinstance(cache, TwoRegionCache)
        rows, made = cache.folded, []
        assert rows is not None
        given, mine = self._math.given(rows, self._index, seen), rows.states[self._index]
        steps = seen.states.get(tuple(mine))
        if steps is None:
            places = seen.rows.tolist()
            prefixes = [given.prefix(row) for row in range(len(places))]
            steps = steps_of(rows, self._index, places, prefixes)
            seen.states[tuple(mine)] = steps
        states: list[torch.Tensor | None] = [*mine.values()]
        states += [None] * (steps.numbers - len(mine))
        for step in steps.steps:
            if step.state == NONE:
                state = self._own_state(rows, step.boundary, given, step.first)
            else:
                state = states[step.state] = self._state(step, states, given)
            made.append(given.rows(projected[step.first : step.end], *step[:3], state))
        kept = {boundary: states[number] for boundary, number in steps.left.items()}
        rows.states[self._index] = {at: one for at, one in kept.items() if one is not None}
        return torch.cat(made) if len(made) > 1 else made[0]

    def _state(self, step: Step, states: list[torch.Tensor | None], given: _Given) -> torch.Tensor:
        """The state of the first slots, which caches that begin alike share, so none that was there
        before the pass is written to."""
        state = None if step.source == NONE else states[step.source]
        if step.source != step.state:
            state = given.zeros() if state is None else state.clone()
        assert state is not None
        for slot in range(step.begin, step.boundary, STRIDE):
            given.fold(slot, STRIDE, state)
        return state

    def _own_state(self, rows: FoldedRows, boundary: int, given: _Given, row: int) -> torch.Tensor:
        """The state that a row's own path has left, which is not kept."""
        mine = rows.states[self._index]
        begin = rows.before(min(boundary, given.prefix(row)), mine)
        state = mine[begin].clone() if begin else given.zeros()
        for slot, count in given.path(row, begin, boundary):
            given.fold(slot, count, state)
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
    def given(self, rows: FoldedRows, index: int, seen: Visibility) -> _Given:
        """For new rows of layer `index`, whose slots are there."""


class _CompiledStates:
    def __init__(
        self, form: StateForm, vectors: Vectors, kernels: StateKernels, row_math: CompiledRows
    ) -> None:
        self.form, self.kernels, self._row_math = form, kernels, row_math
        numbers = {name: getattr(form, name) for name in _NUMBERS}
        low, high = form.steps
        self.mixer = CompiledMixer(vectors, step_low=low, step_high=high, **numbers)

    def given(self, rows: FoldedRows, index: int, seen: Visibility) -> _CompiledPass:
        return _CompiledPass(self, rows, index, seen.rows, self._row_math.runs(seen, None))


class _CompiledPass:
    def __init__(
        self,
        states: _CompiledStates,
        rows: FoldedRows,
        layer: int,
        places: torch.Tensor,
        runs: Runs,
    ) -> None:
        self._states, self._held_as, self._slots = states, rows.dtype, rows.slots(layer)
        self._runs, self._places = runs, places

    def prefix(self, row: int) -> int:
        first, end = self._runs.ends[self._runs.firsts[row]].tolist()
        return 0 if first else int(end)

    def path(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        position = 0
        firsts, ends = self._runs
        for begin, after in ends[firsts[row] : firsts[row + 1]].tolist():
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
        return torch.zeros((form.heads, form.key, form.value), dtype=wide(self._held_as))

    def fold(self, slot: int, count: int, state: torch.Tensor) -> None:
        kernels, mixer = self._states.kernels, self._states.mixer
        kernels.fold(mixer, self._held_as, self._slots, slot, count, state)
