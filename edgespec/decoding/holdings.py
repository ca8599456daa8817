"""Holdings: what requests hold on the stages and the draft source, and what the next ones find."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from edgespec.decoding.effects import CloseDraft
from edgespec.decoding.request import Request
from edgespec.decoding.row_account import CachedPrefix, ReusedPrefix, RowAccount
from edgespec.machines.effects import Effect, SendStages
from edgespec.types.features import DraftNeeds
from edgespec.wire.messages import CloseRequest


class Holdings:
    """Books in the row account what requests take up and leave, and has the rest freed."""

    def __init__(self, rows: RowAccount, needs: DraftNeeds | None, folds: bool) -> None:
        """`needs`: of the draft source; None: there is none. `folds`: see CoordinatorSettings."""
        self._rows, self._folds = rows, folds
        self._has_draft = needs is not None
        self._needs_hidden = needs is not None and needs.hidden

    def begin(self, request: Request, live: Collection[Request]) -> ReusedPrefix | None:
        """A request starts; what it begins with, of answered requests and of those `live` ones
        whose prompts were read."""
        alone = self._needs_hidden or self._folds
        read = () if alone else (r for r in live if r.tree and not r.opening)
        known = {one.number: _cached_prefix(one) for one in read}
        # Of rows that are not read no scores come.
        tokens = () if request.scores.next_row is not None else request.context
        return self._rows.begin(request.number, tokens, request.client.asker, known)

    def leave(self, request: Request, live_rows: int, *, answered: bool) -> list[Effect]:
        """A request is over: free it everywhere, except rows that a next turn may begin with, as
        long as there is room beside `live_rows` of live requests."""
        # A draft source that needs hidden rows cannot go on from rows that it has not read.
        known = request.policy.drafts or not self._needs_hidden
        if not answered or not known or request.tree is None:
            return self.free_all([request])
        gone = self._rows.keep(request.number, _cached_prefix(request), live_rows)
        kept = [] if request.number in gone else _last_effects(request)
        return kept + self.free(gone)

    def free_all(self, requests: Sequence[Request]) -> list[Effect]:
        """Free requests, with those that end with them, if no stage knows that yet."""
        numbers: list[int] = []
        for request in requests:
            reused = request.outbox.reused
            ends = reused is not None and reused.ends and not request.outbox.last_sent_seq
            numbers += [request.number, reused.request] if reused and ends else [request.number]
        return self.free(numbers)

    def free(self, numbers: Sequence[int]) -> list[Effect]:
        """Nothing of these requests is needed any more, on the stages as soon as no other begins
        with them."""
        if not numbers:
            return []
        ends = [SendStages(CloseRequest(number)) for number in self._rows.release(numbers)]
        return [*ends, *self.close_drafts(numbers)]

    def close_drafts(self, numbers: Sequence[int]) -> list[Effect]:
        """Free requests on the draft source, which ignores those that it does not know."""
        return [CloseDraft(number) for number in numbers] if self._has_draft else []


def _cached_prefix(request: Request) -> CachedPrefix:
    """What every stage holds of a request whose first token is there: the rows of all committed
    tokens but the last, which was not run, or is not back."""
    ids = (*range(len(request.outbox.prefix)), *request.outbox.retains.rows)
    return CachedPrefix(request.context[: len(ids)], ids, request.client.asker)


def _last_effects(request: Request) -> list[Effect]:
    """Drop the guesses of an answered request, and have the draft source read what it lacks."""
    assert request.tree is not None
    effects: list[Effect] = [SendStages(request.outbox.retains.last(request.tree.newest))]
    if request.drafting.hidden is not None:  # the rest of its rows, which do not come again
        effects.append(request.drafting.last_reading(request.context))
    return effects
