"""Drafts of a request: asks the draft source for guesses, merges what comes back into the tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgespec.decoding.effects import Draft, OpenDraft
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

    `root`: below which node it grows. `context_length`: committed tokens when it was asked for.
    """

    job: int
    plan: Plan
    root: int
    context_length: int


def opening(request: Request) -> OpenDraft:
    """Start the request on the draft source, from what that has read of the reused rows."""
    reused = request.prefix.reused
    known = (reused.request, len(reused.ids), reused.ends) if reused else (0, 0, False)
    grammar, prompt = request.rules.grammar, len(request.prompt)
    return OpenDraft(request.number, request.sampling, *known, grammar, prompt)


def ask(request: Request, plan: Plan, now: float) -> Draft:
    """Have the draft source carry out `plan`.

    Raises LocalProtocolError if there is no drafted tree to deepen.
    """
    if isinstance(plan, Deepen):
        return _deepen(request, plan, now)
    free = isinstance(plan, Expand) and plan.free
    # A source whose model is not run now is given what it lacks when that runs again.
    context, features = request.context, NO_FEATURES if free else _features(request)
    paths: tuple[tuple[int, ...], ...] = ()
    node_scores: tuple[float, ...] = ()
    reads = features.rows
    if isinstance(plan, Expand):
        assert request.tree is not None, "a policy decides once there is a tree"
        request.tree.expand(plan.ids)
        paths = request.tree.paths(plan.ids)
        node_scores = tuple(map(request.tree.score, plan.ids))
    elif request.hidden is None:
        reads = len(context) - request.prefix.reused_rows
    root = request.tree.root if request.tree else -1
    job = request.draft = DraftJob(request.next_job(), plan, root, len(context))
    # What a tree takes that is grown level by level tells nothing of one pass.
    says_nothing = free or (isinstance(plan, Grow) and plan.keep)
    rows = 0 if says_nothing else reads + len(paths)
    request.d0.draft_asked((request.number, job.job), rows, request.estimates, now)
    return Draft(job.job, request.number, plan, context, paths, features, node_scores)


def _deepen(request: Request, plan: Deepen, now: float) -> Draft:
    grown = request.grown
    if grown is None:
        raise LocalProtocolError("there is no drafted tree to deepen")
    job = request.draft = DraftJob(request.next_job(), plan, grown.root, grown.context_length)
    request.d0.draft_asked((request.number, job.job), 0, request.estimates, now)
    return Draft(job.job, request.number, plan, ())


def last_reading(request: Request) -> Draft:
    """Have the draft source read what it lacks of an answered request; no event is awaited."""
    context, features = request.context, _features(request)
    return Draft(request.next_job(), request.number, READ_ONLY, context, (), features)


def merge(request: Request, guesses: DraftedTree | Children, now: float) -> None:
    """The draft at work has ended: merge its guesses."""
    draft, request.draft = request.draft, None
    assert draft is not None
    further = 0
    if isinstance(draft.plan, Expand) and isinstance(guesses, Children):
        further = guesses.further(len(draft.plan.ids))
    request.d0.draft_ended((request.number, draft.job), now, further)
    plan, tree, last = draft.plan, request.tree, request.last_position
    if isinstance(plan, Expand):
        assert isinstance(guesses, Children)
        assert tree is not None
        scores = guesses.scores
        if request.policy.pool is not None:
            calibration = request.estimates.calibration(request.sampling.without_seed)
            scores = calibration.scores(scores)
            if guesses.sources is not None:
                scores[guesses.certain] = 0.0
        if request.policy.pool is None:
            guesses = replace(guesses, chains=())
        tree.attach(plan.ids, guesses, plan.keep, last, scores)
        request.hints.score(request, plan.ids)
        return
    request.grown = draft
    if plan.keep == 0:  # it only read
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
