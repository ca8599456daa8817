"""Layer plan: edgespec's own layers of a block on a CPU as compiled code runs them, several a call.

What a layer computes is written down once, when the block is loaded; it is what DecoderLayer does
by CompiledRows, to the bit. Layers that cannot be written down so have no plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from edgespec.kernels.layers import CompiledLayers, CompiledPass, compiles
from edgespec.kernels.states import CompiledMixer
from edgespec.model.joint import JointPass, RowCache
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.layers import DecoderLayer, Layer
from edgespec.model.row_math import CompiledRows, RowMath
from edgespec.model.state_steps import NONE, CompiledFolding, Steps, steps_of
from edgespec.model.tree_attention import Visibility

LOOK = 1 << 25
"""Multiplications between two looks at what was cancelled, unless one layer has more."""


class PlannedPass(NamedTuple):
    """What layers are given of a pass; `foldings`: of each request, if some keep states."""

    compiled: CompiledPass
    foldings: list[CompiledFolding]


class LayerPlan:
    """The layers of one block."""

    def __init__(
        self,
        layers: CompiledLayers,
        kinds: Sequence[str | None],
        windows: Sequence[int | None],
        mixers: Mapping[int, CompiledMixer],
        math: CompiledRows,
    ) -> None:
        """`kinds` of angles and `windows`: those that layers name by number. `mixers`: of layers
        that keep a state, by their numbers in the block."""
        self._layers, self._kinds, self._windows, self._math = layers, kinds, windows, math
        self._mixers = mixers

    def steps(self, rows: int, cuts: Collection[int]) -> Iterator[tuple[int, int]]:
        """First layer and end, counted in the block, of each call; one begins at each of `cuts`."""
        first = 0
        while first < self._layers.count:
            reach = first + max(1, LOOK // (rows * self._layers.weights))
            end = min(reach, self._layers.count, *(cut for cut in cuts if cut > first))
            yield first, end
            first = end

    def given(self, joint: JointPass, first: int) -> PlannedPass | None:
        """What the layers from `first` on are given of a pass, until parts of it are left out. None
        if they have to be run one by one: they keep states of several boundaries, as others were
        stopped between them, or some row has a path of its own to one."""
        angles = [joint.rotary[kind] for kind in self._kinds]
        seen = [self._math.runs(joint.seen, window) for window in self._windows]
        memories, foldings = joint.memories, []
        if self._mixers:
            for number, (cache, part) in enumerate(joint.parts):
                folding = self._folding(cache, part, first)
                if folding is None:
                    return None
                foldings.append(folding)
                memories[number] = memories[number]._replace(folding=folding.folding)
        made = CompiledPass(memories, angles, seen)
        return PlannedPass(made, foldings)

    def _folding(self, cache: RowCache, seen: Visibility, first: int) -> CompiledFolding | None:
        assert isinstance(cache, TwoRegionCache)
        rows = cache.folded
        assert rows is not None
        mixers = {
            cache.first_layer + number: one
            for number, one in self._mixers.items()
            if number >= first
        }
        known = {tuple(rows.states[layer]) for layer in mixers}
        if len(known) > 1:
            return None
        steps = Steps([], 0, {})
        if mixers:
            runs = self._math.runs(seen, None)
            steps = steps_of(rows, next(iter(mixers)), seen.rows.tolist(), runs.prefixes())
            if any(step.state == NONE for step in steps.steps):
                return None
        return CompiledFolding(rows, cache.first_layer, mixers, seen.rows, steps)

    def run(self, first: int, end: int, hidden: torch.Tensor, given: PlannedPass) -> torch.Tensor:
        """Rows [R, H] after layers [first, end) of the block, in new memory."""
        out = self._layers.run(first, end, hidden, given.compiled)
        for folding in given.foldings:
            folding.keep(first, end)
        return out


def layer_plan(
    layers: Sequence[Layer], angles: Sequence[str | None], math: RowMath, dtype: torch.dtype
) -> LayerPlan | None:
    """The plan of a block's layers, whose angles are of these kinds; None where they have none."""
    if not isinstance(math, CompiledRows) or dtype == torch.float64 or not compiles():
        return None
    own = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    mixers = {number: layer.mixer for number, layer in enumerate(own) if layer.mixer is not None}
    reaches = [layer.form.reach for layer in own] + [None] * bool(mixers)
    kinds, windows = list(dict.fromkeys(angles)), list(dict.fromkeys(reaches))
    every = windows.index(None) if mixers else 0
    made = [
        layer.compiled(
            kinds.index(kind),
            windows.index(layer.form.reach),
            list(mixers).index(number) if number in mixers else 0,
            every,
        )
        for number, (layer, kind) in enumerate(zip(own, angles, strict=False))
    ]
    compiled = [one for one in made if one is not None]
    if len(compiled) < len(layers):
        return None
    return LayerPlan(CompiledLayers(compiled, dtype), kinds, windows, mixers, math)
