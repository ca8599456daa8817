"""Target walk: how the last stage follows a request's walk along target tokens, and tells of it.

Parents never travel behind their children. So once a row is at the last stage, it is settled
whether it is on the walk: it is if it stands for the target token of the walk's last row, be it a
guess that was right or the new root after a miss. No other row's target token is ever asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from edgespec.decoding.effects import RunHead
from edgespec.decoding.events import HeadDone
from edgespec.decoding.told_rules import FollowedRules
from edgespec.tree.ledger import IntArray, Rows
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.segment import Choosing, Part, Segment, Verdict

_NOTHING: IntArray = np.zeros(0, np.int64)

NO_VERDICT = Verdict(_NOTHING, _NOTHING, _NOTHING, Tensor("float64", (0, 1), b""))
"""None of the rows was on the walk."""


class TargetWalk:
    """The walk of one request, from the last row of its prompt on."""

    def __init__(self, choosing: Choosing) -> None:
        """Raises ConfigError for settings by which nothing can be sampled."""
        one = choosing
        self.sampling = Sampling(one.temperature, one.top_k, one.top_p, one.min_p, one.seed)
        self.top = choosing.top
        self.rules = FollowedRules(one.rules) if one.rules else None
        self._last: tuple[int, int] | None = None  # the last row, and its target token

    def rows_on_walk(self, part: Part) -> IntArray:
        """Places of the rows that the walk may go along: the first that is on it, and those below
        it; none if none is on it."""
        if part.committed:  # the end of the prompt, which the walk begins with, or scored tokens
            first = 0 if len(part.known) else -1
            return np.arange(len(part.ids))[first:] if self._last is None else _NOTHING
        found: dict[int, int] = {}
        columns = part.ids.tolist(), part.parents.tolist(), part.tokens.tolist()
        for place, (row, parent, token) in enumerate(zip(*columns, strict=True)):
            if parent in found or (parent, token) == self._last:
                found[row] = place
        return np.array(list(found.values()), np.int64)

    def to_verdict(self, head: RunHead, done: HeadDone) -> Verdict:
        """The tokens after some of the rows are chosen, a path down; what D0 is told."""
        choice, others = done.choice, done.top_logprobs
        path = head.rows.ids[choice.rows]
        if len(head.walk):
            self._last = int(path[-1]), int(choice.tokens[-1])
            if self.rules is not None:
                self.rules.chose(choice.tokens[len(head.known) :].tolist())
        figures, top = choice.margins[:, None], _NOTHING
        if others is not None:
            figures = np.hstack([figures, others.log_probs[:, None], others.top_log_probs])
            top = np.ascontiguousarray(others.top, np.int64).reshape(-1)
        told = Tensor("float64", figures.shape, np.ascontiguousarray(figures, "<f8").tobytes())
        return Verdict(path, choice.tokens, top, told)


@dataclass(slots=True)
class StageJob:
    """The segment at work: as it came in, the rows of each part that are computed, and what the
    stages before tapped of these. `job`: the block's. Once that has run, on the last stage: the
    `heads` at work, by their jobs, each with its part's place in the segment as it shall leave,
    `done`; their worker makes one pass of them."""

    job: int
    segment: Segment
    rows: tuple[Rows, ...]
    aux_hidden: Tensor | None
    since: float
    done: Segment | None = None
    heads: dict[int, tuple[RunHead, int]] = field(default_factory=dict)

    def begin_heads(self, done: Segment, heads: dict[int, tuple[RunHead, int]]) -> None:
        """The block has run, and those heads are at work."""
        self.done, self.heads = done, heads

    def settle(self, place: int, part: Part) -> None:
        """The part in that place leaves so: with a verdict, or without rows."""
        assert self.done is not None
        parts = list(self.done.parts)
        parts[place] = part
        hidden = None if part.verdict is None else self.done.hidden
        self.done = replace(self.done, parts=tuple(parts), hidden=hidden)

    def pop_head(self, job: int) -> tuple[RunHead, int]:
        """One of them has ended, and the place of its part."""
        return self.heads.pop(job)


def heads_of(
    done: Segment, walk_of: Callable[[int], TargetWalk | None], first_job: int
) -> tuple[Segment, dict[int, tuple[RunHead, int]]]:
    """The head's jobs for a segment that the block has run, numbered from `first_job` on: one for
    each part that has rows on its request's walk, with that part's place. Comes with the segment,
    in which parts without such rows have their verdict."""
    assert done.hidden is not None
    heads: dict[int, tuple[RunHead, int]] = {}
    parts, first = list(done.parts), 0
    for place, part in enumerate(done.parts):
        walk = walk_of(part.request)
        ours = walk.rows_on_walk(part) if walk is not None else _NOTHING
        if len(ours) and walk is not None:
            job, hidden, rows = first_job + len(heads), done.hidden.take(first + ours), part.rows()
            rows, rules = rows.take(ours), None
            if walk.rules is not None:
                rules = walk.rules.at(rows.ids[len(part.known) :])
            asked = walk.sampling, walk.top, rules, part.known
            head = RunHead(job, part.request, hidden, rows, *asked)
            heads[job] = head, place
        elif walk is not None and len(part.ids):
            parts[place] = replace(part, verdict=NO_VERDICT)
        first += len(part.ids)
    return replace(done, parts=tuple(parts)), heads


def chosen_of(done: Segment) -> Segment:
    """The segment as it leaves: verdicts take the place of hidden rows."""
    chose = any(part.verdict is not None for part in done.parts)
    return replace(done, hidden=None) if chose else done


def choosing_of(sampling: Sampling, top: int) -> Choosing:
    """What the last stage must know of a request to choose its tokens."""
    one = sampling
    return Choosing(one.temperature, one.top_k, one.top_p, one.min_p, one.seed, top)


def chosen(verdict: Verdict) -> tuple[Choice, TopLogprobs | None]:
    """What the head would have said on D0 of the verdict's rows."""
    rows, columns = verdict.figures.shape
    figures = np.frombuffer(verdict.figures.data, "<f8").reshape(rows, columns)
    choice = Choice(np.arange(rows), verdict.tokens, figures[:, 0])
    if columns == 1:
        return choice, None
    top = verdict.top.reshape(rows, columns - 2)
    return choice, TopLogprobs(figures[:, 1], top, figures[:, 2:])
