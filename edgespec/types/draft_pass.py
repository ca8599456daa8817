"""Draft work: what a draft source computed, for charging it."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

TokenChoice = Literal["greedy", "sampled", "filtered"]
"""How tokens are taken from logits: the largest one, with noise, or with noise from a few of them
that filters leave. Sampling has one; what it costs to take or to guess a token depends on it."""


class HeadForm(NamedTuple):
    """What a head is made of, so that it can be charged beside a base of another size.

    As shares of its own base's: `width` of rows, `attention` and `mlp`, weights of a layer's,
    `keys`, the width of a row's keys, and `vocab`, the tokens that it scores. `layers`; `taps`:
    rows of the base that are joined to one; `markov_rank`, 0: no such head; `own_matrix`: whether
    it brings an output matrix, held as its layers are.
    """

    layers: int
    taps: int
    width: float = 1.0
    attention: float = 1.0
    mlp: float = 1.0
    keys: float = 1.0
    vocab: float = 1.0
    markov_rank: int = 0
    own_matrix: bool = False


class DraftPass(NamedTuple):
    """A forward pass over so many rows, by the draft source of that name; `requests`: whose rows
    they are, none named: of the request that asked. `joined`: how many of them are rows of the base
    that a head reads for the first time. `form`: of a head that says what it is made of."""

    rows: int
    source: str
    requests: tuple[int, ...] = ()
    joined: int = 0
    form: HeadForm | None = None


class RankedRows(NamedTuple):
    """Guesses were taken from one row of logits for each of `positions`, by that draft source.

    `positions`: absolute, of the tokens that were guessed. `seed`: the request's, whose noise at
    these positions was needed if `way` is "sampled". `product`: rows of the product with the
    output matrix that gave the logits, None: just these; of several requests that share one, the
    first has the rows of all, and the others 0. `form`: see DraftPass.
    """

    positions: tuple[int, ...]
    source: str
    way: TokenChoice
    seed: int
    product: int | None = None
    form: HeadForm | None = None


class SpentSeconds(NamedTuple):
    """A draft source of somebody's own worked so long, as it declares or as was measured."""

    seconds: float
    source: str


DraftWork: TypeAlias = DraftPass | RankedRows | SpentSeconds
