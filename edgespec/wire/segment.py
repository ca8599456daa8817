"""Segment: what travels on the data ring, rows of one or several requests at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from edgespec.tree.ledger import Rows
from edgespec.types.record import (
    NO_IDS,
    Buffer,
    Finite,
    IntArray,
    Record,
    Seconds,
    Some,
    Whole,
    take_arrays,
)
from edgespec.types.tensor import NO_LAYERS, Layers, Tensor
from edgespec.wire.messages import Message, require

MOST_PARTS = 64
"""Requests whose rows one segment holds at most."""

MOST_LAYERS = 16
"""Layers that a draft source may tap."""

MOST_TOKENS = 1 << 20
"""Of a vocabulary of which a mask says what may come."""

MOST_MASKS = 256
"""Masks of a request that the last stage knows at a time."""


class StageTime(Record, frozen=True):
    """How many rows of a segment a stage computed, and in how many seconds; rows that it left out
    on the way are counted."""

    rows: Annotated[int, Meta(gt=0)]
    seconds: Seconds


class Header(Record, frozen=True):
    """What every stage hands on as it came.

    `seq` numbers the segments of a ring in sending order. `aux_layers`: layers of which a draft
    source wants the rows that enter them (EAGLE-3).
    """

    seq: Whole
    aux_layers: Annotated[Layers, Meta(max_length=MOST_LAYERS)] = NO_LAYERS

    def check(self) -> None:
        if layers := self.aux_layers:
            ascend = all(a < b for a, b in pairwise((-1, *layers)))
            require(ascend, "aux_layers are not ascending")


class ToldRules(Record, frozen=True):
    """What changes a request's logits on the last stage, where a new answer or the rest of one
    begins: the fields of verify.rules.Rules, `answer`: its tokens so far.

    `bias` float64 [N] is added to tokens `biased`. `budget`, `opening` and `closing`: of
    ThoughtLimit; -1: there is none. `masked`: a grammar says of each row what may come behind it
    (see Allowed).
    """

    answer: IntArray
    presence: Finite
    frequency: Finite
    biased: IntArray
    bias: Tensor
    repetition: Finite
    prompt: IntArray
    least: Whole
    ends: IntArray
    budget: Annotated[int, Meta(ge=-1)]
    opening: IntArray
    closing: IntArray
    masked: bool

    def __post_init__(self) -> None:
        take_arrays(self, "answer", "biased", "prompt", "ends", "opening", "closing")

    def check(self) -> None:
        for numbers in (self.answer, self.biased, self.prompt, self.ends):
            require(not len(numbers) or int(numbers.min()) >= 0, "a negative token")
        fits = self.bias.dtype == "float64" and self.bias.shape == (len(self.biased),)
        require(fits and bool(np.isfinite(self.biases).all()), "no bias for each token")
        require(self.repetition > 0, "a repetition_penalty that is not above 0")

    @property
    def biases(self) -> npt.NDArray[np.float64]:
        """What the `biased` get."""
        return np.frombuffer(self.bias.data, "<f8")


class TokenMask(Record, frozen=True):
    """Which of `size` tokens may come, in the shorter of two ways: the lengths of the runs of those
    that may not and those that may in turns, each 4 bytes, or a bit for each. The last stage
    remembers it in that `slot`."""

    slot: Annotated[int, Meta(ge=0, lt=MOST_MASKS)]
    size: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    by_runs: bool
    data: Buffer

    def check(self) -> None:
        size, length = self.size, len(self.data)
        if self.by_runs:
            fits = length % 4 == 0 and length <= -(-size // 8)
            require(fits and int(self.runs.sum(dtype=np.uint64)) == size, "runs of another size")
        else:
            require(length == -(-size // 8), "bits of another size")

    @property
    def runs(self) -> npt.NDArray[np.uint32]:
        """Their lengths, if it is by runs."""
        return np.frombuffer(self.data, "<u4")


class Allowed(Record, frozen=True):
    """What a grammar allows behind the rows `ids` of a part: behind each the mask that the last
    stage has in one of the `slots`, -1: the answer has ended. `masks`: those that are new there."""

    ids: IntArray
    slots: IntArray
    masks: Some[TokenMask] = ()

    def __post_init__(self) -> None:
        take_arrays(self, "ids", "slots")

    def check(self) -> None:
        require(len(self.ids) == len(self.slots), "slots and ids differ in length")
        known = not len(self.slots) or -1 <= int(self.slots.min()) <= int(self.slots.max())
        require(known and bool((self.slots < MOST_MASKS).all()), "a slot that there is not")
        for mask in self.masks:
            mask.check()


class Choosing(Record, frozen=True):
    """How the last stage chooses a request's tokens, if it holds the output head.

    The settings of verify.sampling.Sampling; `top`: how many of the likeliest tokens are wanted
    beside each token, with log-probabilities; -1: neither. `rules`: what changes their logits;
    `allowed`: what a grammar allows behind the part's rows.
    """

    temperature: Finite
    top_k: Whole
    top_p: Finite
    min_p: Finite
    seed: Whole
    top: Annotated[int, Meta(ge=-1)]
    rules: ToldRules | None = None
    allowed: Allowed | None = None

    def check(self) -> None:
        for told in (self.rules, self.allowed):
            if told is not None:
                told.check()

    @property
    def is_masked(self) -> bool:
        """Whether a grammar says what may come."""
        return self.rules is not None and self.rules.masked


class Verdict(Record, frozen=True):
    """What the last stage chose: the target `tokens` after rows `ids`, which are a path down.

    `figures` float64 [R, 1]: the margin of each token (see verify.sampling.Choice); with
    log-probabilities [R, 2 + K]: the token's own after the margin, then those of its K likeliest
    rivals, which are `top` (R · K, row by row).
    """

    ids: IntArray
    tokens: IntArray
    top: IntArray
    figures: Tensor

    def __post_init__(self) -> None:
        take_arrays(self, "ids", "tokens", "top")

    def check(self) -> None:
        rows, figures = len(self.ids), self.figures
        require(len(self.tokens) == rows, "tokens and ids differ in length")
        require(not rows or int(self.tokens.min()) >= 0, "a negative token")
        fits = figures.dtype == "float64" and len(figures.shape) == 2 and figures.shape[0] == rows
        require(fits and figures.shape[1] > 0, "figures are not some numbers a row")
        require(len(self.top) == rows * max(figures.shape[1] - 2, 0), "top and figures differ")

    def is_of(self, vocabulary: int) -> bool:
        """Whether it names tokens of so many alone, and all its figures are numbers."""
        named = np.concatenate([self.tokens, self.top])
        known = not len(named) or 0 <= int(named.min()) <= int(named.max()) < vocabulary
        return known and not bool(np.isnan(np.frombuffer(self.figures.data, "<f8")).any())


class Part(Record, frozen=True):
    """The rows of one request in a segment (FlowSpec §3.2, a draft segment).

    `epoch` starts as the coordinator's newest retained set; every stage lowers it to the newest one
    that it has applied, so that what returns is an acknowledgement by all. `committed` rows
    (prefill) enter the committed region at once. `reserve` > 0 opens the request with room for that
    many rows, those of its prompt; with `fork_of` > 0 it begins with committed rows of that
    request: those that have the ids `fork_ids` there, in the order of their positions. Both hold
    the first `fork_shared` of them together from then on, or, with `fork_ends`, the other request
    ends and leaves them all.
    `want`: how many of the last rows the coordinator wants back (a prefill chunk but the last wants
    none).

    `ids`, `parents`, `positions`, `tokens`: see tree.ledger.Rows. The first stage alone reads the
    tokens; after it they are empty, unless the last stage chooses.

    `choosing`: with the end of a prompt; from its last row on the last stage follows the walk along
    target tokens, for the rows of this part and of all that follow. With guesses, which change
    nothing of that, if a grammar says what it allows there. `known`: with it, the tokens
    that come after the first of the rows that are wanted back; these are not chosen, but scored.
    What comes back then is its `verdict` in the place of hidden rows, without rows if none of the
    part's is on the walk.
    """

    request: Whole
    epoch: Whole
    committed: bool
    reserve: Whole
    want: Whole
    ids: IntArray
    parents: IntArray
    positions: IntArray
    tokens: IntArray
    fork_of: Whole = 0
    fork_ids: IntArray = NO_IDS
    fork_ends: bool = False
    fork_shared: Whole = 0
    choosing: Choosing | None = None
    verdict: Verdict | None = None
    known: IntArray = NO_IDS

    def __post_init__(self) -> None:
        take_arrays(self, "ids", "parents", "positions", "tokens", "fork_ids", "known")

    def check(self) -> None:
        rows = len(self.ids)
        fits = len(self.parents) == len(self.positions) == rows and len(self.tokens) in (0, rows)
        require(fits, "parents, positions or tokens and ids differ in length")
        require(self.fork_shared <= len(self.fork_ids), "more rows shared than there are")
        require(len(self.known) <= self.want, "more known tokens than rows are wanted")
        for numbers in (self.ids, self.positions, self.fork_ids, self.known):
            if len(numbers):
                require(np.minimum.reduce(numbers) >= 0, "a negative id or position")
        for told in (self.verdict, self.choosing):
            if told is not None:
                told.check()

    def rows(self) -> Rows:
        """The part's rows; tokens that did not travel are 0."""
        tokens = self.tokens if len(self.tokens) else np.zeros(len(self.ids), np.int64)
        return Rows(self.ids, self.parents, tokens, self.positions)


