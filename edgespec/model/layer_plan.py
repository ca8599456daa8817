"""Layer plan: edgespec's own layers of a block on a CPU as compiled code runs them, several a call.

What a layer computes is written down once, when the block is loaded; it is what DecoderLayer does
by CompiledRows, to the bit. Layers that cannot be written down so have no plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from edgespec.kernels.layers import CompiledLayers, CompiledPass, compiles
from edgespec.model.joint import JointPass
from edgespec.model.layers import DecoderLayer, Layer
from edgespec.model.row_math import CompiledRows, RowMath

LOOK = 1 << 25
"""Multiplications between two looks at what was cancelled, unless one layer has more."""


class LayerPlan:
    """The layers of one block."""

    def __init__(
        self, layers: CompiledLayers, kinds: Sequence[str | None], windows: Sequence[int | None],
        math: CompiledRows,
    ) -> None:  # fmt: skip
        """`kinds` of angles and `windows`: those that layers name by number."""
        self._layers, self._kinds, self._windows, self._math = layers, kinds, windows, math

    def steps(self, rows: int, cuts: Collection[int]) -> Iterator[tuple[int, int]]:
        """First layer and end, counted in the block, of each call; one begins at each of `cuts`."""
        first = 0
        while first < self._layers.count:
            reach = first + max(1, LOOK // (rows * self._layers.weights))
            end = min(reach, self._layers.count, *(cut for cut in cuts if cut > first))
            yield first, end
            first = end

    def given(self, joint: JointPass) -> CompiledPass:
        """What the layers of a pass are given, until parts of it are left out."""
        angles = [joint.rotary[kind] for kind in self._kinds]
        seen = [self._math.runs(joint.seen, window) for window in self._windows]
        return CompiledPass(joint.memories, [(one[0], one[1]) for one in angles], seen)

    def run(self, first: int, end: int, hidden: torch.Tensor, given: CompiledPass) -> torch.Tensor:
        """Rows [R, H] after layers [first, end) of the block, in new memory."""
        return self._layers.run(first, end, hidden, given)


def layer_plan(
    layers: Sequence[Layer], angles: Sequence[str | None], math: RowMath, dtype: torch.dtype
) -> LayerPlan | None:
    """The plan of a block's layers, whose angles are of these kinds; None where they have none."""
    if not isinstance(math, CompiledRows) or dtype == torch.float64 or not compiles():
        return None
    own = [layer for layer in layers if isinstance(layer, DecoderLayer)]
    kinds, windows = list(dict.fromkeys(angles)), list({layer.form.reach: 0 for layer in own})
    made = [
        layer.compiled(kinds.index(kind), windows.index(layer.form.reach))
        for layer, kind in zip(own, angles, strict=False)
    ]
    every = [one for one in made if one is not None]
    if len(every) < len(layers):
        return None
    return LayerPlan(CompiledLayers(every, dtype), kinds, windows, math)
