"""Features: what a draft source may need beyond tokens, and the committed rows' share of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgespec.types.tensor import NO_LAYERS, Layers, Tensor

FINAL_HIDDEN = "final_hidden"
"""The need of the base's hidden rows, as its output head reads them (EAGLE-1/2 heads)."""
_AUX = "tap:"
PPD_TOKENS = "prompt_rows"
"""The need of rows of its own beside the guesses on the ring (PPD prompt tokens)."""


def aux_layer(layer: int) -> str:
    """The need of the rows that enter a layer of the base, counted from 0 (EAGLE-3 heads)."""
    return f"{_AUX}{layer}"


def aux_layers(needs: Iterable[str]) -> Layers:
    """The layers that are to be tapped."""
    return Layers(tuple(sorted(int(n[len(_AUX) :]) for n in needs if n.startswith(_AUX))))


@dataclass(frozen=True, slots=True)
class Features:
    """What the ring gave for committed rows since the last draft effect of the request.

    `final`: [n, H] in the model's dtype, hidden rows behind the final norm; None for none.
    `aux_hidden` [n, ...]: what the stages packed, for the same rows, of what enters the layers
    `aux_layers` (see Segment); None if no source needs them. The rows are consecutive: those of all
    draft effects of a request, one after the other, are the rows of positions 0, 1, 2, …. The
    newest committed token has none yet, and tokens whose results are still on the ring have theirs
    later.

    `prompts`: [k · copies, H], the hidden rows of a chain of prompt rows below the committed token
    at position `anchor`, the newest there is: those that guess the token at anchor + 2, at anchor +
    3, … Each chain comes once.
    """

    final: Tensor | None = None
    aux_hidden: Tensor | None = None
    aux_layers: Layers = NO_LAYERS
    prompts: Tensor | None = None
    anchor: int = -1

    @property
    def rows(self) -> int:
        """Of how many committed rows."""
        return next((t.shape[0] for t in (self.final, self.aux_hidden) if t is not None), 0)


NO_FEATURES = Features()


def joined(parts: Sequence[Features]) -> Features:
    """What consecutive draft effects gave, as if one had given it all: of chains, the newest."""
    rows = [part for part in parts if part.rows]
    newest = next((part for part in reversed(parts) if part.prompts is not None), NO_FEATURES)
    return Features(
        concatenated([part.final for part in rows]),
        concatenated([part.aux_hidden for part in rows]),
        rows[0].aux_layers if rows else NO_LAYERS,
        newest.prompts,
        newest.anchor,
    )


@dataclass(frozen=True, slots=True)
class PPDTable:
    """Trained prompt tokens: `depth` tokens ahead, `copies` vectors for each, to average; `rows`
    [depth · copies, H], the vectors of the first token ahead, of the second, …"""

    depth: int
    copies: int
    rows: Tensor


def concatenated(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors of equal dtype and width, the rows of one behind those of the other."""
    parts = [tensor for tensor in tensors if tensor is not None]
    if not parts:
        return None
    shape = sum(part.shape[0] for part in parts), *parts[0].shape[1:]
    return Tensor(parts[0].dtype, shape, b"".join(part.data for part in parts))
