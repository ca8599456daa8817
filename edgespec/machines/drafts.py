"""Drafts of a request: asks the draft source for guesses, takes what comes back into the tree."""

from __future__ import annotations

from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import DeepenDraft, Effect, ExpandDraft, RunDraft
from edgespec.machines.events import Drafted, Expanded
from edgespec.machines.request import DraftJob, Request
from edgespec.policy.base import Deepen, Expand, Grow


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


def _grow(request: Request, grow: Grow, job: int, now: float) -> Effect:
    context = request.context
    root = request.tree.root if request.tree else -1
    request.draft = DraftJob(job, root, len(context), grow.keep, only_new=False, started=now)
    features = request.features()
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
    request.draft = DraftJob(
        job, tree.root, len(context), expand.keep, False, expand.ids, now, request.calm
    )
    features = request.features()
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
    if draft.keep == 0:  # the prompt alone was read
        request.experience.draft.record(draft.context_length, now - draft.started)
        return
    assert request.tree is not None
    since = request.context[draft.context_length :]
    added = request.tree.merge(event.tree, since, draft.keep, request.last_position, draft.only_new)
    request.exhausted = draft.only_new and added == 0


def _attach(request: Request, draft: DraftJob, event: Expanded, now: float) -> None:
    assert request.tree is not None
    if draft.heads == request.heads:
        request.experience.draft.record(len(draft.expanding), now - draft.started)
    calibration = request.experience.calibration(request.sampling.shape)
    scores = event.children.scores.tolist()
    if request.policy.calibrates:
        scores = [calibration.score(score) for score in scores]
    request.tree.attach(draft.expanding, event.children, draft.keep, request.last_position, scores)
