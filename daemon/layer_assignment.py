"""Layer assignment: which layers each stage gets, and the repartition over other devices."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from edgespec.planning.memory import Needs
from edgespec.planning.partition import blocks_of, fitted_split
from edgespec.wire.messages import Assign, Join


class LayerAssignment:
    """Assigns a model's layers to the devices of a ring."""

    def __init__(
        self,
        layers: int,
        like: Assign,
        split: Sequence[int],
        blocks: list[Assign],
        bound: int = 0,
    ) -> None:
        """`like`: the fields that all assignments share, with the configured number of stages, and
        `head` as the last stage shall have it;
        `split`: layers of each stage, () for equal shares. Every planned block is appended to
        `blocks`, in the order of the block numbers. `bound`: so many last layers have to be on one
        stage.

        Raises ConfigError for a split that does not fit the layers.
        """
        self._layers, self._bound = layers, bound
        self._like = like
        self._blocks = blocks
        self.assigned = self._assigned(blocks_of(layers, like.stages, split, bound))

    def _assigned(self, ranges: Sequence[tuple[int, int]]) -> list[Assign]:
        return [
            self._numbered(
                replace(
                    self._like,
                    stage=stage,
                    stages=len(ranges),
                    first=first,
                    end=end,
                    head=self._like.head if stage == len(ranges) else "",
                )
            )
            for stage, (first, end) in enumerate(ranges, start=1)
        ]

    def _numbered(self, assign: Assign) -> Assign:
        """With the block number of these layers; a new one if no block had them before."""
        for block in self._blocks:
            if (block.first, block.end) == (assign.first, assign.end):
                return replace(assign, block_number=block.block_number)
        assign = replace(assign, block_number=len(self._blocks) + 1)
        self._blocks.append(assign)
        return assign

    def repartition(self, needs: Needs, joins: Sequence[Join]) -> list[Assign] | None:
        """Assignments for these devices by the memory that each reported when it joined.

        None if the memory is too little. With more devices than layers, the last ones get none.
        The configured assignment is kept if the number of devices and their memory allow it.
        """
        devices = joins[: self._layers - max(0, self._bound - 1)]
        ends = len(devices) - 1
        most = [
            _most_layers(needs, self._layers, join, n == ends) for n, join in enumerate(devices)
        ]
        first = [stage.end - stage.first for stage in self.assigned]
        if len(most) == len(first) and all(n <= m for n, m in zip(first, most, strict=True)):
            return self.assigned
        split = fitted_split(self._layers, most, self._bound)
        if split is None:
            return None
        return self._assigned(blocks_of(self._layers, len(split), split, self._bound))


def _most_layers(needs: Needs, layers: int, join: Join, last: bool) -> int:
    """How many layers fit into a device's memory; all if the memory is not known."""
    if not join.memory:
        return layers
    fitting = (n for n in range(1, layers + 1) if needs.stage(n, last).total <= join.memory)
    return max(fitting, default=0)
