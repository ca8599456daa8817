"""Uneven layers: how those of one model differ in size, and which of them have to be together.

Gemma 4 has them: its keys have another shape where there is no window, and its last layers may read
the keys of earlier ones, which so have to be on the same stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SLIDING, FULL = "s", "f"


@dataclass(frozen=True, slots=True)
class Uneven:
    """What the numbers of an Architecture, which are those of layers with a window, do not say.

    `kinds`: for each layer SLIDING or FULL, over and over. `head_dim`, `kv_heads`: of keys in full
    layers, which have no matrix of values without `values`. The last `shared` layers read keys of
    earlier ones; with `wider` their MLPs are twice as wide. `told`: numbers that each layer is told
    of a row's token.
    """

    kinds: str
    head_dim: int
    kv_heads: int
    values: bool = True
    shared: int = 0
    wider: bool = False
    told: int = 0

    def kind(self, layer: int) -> str:
        return self.kinds[layer % len(self.kinds)]

    def bound(self, layers: int) -> int:
        """How many last ones of so many layers have to be on one stage."""
        return bound_layers([self.kind(layer) for layer in range(layers)], self.shared)


def bound_layers(kinds: Sequence[str], shared: int) -> int:
    """How many last layers of a model have to be together, if its last `shared` ones read the keys
    of the last one before them that is of the same kind."""
    first = len(kinds) - shared
    last = {kind: number for number, kind in enumerate(kinds[:first])}
    return len(kinds) - min((last[kind] for kind in kinds[first:]), default=len(kinds))
