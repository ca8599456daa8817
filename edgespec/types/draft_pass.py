"""Draft work: what a draft source computed, for charging it."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

Way = Literal["greedy", "sampled", "filtered"]
"""How tokens are taken from logits: the largest one, with noise, or with noise from a few of them
that filters leave. Sampling has one; what it costs to take or to guess a token depends on it."""


class DraftPass(NamedTuple):
    """A forward pass over so many rows, by the draft source of that name; `requests`: whose rows
    they are, none named: of the request that asked. `direct`: 0, or for a head with direct maps
    how many numbers lie between the two of low rank, over all slots."""

    rows: int
    source: str
    requests: tuple[int, ...] = ()
    direct: int = 0


class RankedRows(NamedTuple):
    """Guesses were taken from one row of logits for each of `positions`, by that draft source.

    `positions`: absolute, of the tokens that were guessed. `seed`: the request's, whose noise at
    these positions was needed if `way` is "sampled". `product`: rows of the product with the
    output matrix that gave the logits, None: just these; of several requests that share one, the
    first has the rows of all, and the others 0.
    """

    positions: tuple[int, ...]
    source: str
    way: Way
    seed: int
    product: int | None = None


DraftWork: TypeAlias = DraftPass | RankedRows
