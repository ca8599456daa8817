"""Sharing out: the places of a ring, as configured, and anew for those devices that there are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgespec.config import CoordinatorConfig
from edgespec.daemon.planning import model_to_plan
from edgespec.errors import ConfigError
from edgespec.planning.memory import Needs
from edgespec.planning.partition import blocks_of, fitted_split
from edgespec.wire.messages import Assign, Join

log = logging.getLogger("edgespec")


class Sharing:
    """A model's layers over the devices of a ring."""

    def __init__(
        self, layers: int, like: Assign, split: Sequence[int], blocks: list[Assign]
    ) -> None:
        """`like`: what every Assign of this coordinator has in common, and how many stages there
        are at first; `split`: their layers, () for equal shares. `blocks` gets every block that is
        planned, now or later, in the order of their numbers on the block channel.

        Raises ConfigError for a split that is none of the layers.
        """
        self._layers = layers
        self._like = like
        self._blocks = blocks
        self.places = self._placed(blocks_of(layers, like.stages, split))

    def _placed(self, ranges: Sequence[tuple[int, int]]) -> list[Assign]:
        return [
            self._numbered(
                replace(self._like, stage=stage, stages=len(ranges), first=first, end=end)
            )
            for stage, (first, end) in enumerate(ranges, start=1)
        ]

    def _numbered(self, place: Assign) -> Assign:
        """With the number that a block of these layers has had, or gets now."""
        for block in self._blocks:
            if (block.first, block.end) == (place.first, place.end):
                return replace(place, block_number=block.block_number)
        place = replace(place, block_number=len(self._blocks) + 1)
        self._blocks.append(place)
        return place

    def anew(self, needs: Needs, joins: Sequence[Join]) -> list[Assign] | None:
        """Places for these devices by the memory that each had when it came; None if it is too
        little. With fewer layers than devices, those behind the last place are not needed. As many
        devices as there were to be at first have the places of then, if they have the memory."""
        devices = joins[: self._layers]
        most = [_most_layers(needs, self._layers, join, n == 0) for n, join in enumerate(devices)]
        first = [place.end - place.first for place in self.places]
        if len(most) == len(first) and all(n <= m for n, m in zip(first, most, strict=True)):
            return self.places
        split = fitted_split(self._layers, most)
        if split is None:
            return None
        return self._placed(blocks_of(self._layers, len(split), split))


def _most_layers(needs: Needs, layers: int, join: Join, first: bool) -> int:
    """How many layers a device has memory for; one that does not know its memory may try."""
    if not join.memory:
        return layers
    return max(
        (n for n in range(1, layers + 1) if needs.stage(n, first).total <= join.memory), default=0
    )


def needs_of(config: CoordinatorConfig, tokenizer: Path, context: int) -> Needs | None:
    """What stages need for the model, from its config.json, which lies beside its tokenizer.

    None for a model whose sizes the planner cannot tell.
    """
    try:
        asked = model_to_plan(str(tokenizer), config.quantisation.name, "", "none")
    except ConfigError as problem:
        log.info("the ring cannot be shared out anew when a device is lost: %s", problem)
        return None
    return Needs(asked.model, context, 1)
