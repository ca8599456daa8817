"""Drafting: what the draft source of one request is asked and given, and where its guesses go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgespec.decoding.effects import Draft, OpenDraft
from edgespec.decoding.events import Drafted
from edgespec.decoding.flights import Returned
from edgespec.decoding.outbox import Outbox
from edgespec.decoding.ppd_rows import PPDRows
from edgespec.decoding.shared import Shared
from edgespec.errors import LocalProtocolError
from edgespec.policy.base import Deepen, Expand, Grow, Plan, Policy
from edgespec.policy.estimates import RingEstimates
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.tree.ledger import Rows
from edgespec.tree.node import Advance
from edgespec.types.features import NO_FEATURES, DraftNeeds, Features, joined
from edgespec.types.record import IntArray
from edgespec.verify.rules import Rules
from edgespec.verify.sampling import Sampling

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


class Drafting:
    """The drafts of one request on one ring, and what the ring gives for them.

    `running`: the draft at work. `grown`: the last one that grew a tree; `exhausted`: it can be
    deepened no further. `hidden`, `ppd_rows`: None where nothing asks for them.
    """

    def __init__(
        self,
        number: int,
        policy: Policy,
        sampling: Sampling,
        rules: Rules | None,
        estimates: RingEstimates,
        shared: Shared,
        needs: DraftNeeds,
        outbox: Outbox,
        last_position: int,
    ) -> None:
        """`needs`: of the draft source. `last_position`: guesses behind it could not be used."""
        self.running: DraftJob | None = None
        self.grown: DraftJob | None = None
        self.exhausted = False
        rows = range(outbox.reused_rows, len(outbox.prefix))
        self.hidden = HiddenRows(rows, needs) if needs.hidden else None
        self.ppd_rows = PPDRows(*shared.ppd) if shared.ppd and policy.drafts else None
        self._number, self._reused = number, outbox.reused
        self._learns, self._pools = policy.drafts, policy.pool is not None
        self._sampling, self._way = sampling, sampling.without_seed
        self._estimates, self._d0 = estimates, shared.d0
        self._grammar = None if rules is None else rules.grammar
        self._last_position, self._most_ahead = last_position, shared.most_ahead
        self._jobs = 0

    # --- what the source is asked -------------------------------------------------------------

    def open(self, prompt: int) -> OpenDraft:
        """Start the request, with so many tokens before its answer, on the draft source, from what
        that has read of the reused rows."""
        reused = self._reused
        known = (reused.request, len(reused.ids), reused.ends) if reused else (0, 0, False)
        return OpenDraft(self._number, self._sampling, *known, self._grammar, prompt)

    def ask(
        self, plan: Plan, tree: DraftTree | None, context: tuple[int, ...], now: float
    ) -> Draft:
        """Have the draft source carry out `plan`; `context`: all committed tokens.

        Raises LocalProtocolError if there is no drafted tree to deepen.
        """
        if isinstance(plan, Deepen):
            if self.grown is None:
                raise LocalProtocolError("there is no drafted tree to deepen")
            job = self._start(plan, self.grown.root, self.grown.context_length, 0, now)
            return Draft(job, self._number, plan, ())
        free = isinstance(plan, Expand) and plan.free
        # A source whose model is not run now is given what it lacks when that runs again.
        features = NO_FEATURES if free else self._features()
        paths: tuple[tuple[int, ...], ...] = ()
        node_scores: tuple[float, ...] = ()
        reads = features.rows
        if isinstance(plan, Expand):
            assert tree is not None, "a policy decides once there is a tree"
            tree.expand(plan.ids)
            paths = tree.paths(plan.ids)
            node_scores = tuple(map(tree.score, plan.ids))
        elif self.hidden is None:
            reads = len(context) - (len(self._reused.ids) if self._reused else 0)
        # What a tree takes that is grown level by level tells nothing of one pass.
        says_nothing = free or (isinstance(plan, Grow) and plan.keep)
        rows = 0 if says_nothing else reads + len(paths)
        job = self._start(plan, tree.root if tree else -1, len(context), rows, now)
        return Draft(job, self._number, plan, context, paths, features, node_scores)

    def last_reading(self, context: tuple[int, ...]) -> Draft:
        """Have the draft source read what it lacks of an answered request; no event is awaited."""
        return Draft(self._next_job(), self._number, READ_ONLY, context, (), self._features())

    def _start(self, plan: Plan, root: int, context_length: int, rows: int, now: float) -> int:
        job = self._next_job()
        self.running = DraftJob(job, plan, root, context_length)
        self._d0.drafts.asked((self._number, job), rows, self._estimates, now)
        return job

    def _next_job(self) -> int:
        self._jobs += 1
        return self._jobs

    def _features(self) -> Features:
        """What the draft source needs of the committed rows and has not had yet."""
        features = NO_FEATURES if self.hidden is None else self.hidden.take()
        chain = None if self.ppd_rows is None else self.ppd_rows.take()
        return features if chain is None else replace(features, anchor=chain[0], ppd_rows=chain[1])

    # --- guesses ------------------------------------------------------------------------------

    def take_guesses(
        self,
        drafted: Drafted,
        tree: DraftTree | None,
        prompt: int,
        answer: Sequence[int],
        now: float,
    ) -> bool:
        """Merge the guesses of the draft at work, which has ended, into the tree; False if that is
        another one. `answer`: the committed tokens behind the `prompt`, of so many."""
        draft, guesses = self.running, drafted.guesses
        if draft is None or draft.job != drafted.job:
            return False
        self.running = None
        further = 0
        if isinstance(draft.plan, Expand) and isinstance(guesses, Children):
            further = guesses.further(len(draft.plan.ids))
        self._d0.draft_ended((self._number, draft.job), now, further)
        plan = draft.plan
        if isinstance(plan, Expand):
            assert isinstance(guesses, Children)
            assert tree is not None
            self._attach(plan, guesses, tree)
            return True
        self.grown = draft
        if plan.keep == 0:  # it only read
            return True
        assert isinstance(guesses, DraftedTree)
        assert tree is not None
        deepens = isinstance(plan, Deepen)
        since = answer[draft.context_length - prompt :]
        added = tree.merge(guesses, since, plan.keep, self._deepest(tree), only_new=deepens)
        self.exhausted = deepens and added == 0
        return True

    def _attach(self, plan: Expand, guesses: Children, tree: DraftTree) -> None:
        scores = guesses.scores
        if self._pools:
            calibration = self._estimates.calibration(self._way)
            scores = calibration.scores(scores)
            if guesses.sources is not None:
                scores[guesses.certain] = 0.0
        else:
            guesses = replace(guesses, chains=())
        tree.attach(plan.ids, guesses, plan.keep, self._deepest(tree), scores)

    def _deepest(self, tree: DraftTree) -> int:
        """The last position that guesses may have: however many plans have grown the tree, stages
        fold rows into states by it (types.boundaries)."""
        return min(self._last_position, tree.position(tree.root) + self._most_ahead)

    # --- what the ring gives ------------------------------------------------------------------

    def hang_chains(self, tree: DraftTree, ids: Sequence[int], rows: Rows) -> Rows:
        """PPD rows below the nodes `ids`, which leave with `rows`; none if the source has none."""
        if self.ppd_rows is None:
            return Rows.none()
        last = self._deepest(tree)
        return self.ppd_rows.hang(tree, ids, len(rows), last, self._estimates.step)

    def awaited(self, tree: DraftTree) -> tuple[int, ...]:
        """PPD rows that no stage may drop."""
        return () if self.ppd_rows is None else self.ppd_rows.awaited(tree)

    def keep_rows(self, returned: Returned, tree: DraftTree) -> None:
        """Rows of guesses are back: keep what the source needs of those that are alive."""
        if returned.hidden is None:
            return
        ids = returned.part.ids
        if self.ppd_rows is not None:
            self.ppd_rows.chains_back(returned.flight.wanted, ids, returned.hidden)
            self.ppd_rows.settle(tree)
        live = [i in tree for i in ids.tolist()]
        if self.hidden is not None and any(live):
            self.hidden.keep(returned, np.flatnonzero(live))

    def walked(self, step: Advance, tree: DraftTree) -> None:
        """Learn from a walk of the tree what guesses are worth."""
        if self._learns:
            self._estimates.verified(self._way, step)
        if self.ppd_rows is not None and step.tokens:
            self.ppd_rows.walked(step, tree)


class HiddenRows:
    """The hidden rows of one request: kept until they are committed and handed over."""

    def __init__(self, prefix: range, needs: DraftNeeds) -> None:
        """The rows with the ids `prefix` are committed from the start, none before are wanted."""
        self._final, self._aux_layers = needs.final_hidden, needs.aux_layers
        self._rows: dict[int, tuple[Features, int]] = {}
        self._kind: tuple[object, ...] | None = None  # what must be the same for rows to be joined
        self._committed = deque(prefix)

    def keep(self, returned: Returned, index: IntArray) -> None:
        """The rows `index` of a part of this request came back from the ring.

        Rows without the auxiliary ones that are wanted, or of other widths than the first ones, are
        passed over: from then on nothing is handed over, and nothing is guessed.
        """
        if returned.hidden is None:
            return
        aux = returned.aux_hidden if self._aux_layers else None
        hidden = returned.hidden if self._final else None
        came = _rows_of(Features(hidden, aux, self._aux_layers), index)
        kind = tuple(t and (t.dtype, t.shape[1:]) for t in (came.final, came.aux_hidden))
        self._kind = self._kind or kind
        if kind != self._kind or (self._aux_layers and aux is None):
            return
        ids = returned.part.ids[index].tolist()
        self._rows.update((row, (came, at)) for at, row in enumerate(ids))

    def commit(self, ids: Iterable[int], newest: int) -> None:
        """The guesses `ids` became committed, in order; up to row `newest` no other is alive."""
        self._committed.extend(ids)
        wanted = set(self._committed)
        self._rows = {i: row for i, row in self._rows.items() if i > newest or i in wanted}

    def take(self) -> Features:
        """What was not handed over yet, as far as it is here without a gap."""
        parts: list[tuple[Features, list[int]]] = []
        while self._committed and self._committed[0] in self._rows:
            came, at = self._rows.pop(self._committed.popleft())
            if not parts or parts[-1][0] is not came:
                parts.append((came, []))
            parts[-1][1].append(at)
        return joined([_rows_of(came, np.array(at)) for came, at in parts])


def _rows_of(features: Features, index: IntArray) -> Features:
    """Those of some of the rows."""
    final, aux_hidden = features.final, features.aux_hidden
    return replace(
        features,
        final=final and final.take(index),
        aux_hidden=aux_hidden and aux_hidden.take(index),
    )
