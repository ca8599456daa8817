"""Features: what a draft source may need beyond tokens, and the certain rows' share of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.wire.tensor import NO_LAYERS, Layers, Tensor

FINAL_HIDDEN = "final_hidden"
"""The need of the base's hidden rows, as its output head reads them (EAGLE-1/2 heads)."""
_TAP = "tap:"
PROMPT_ROWS = "prompt_rows"
"""The need of rows of its own beside the guesses on the ring (PPD prompt tokens)."""


def tap(layer: int) -> str:
    """The need of the rows that enter a layer of the base, counted from 0 (EAGLE-3 heads)."""
    return f"{_TAP}{layer}"


def tapped(needs: Iterable[str]) -> Layers:
    """The layers that are to be tapped."""
    return Layers(tuple(sorted(int(n[len(_TAP) :]) for n in needs if n.startswith(_TAP))))


@dataclass(frozen=True, slots=True)
class Features:
    """What the ring gave for certain rows since the last draft effect of the request.

    `final`: [n, H] in the model's dtype, hidden rows behind the final norm; None for none. `taps`
    [n, ...]: what the stages packed, for the same rows, of what enters the layers `tapped` (see
    Segment); None if no source needs them. The rows are consecutive: those of all draft effects of
    a request, one after the other, are the rows of positions 0, 1, 2, …. The newest certain token
    has none yet, and tokens whose results are still on the ring have theirs later.

    `prompts`: [k · copies, H], the hidden rows of a chain of prompt rows below the certain token at
    position `anchor`, the newest there is: those that guess the token at anchor + 2, at anchor + 3,
    … Each chain comes once.
    """

    final: Tensor | None = None
    taps: Tensor | None = None
    tapped: Layers = NO_LAYERS
    prompts: Tensor | None = None
    anchor: int = -1

    @property
    def rows(self) -> int:
        """Of how many certain rows."""
        return next((t.shape[0] for t in (self.final, self.taps) if t is not None), 0)


NO_FEATURES = Features()


def joined(parts: Sequence[Features]) -> Features:
    """What consecutive draft effects gave, as if one had given it all: of chains, the newest."""
    rows = [part for part in parts if part.rows]
    newest = next((part for part in reversed(parts) if part.prompts is not None), NO_FEATURES)
    return Features(
        _concatenated([part.final for part in rows]),
        _concatenated([part.taps for part in rows]),
        rows[0].tapped if rows else NO_LAYERS,
        newest.prompts,
        newest.anchor,
    )


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Trained prompt tokens: `depth` tokens ahead, `copies` vectors for each, to average; `rows`
    [depth · copies, H], the vectors of the first token ahead, of the second, …"""

    depth: int
    copies: int
    rows: Tensor


class HiddenRows:
    """The hidden rows of one request on one ring: kept until they are certain and handed over."""

    def __init__(self, prefix: range, needs: frozenset[str]) -> None:
        """The rows with the ids `prefix` are certain from the start, none before are wanted."""
        self._final, self._tapped = FINAL_HIDDEN in needs, tapped(needs)
        self._rows: dict[int, tuple[_Arrived, int]] = {}
        self._kind: tuple[object, ...] | None = None
        self._certain = deque(prefix)

    def arrived(self, ids: Sequence[int], hidden: Tensor, taps: Tensor | None = None) -> None:
        """Rows came back from the ring; `hidden` [len(ids), H], `taps` [len(ids), ...].

        Rows without the taps that are wanted, or of other widths than the first ones, are passed
        over: then nothing is handed over any more, and nothing guessed.
        """
        came = _Arrived(hidden if self._final else None, taps if self._tapped else None)
        if self._kind is None:
            self._kind = came.kind
        if came.kind != self._kind or (self._tapped and taps is None):
            return
        self._rows.update((row, (came, at)) for at, row in enumerate(ids))

    def passed(self, ids: Iterable[int], newest: int) -> None:
        """The guesses `ids` became certain, in order; up to row `newest` no other is alive."""
        self._certain.extend(ids)
        wanted = set(self._certain)
        self._rows = {i: row for i, row in self._rows.items() if i > newest or i in wanted}

    def take(self) -> Features:
        """What was not handed over yet, as far as it is here without a gap."""
        parts: list[tuple[_Arrived, list[int]]] = []
        while self._certain and self._certain[0] in self._rows:
            came, at = self._rows.pop(self._certain.popleft())
            if not parts or parts[-1][0] is not came:
                parts.append((came, []))
            parts[-1][1].append(at)
        if not parts:
            return NO_FEATURES
        final = [came.final and came.final.take(np.array(at)) for came, at in parts]
        taps = [came.taps and came.taps.take(np.array(at)) for came, at in parts]
        return Features(_concatenated(final), _concatenated(taps), self._tapped)


@dataclass(frozen=True, slots=True, eq=False)
class _Arrived:
    """What is wanted of the rows of one result."""

    final: Tensor | None
    taps: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """What must be the same for rows to be put behind each other."""
        return tuple(t and (t.dtype, t.shape[1:]) for t in (self.final, self.taps))


def _concatenated(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors of equal dtype and width, the rows of one behind those of the other."""
    parts = [tensor for tensor in tensors if tensor is not None]
    if not parts:
        return None
    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    return Tensor(parts[0].dtype, shape, b"".join(part.data for part in parts))
