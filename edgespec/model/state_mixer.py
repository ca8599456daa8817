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

from collections.abc import Callable, Iterable, Iterator
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
from edgespec.model.state_steps import NONE, InTurn, StatePass, steps_of
from edgespec.model.state_torch import TorchStates, Vectors
from edgespec.model.tree_attention import JointVisibility, Seen, Visibility


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
        self._math: StateMath = TorchStates(form, vectors)
        kernels = compiled_states()
        if isinstance(row_math, CompiledRows) and kernels is not None:
            self._math = states = _CompiledStates(form, vectors, kernels, row_math)
            self.compiled = states.mixer if order is None else None
        elif row_math.kernels == "triton":
            # Only here, as they need triton.
            from edgespec.model.triton_states import TritonStates, usable_states

            if usable_states(device):
                self._math = TritonStates(form, vectors, dtype)

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
        assert cache.folded is not None
        return read_states(self._math, self._index, cache.folded, projected, seen)


def read_states(
    math: StateMath, layer: int, rows: FoldedRows, projected: torch.Tensor, seen: Visibility
) -> torch.Tensor:
    """What projections [R, ...] of one request's rows read in a layer, [R, inner]: the states that
    they need are made of those that are there, and left for the next ones."""
    given, mine = math.given(rows, layer, seen, projected), rows.states[layer]
    steps = seen.states.get(tuple(mine))
    if steps is None:
        steps = steps_of(rows, layer, seen.rows.tolist(), given.prefixes())
        seen.states[tuple(mine)] = steps
    # Caches that begin alike share states: none that was there before is written to.
    states, shape, kind = [*mine.values()], math.form.state, wide(projected.dtype)
    while len(states) < steps.numbers:
        states.append(projected.new_empty(shape, dtype=kind))
    for step in steps.steps:
        source = None if step.source == NONE else states[step.source]
        runs: Iterable[tuple[int, int]]
        if step.state == NONE:
            state = projected.new_empty(shape, dtype=kind)
            runs = given.path(step.first, step.begin, step.boundary)
        else:
            state, count = states[step.state], step.boundary - step.begin
            runs = [(step.begin, count)] if count else []
        given.read(step, source, runs, state)
    rows.states[layer] = {at: states[number] for at, number in steps.left.items()}
    return given.out()


class StateMath(Protocol):
    """What makes and reads states of a form."""

    form: StateForm

    def given(
        self, rows: FoldedRows, index: int, seen: Visibility, projected: torch.Tensor
    ) -> StatePass:
        """For new rows of layer `index`, whose slots are there."""


class _CompiledStates:
    def __init__(
        self, form: StateForm, vectors: Vectors, kernels: StateKernels, row_math: CompiledRows
    ) -> None:
        self.form, self.kernels, self._row_math = form, kernels, row_math
        self.mixer = CompiledMixer(vectors, **form.numbers)

    def given(
        self, rows: FoldedRows, index: int, seen: Visibility, projected: torch.Tensor
    ) -> _CompiledPass:
        return _CompiledPass(self, rows, index, seen, projected)

    def runs(self, seen: Visibility) -> Runs:
        return self._row_math.runs(seen, None)


class _CompiledPass(InTurn):
    def __init__(
        self,
        states: _CompiledStates,
        rows: FoldedRows,
        layer: int,
        seen: Visibility,
        projected: torch.Tensor,
    ) -> None:
        super().__init__(projected)
        self._states, self._held_as, self._slots = states, rows.dtype, rows.slots(layer)
        self._runs, self._places = states.runs(seen), seen.rows

    def prefixes(self) -> list[int]:
        return self._runs.prefixes()

    def path(self, row: int, first: int, end: int) -> Iterator[tuple[int, int]]:
        position = 0
        firsts, ends = self._runs
        for begin, after in ends[firsts[row] : firsts[row + 1]].tolist():
            low, high = max(first, position), min(end, position + after - begin)
            if low < high:
                yield begin + low - position, high - low
            position += after - begin

    def rows(self, first: int, end: int, boundary: int, state: torch.Tensor) -> torch.Tensor:
        runs = Runs(self._runs.firsts[first : end + 1], self._runs.ends)
        kernels, mixer = self._states.kernels, self._states.mixer
        projected, places = self.projected[first:end], self._places[first:end]
        return kernels.rows(
            mixer, projected, runs, places, boundary, self._held_as, self._slots, state
        )

    def fold(self, slot: int, count: int, state: torch.Tensor) -> None:
        kernels, mixer = self._states.kernels, self._states.mixer
        kernels.fold(mixer, self._held_as, self._slots, slot, count, state)
