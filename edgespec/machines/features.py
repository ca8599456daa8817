"""Features: what a draft source may need beyond tokens, and the certain rows' share of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.wire.tensor import Tensor

FINAL_HIDDEN = "final_hidden"
"""The need of the base's hidden rows, as its output head reads them (EAGLE-1/2 heads)."""
FUSED_TAPS = "fused_taps"
"""The need of rows that enter several layers of the base, side by side (EAGLE-3 heads)."""
PROMPT_ROWS = "prompt_rows"
"""The need of rows of its own beside the guesses on the ring (PPD prompt tokens)."""


@dataclass(frozen=True, slots=True)
class Features:
    """What the ring gave for certain rows since the last draft effect of the request.

    `final`: [n, H] in the model's dtype, hidden rows behind the final norm; None for none. `taps`
    [n, ...]: what the stages packed of the tapped layers for the same rows (see Segment); None
    unless the source needs FUSED_TAPS. The rows are consecutive: those of all draft effects of a
    request, one after the other, are the rows of positions 0, 1, 2, …. The newest certain token has
    none yet, and tokens whose results are still on the ring have theirs later.
    """

    final: Tensor | None = None
    taps: Tensor | None = None


NO_FEATURES = Features()


class HiddenRows:
    """The hidden rows of one request on one ring: kept until they are certain and handed over."""

    def __init__(self, prefix: int) -> None:
        """The first `prefix` rows, with the ids 0, 1, …, are certain from the start."""
        self._rows: dict[int, tuple[Tensor, int]] = {}
        self._certain = deque(range(prefix))

    def arrived(self, ids: Sequence[int], hidden: Tensor) -> None:
        """Rows came back from the ring; `hidden` [len(ids), H]."""
        self._rows.update((row, (hidden, at)) for at, row in enumerate(ids))

    def passed(self, ids: Iterable[int], newest: int) -> None:
        """The guesses `ids` became certain, in order; up to row `newest` no other is alive."""
        self._certain.extend(ids)
        wanted = set(self._certain)
        self._rows = {i: row for i, row in self._rows.items() if i > newest or i in wanted}

    def take(self) -> Features:
        """What was not handed over yet, as far as it is here without a gap."""
        parts: list[tuple[Tensor, list[int]]] = []
        while self._certain and self._certain[0] in self._rows:
            hidden, at = self._rows.pop(self._certain.popleft())
            if not parts or parts[-1][0] is not hidden:
                parts.append((hidden, []))
            parts[-1][1].append(at)
        if not parts:
            return NO_FEATURES
        return Features(_joined([hidden.take(np.array(at)) for hidden, at in parts]))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Tensors of equal dtype and rows, one behind the other."""
    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    return Tensor(parts[0].dtype, shape, b"".join(part.data for part in parts))
