"""Hidden rows: keeps what came back of one request until it is committed and handed over."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from edgespec.decoding.flights import Landed
from edgespec.types.features import NO_FEATURES, DraftNeeds, Features, concatenated
from edgespec.types.record import IntArray
from edgespec.types.tensor import Tensor


class HiddenRows:
    """The hidden rows of one request on one ring: kept until they are committed and handed over."""

    def __init__(self, prefix: range, needs: DraftNeeds) -> None:
        """The rows with the ids `prefix` are committed from the start, none before are wanted."""
        self._final, self._aux_layers = needs.final_hidden, needs.aux_layers
        self._rows: dict[int, tuple[_Arrived, int]] = {}
        self._kind: tuple[object, ...] | None = None
        self._committed = deque(prefix)

    def arrived(self, landed: Landed, index: IntArray) -> None:
        """The rows `index` of a part of this request came back from the ring.

        Rows without the auxiliary ones that are wanted, or of other widths than the first ones, are
        passed over: from then on nothing is handed over, and nothing is guessed.
        """
        if landed.hidden is None:
            return
        aux = landed.aux_hidden
        hidden = landed.hidden.take(index) if self._final else None
        came = _Arrived(hidden, aux.take(index) if aux and self._aux_layers else None)
        if self._kind is None:
            self._kind = came.kind
        if came.kind != self._kind or (self._aux_layers and aux is None):
            return
        ids = landed.part.ids[index].tolist()
        self._rows.update((row, (came, at)) for at, row in enumerate(ids))

    def passed(self, ids: Iterable[int], newest: int) -> None:
        """The guesses `ids` became committed, in order; up to row `newest` no other is alive."""
        self._committed.extend(ids)
        wanted = set(self._committed)
        self._rows = {i: row for i, row in self._rows.items() if i > newest or i in wanted}

    def take(self) -> Features:
        """What was not handed over yet, as far as it is here without a gap."""
        parts: list[tuple[_Arrived, list[int]]] = []
        while self._committed and self._committed[0] in self._rows:
            came, at = self._rows.pop(self._committed.popleft())
            if not parts or parts[-1][0] is not came:
                parts.append((came, []))
            parts[-1][1].append(at)
        if not parts:
            return NO_FEATURES
        final = [came.final and came.final.take(np.array(at)) for came, at in parts]
        aux_hidden = [came.aux_hidden and came.aux_hidden.take(np.array(at)) for came, at in parts]
        return Features(concatenated(final), concatenated(aux_hidden), self._aux_layers)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrived:
    """What is wanted of the rows of one result."""

    final: Tensor | None
    aux_hidden: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be the same for rows to be joined."""
        return tuple(t and (t.dtype, t.shape[1:]) for t in (self.final, self.aux_hidden))
