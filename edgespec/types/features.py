"""Features: what a draft source may need beyond tokens, and what the ring gave of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.types.tensor import NO_LAYERS, Layers, Tensor


@dataclass(frozen=True, slots=True)
class PPDTable:
    """Trained PPD tokens: `depth` tokens ahead, `copies` vectors for each, to average; `rows`
    [depth · copies, H], the vectors of the first token ahead, of the second, …"""

    depth: int
    copies: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What a draft source must be given beyond tokens.

    `final_hidden`: the base's hidden rows, as its output head reads them (EAGLE-1/2 heads).
    `aux_layers`: the rows that enter these layers of the base, counted from 0 (EAGLE-3 heads).
    `ppd_tokens`: rows of its own beside the guesses on the ring, with these vectors (PPD).
    """

    final_hidden: bool = False
    aux_layers: Layers = NO_LAYERS
    ppd_tokens: PPDTable | None = None

    @property
    def hidden(self) -> bool:
        """Whether it needs hidden rows of the committed tokens."""
        return self.final_hidden or bool(self.aux_layers)

    def __or__(self, other: DraftNeeds) -> DraftNeeds:
        layers = sorted({*self.aux_layers, *other.aux_layers})
        return DraftNeeds(
            self.final_hidden or other.final_hidden,
            Layers(tuple(layers)),
            self.ppd_tokens or other.ppd_tokens,
        )


NO_NEEDS = DraftNeeds()


@dataclass(frozen=True, slots=True)
class Features:
    """What the ring gave for committed rows since the last draft effect of the request.

    `final`: [n, H] in the model's dtype, hidden rows after the final norm; None for none.
    `aux_hidden` [n, ...]: what the stages packed, for the same rows, of what enters the layers
    `aux_layers` (see Segment); None if no source needs them. The rows are consecutive: those of all
    draft effects of a request, one after the other, are the rows of positions 0, 1, 2, …. The
    newest committed token has none yet; rows that are still on the ring come later.

    `ppd_rows`: [k · copies, H], the hidden rows of a chain of PPD tokens below the committed token
    at position `anchor`, the newest there is: they guess the token at anchor + 2, at anchor + 3, …
    Each chain comes once.
    """

    final: Tensor | None = None
    aux_hidden: Tensor | None = None
    aux_layers: Layers = NO_LAYERS
    ppd_rows: Tensor | None = None
    anchor: int = -1

    @property
    def rows(self) -> int:
        """How many committed rows they are of."""
        return next((t.shape[0] for t in (self.final, self.aux_hidden) if t is not None), 0)


NO_FEATURES = Features()


def joined(parts: Sequence[Features]) -> Features:
    """What consecutive draft effects gave, as if one had given it all: of chains, the newest."""
    rows = [part for part in parts if part.rows]
    newest = next((part for part in reversed(parts) if part.ppd_rows is not None), NO_FEATURES)
    return Features(
        concatenated([part.final for part in rows]),
        concatenated([part.aux_hidden for part in rows]),
        rows[0].aux_layers if rows else NO_LAYERS,
        newest.ppd_rows,
        newest.anchor,
    )


def concatenated(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors of equal dtype and width, the rows of each after those of the one before."""
    parts = [tensor for tensor in tensors if tensor is not None]
    if not parts:
        return None
    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    return Tensor(parts[0].dtype, shape, b"".join(part.data for part in parts))
