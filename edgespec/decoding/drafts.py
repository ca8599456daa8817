"""Drafts of a request: asks the draft source for guesses, merges what comes back into the tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgespec.decoding.effects import Draft
from edgespec.errors import LocalProtocolError
from edgespec.policy.base import Deepen, Expand, Grow, Plan
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.features import NO_FEATURES, Features

if TYPE_CHECKING:
    from edgespec.decoding.request import Request

READ_ONLY = Grow(depth=0, width=1, keep=0)
"""Guess nothing, but read what is committed."""


@dataclass(slots=True)
class DraftJob:
    """A draft at work, or the last one that grew a tree.

    `root`: below which node it grows. `context_length`: committed tokens when it was asked for, at
    `started`. `reads`: committed rows that it reads besides. `head_seconds`: how long the head,
    which goes first, was at work meanwhile: no part of what drafting takes.
    """

    job: int
    plan: Plan
    root: int
    context_length: int
    started: float = 0.0
    reads: int = 0
    head_seconds: float = 0.0


def ask(request: Request, plan: Plan, now: float) -> Draft:
    """Have the draft source carry out `plan`.

    Raises LocalProtocolError if there is no drafted tree to deepen.
    """
    if isinstance(plan, Deepen):
        return _deepen(request, plan)
    context, features = request.context, _features(request)
    paths: tuple[tuple[int, ...], ...] = ()
    reads = features.rows
    if isinstance(plan, Expand):
        assert request.tree is not None, "a policy decides once there is a tree"
        paths = tuple(request.tree.path(i) for i in plan.ids)
        request.tree.expand(plan.ids)
    elif request.hidden is None:
        reads = len(context) - request.prefix.reused_rows
    root = request.tree.root if request.tree else -1
    job = DraftJob(request.next_job(), plan, root, len(context), now, reads)
    request.draft = job
    return Draft(job.job, request.number, plan, context, paths, features)


def _deepen(request: Request, plan: Deepen) -> Draft:
    grown = request.grown
    if grown is None:
        raise LocalProtocolError("there is no drafted tree to deepen")
    request.draft = DraftJob(request.next_job(), plan, grown.root, grown.context_length)
    return Draft(request.draft.job, request.number, plan, ())


def last_reading(request: Request) -> Draft:
    """Have the draft source read what it lacks of an answered request; no event is awaited."""
    context, features = request.context, _features(request)
    return Draft(request.next_job(), request.number, READ_ONLY, context, (), features)


def merge(request: Request, guesses: DraftedTree | Children, now: float) -> None:
    """The draft at work has ended: merge its guesses, and learn what it took."""
    draft, request.draft = request.draft, None
    assert draft is not None
    request.head_since = now  # a head that is to run waited for the end of this
    plan, tree, last = draft.plan, request.tree, request.last_position
    if isinstance(plan, Expand):
        assert isinstance(guesses, Children)
        assert tree is not None
        _learn(request, draft, len(plan.ids), now)
        scores = guesses.scores.tolist()
        if request.policy.calibrates:
            calibration = request.estimates.calibration(request.sampling.without_seed)
            scores = [calibration.score(score) for score in scores]
        tree.attach(plan.ids, guesses, plan.keep, last, scores)
        return
    request.grown = draft
    if plan.keep == 0:  # it only read
        _learn(request, draft, 0, now)
        return
    assert isinstance(guesses, DraftedTree)
    assert tree is not None
    deepens = isinstance(plan, Deepen)
    since = request.context[draft.context_length :]
    added = tree.merge(guesses, since, plan.keep, last, only_new=deepens)
    request.exhausted = deepens and added == 0


def _features(request: Request) -> Features:
    """What the draft source needs of the committed rows and has not had yet."""
    features = NO_FEATURES if request.hidden is None else request.hidden.take()
    chain = None if request.ppd_rows is None else request.ppd_rows.take()
    return features if chain is None else replace(features, anchor=chain[0], ppd_rows=chain[1])


def _learn(request: Request, draft: DraftJob, expanded: int, now: float) -> None:
    rows = draft.reads + expanded
    if rows:
        request.estimates.draft.record(rows, max(now - draft.started - draft.head_seconds, 0.0))


def head_ended(request: Request, now: float) -> None:
    """The head's work is done: learn what it took, and how long it kept a draft waiting."""
    assert request.head_job is not None
    request.estimates.head.record(len(request.head_job.rows), now - request.head_since)
    if request.draft is not None:
        request.draft.head_seconds += now - max(request.head_since, request.draft.started)
    request.head_job = None
