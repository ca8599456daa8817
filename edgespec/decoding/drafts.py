"""Drafts of a request: asks the draft source for guesses, takes what comes back into the tree."""

from __future__ import annotations

from edgespec.decoding.effects import (
    DeepenDraft,
    ExpandDraft,
    RunDraft,
)
from edgespec.decoding.events import (
    Drafted,
    Expanded,
)
from edgespec.decoding.request import DraftJob, Request
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import (
    Effect,
)
from edgespec.policy.base import Deepen, Expand, Grow

READ_ONLY = Grow(depth=0, width=1, keep=0)
"""Guess nothing, but read what is committed."""


def ask(request: Request, wanted: Grow | Deepen | Expand, job: int, now: float) -> Effect:
    """Note `wanted` as the request's draft job and return its effect.

    Raises LocalProtocolError if there is no drafted tree to deepen.
    """
    match wanted:
        case Grow():
            return _grow(request, wanted, job, now)
        case Deepen():
            return _deepen(request, wanted, job, now)
        case Expand():
            return _expand(request, wanted, job, now)


def last_reading(request: Request, job: int) -> Effect:
    """Have the draft source read what it lacks of an answered request; nobody waits for it."""
    return RunDraft(job, request.number, request.context, 0, 1, request.features())


def _grow(request: Request, grow: Grow, job: int, now: float) -> Effect:
    context = request.context
    root = request.tree.root if request.tree else -1
    features = request.features()
    unread = len(context) - (len(request.base.ids) if request.base else 0)
    reads = unread if request.hidden is None else features.rows
    request.draft = DraftJob(
        job, root, len(context), grow.keep, False, (), now, request.calm, reads
    )
    return RunDraft(job, request.number, context, grow.depth, grow.width, features)


def _deepen(request: Request, deepen: Deepen, job: int, now: float) -> Effect:
    grown = request.grown
    if grown is None:
        raise LocalProtocolError("there is no drafted tree to deepen")
    request.draft = DraftJob(job, grown.root, grown.context_length, deepen.keep, only_new=True)
    return DeepenDraft(job, request.number, deepen.levels, deepen.width)


def _expand(request: Request, expand: Expand, job: int, now: float) -> Effect:
    tree, context = request.tree, request.context
    assert tree is not None, "a policy decides once there is a tree"
    paths = tuple(tree.path(i) for i in expand.ids)
    tree.expand(expand.ids)
    features = request.features()
    request.draft = DraftJob(
        job,
        tree.root,
        len(context),
        expand.keep,
        False,
        expand.ids,
        now,
        request.calm,
        features.rows,
    )
    return ExpandDraft(job, request.number, context, paths, expand.width, features)


def take(request: Request, event: Drafted | Expanded, now: float) -> None:
    """Merge what came back, and note what it took."""
    draft, request.draft = request.draft, None
    assert draft is not None
    assert draft.job == event.job
    if isinstance(event, Expanded):
        _attach(request, draft, event, now)
        return
    request.grown = draft
    if draft.keep == 0:  # it only read
        _time(request, draft, now)
        return
    assert request.tree is not None
    since = request.context[draft.context_length :]
    added = request.tree.merge(event.tree, since, draft.keep, request.last_position, draft.only_new)
    request.exhausted = draft.only_new and added == 0


def _attach(request: Request, draft: DraftJob, event: Expanded, now: float) -> None:
    assert request.tree is not None
    _time(request, draft, now)
    calibration = request.estimates.calibration(request.sampling.without_seed)
    scores = event.children.scores.tolist()
    if request.policy.calibrates:
        scores = [calibration.score(score) for score in scores]
    request.tree.attach(draft.expanding, event.children, draft.keep, request.last_position, scores)


def _time(request: Request, draft: DraftJob, now: float) -> None:
    """Note what its rows took, if the head did not take part of it."""
    rows = draft.reads + len(draft.expanding)
    if rows and draft.heads == request.heads:
        request.estimates.draft.record(rows, now - draft.started)