class Segment(Message, tag=1, frozen=True):
    """Rows that go round the ring together: `parts` has at most one part of a request.

    Stacked over all parts: `hidden` [R, H], None until the first stage ran, and `aux_hidden` uint8
    [R, ...], to which each stage that owns some of `header.aux_layers` appends its columns, packed
    (see model.aux_hidden); None until one did. `cost`: what the stages so far computed of it, in
    their order; a stage that found it empty adds nothing. `ppd_tokens` [P, H]: vectors of PPD
    prompt tokens, which rows name as tokens -1, -2, …; they travel to the first stage only.

    A segment without rows still travels, so that credits stay right.
    """

    header: Header
    parts: Some[Part]
    cost: Some[StageTime] = ()
    hidden: Tensor | None = None
    aux_hidden: Tensor | None = None
    ppd_tokens: Tensor | None = None

    @property
    def request(self) -> int:
        """The first part's: names the segment where one number has to."""
        return self.parts[0].request

    @property
    def rows(self) -> int:
        """How many rows all parts have."""
        return sum(len(part.ids) for part in self.parts)

    def check(self) -> None:
        self.header.check()
        parts, rows, hidden = self.parts, self.rows, self.hidden
        require(0 < len(parts) <= MOST_PARTS, "wrong number of parts")
        require(len({part.request for part in parts}) == len(parts), "a request has two parts")
        for part in parts:
            part.check()
        if hidden is None:
            complete = all(len(part.tokens) == len(part.ids) for part in parts)
            require(complete, "tokens and ids differ in length")
        else:
            fits = len(hidden.shape) == 2 and hidden.shape[0] == rows
            require(fits, "hidden is not one vector a row")
        if self.aux_hidden is not None:
            dtype, shape = self.aux_hidden.dtype, self.aux_hidden.shape
            fits = dtype == "uint8" and len(shape) == 2 and shape[0] == rows
            require(fits and bool(self.header.aux_layers), "aux_hidden is not one vector a row")
        if self.ppd_tokens is not None:
            require(len(self.ppd_tokens.shape) == 2, "ppd_tokens are no list of vectors")
