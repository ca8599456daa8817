"""Checks: every invariant catches a planted bug, by its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import support.invariants
from msgspec import structs
from support.campaign import Parts, play
from support.faults import Lose
from support.growers import SoloOracle
from support.invariants import InvariantViolated
from support.scenario import Scenario, draw
from support.worlds import CALM, CALM_ASK

from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import GatherRows, SendRing
from edgespec.decoding.events import SegmentArrived
from edgespec.decoding.stage import StageMachine
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import Effect, RunBlock, SendPeer
from edgespec.machines.events import BlockDone, Event, MessageArrived
from edgespec.sim.toy_model import FakeBlock
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Failed, Finished, Tokens
from edgespec.wire.messages import CloseRequest, Retain

# --- coordinators -------------------------------------------------------------------------------


def retelling(change: Callable[[Any], list[Any]]) -> type[CoordinatorMachine]:
    """A coordinator whose replies are changed: each becomes the messages that `change` gives."""

    class Retelling(CoordinatorMachine):
        def handle(self, event: Event, now: float) -> list[Effect]:
            effects: list[Effect] = []
            for effect in super().handle(event, now):
                if isinstance(effect, SendPeer):
                    effects += [SendPeer(effect.peer, m) for m in change(effect.message)]
                else:
                    effects.append(effect)
            return effects

    return Retelling


def of(kind: type, change: Callable[[Any], list[Any]]) -> type[CoordinatorMachine]:
    return retelling(lambda message: change(message) if isinstance(message, kind) else [message])


class Miscounts(CoordinatorMachine):
    """Forgets now and then that a segment is back."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, SegmentArrived) and event.segment.header.seq == 4:
            request = self.accepts(event.segment.request)
            if request is not None:
                request.outbox.in_flight += 1
        return effects


class Remembers(CoordinatorMachine):
    """Keeps something of every request for ever."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory: list[Event] = []

    def handle(self, event: Event, now: float) -> list[Effect]:
        self.memory.append(event)
        return super().handle(event, now)


# --- stages -------------------------------------------------------------------------------------


class DropsLiveRows(StageMachine):
    """Drops the newest row when its segment has been sent on, from the cache too."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        if isinstance(event, BlockDone) and self._is_last:
            for request, ledger in self.ledgers().items():
                left = ledger.speculative[:-1]
                if len(left) < len(ledger.speculative):
                    ledger._ids = [*left]
                    effects.append(GatherRows(request, ledger.committed, np.arange(len(left))))
        return effects


class Stage(StageMachine):
    """A stage that can be told of another retained set than it was sent; only stage 3 is bad."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if (
            isinstance(event, MessageArrived)
            and isinstance(event.message, Retain)
            and self._is_last
        ):
            changed = self.changed(event.message)
            return [] if changed is None else super().handle(MessageArrived(b"", changed), now)
        return super().handle(event, now)

    def changed(self, retain: Retain) -> Retain | None:
        raise NotImplementedError


class KeepsDeadRows(Stage):
    def changed(self, retain: Retain) -> Retain | None:
        rows = self.ledgers()[retain.request].speculative if self.ledgers() else ()
        if sum(i in rows for i in retain.keep.accepted) != 1:
            return retain
        kept = retain.keep.retained.union(rows).difference(retain.keep.accepted)
        return structs.replace(retain, keep=structs.replace(retain.keep, retained=kept))


class SkipsSets(Stage):
    def changed(self, retain: Retain) -> Retain | None:
        return retain if retain.keep.epoch % 2 else None


class KeepsGuesses(Stage):
    """Does not drop them when an answered request's rows are kept."""

    def changed(self, retain: Retain) -> Retain | None:
        return retain if retain.keep.retained else None


class SharesNothing(StageMachine):
    """Copies what requests begin with; only the last stage is bad."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, SegmentArrived) and self._is_last:
            parts = tuple(structs.replace(part, fork_shared=0) for part in event.segment.parts)
            event = SegmentArrived(structs.replace(event.segment, parts=parts))
        return super().handle(event, now)


class KeepsEndedRequests(StageMachine):
    def handle(self, event: Event, now: float) -> list[Effect]:
        if isinstance(event, MessageArrived) and isinstance(event.message, CloseRequest):
            return []
        return super().handle(event, now)


class SwallowsHeaders(StageMachine):
    """Sends no segment on that has no rows left."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        return [e for e in effects if not isinstance(e, SendRing) or len(e.segment.parts[0].ids)]


class MistakesRows(StageMachine):
    """Believes of another row that it is the last committed one."""

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects = super().handle(event, now)
        is_retain = isinstance(event, MessageArrived) and isinstance(event.message, Retain)
        if self._is_last and is_retain:
            for ledger in self.ledgers().values():
                ledger.last_committed += 1000
        return effects


# --- computes -----------------------------------------------------------------------------------


class SeesTooMuch(FakeBlock):
    def run(self, job: RunBlock, stop: Callable[[], bool]) -> Any:
        part = job.parts[0]
        sees = part.sees.copy()
        sees[:, -1] = True
        return super().run(replace(job, parts=(replace(part, sees=sees),)), stop)


class GathersNothing(FakeBlock):
    def gather(self, request: int, start: int, order: Any) -> None:
        pass


class NeverCloses(FakeBlock):
    def close(self, request: int) -> None:
        pass


class NeverForgets(SoloOracle):
    def close(self, request: int) -> None:
        pass


def cut(message: Finished) -> list[Finished]:
    return [structs.replace(message, text=message.text[1:])]


BUGS: dict[str, tuple[str, Parts]] = {
    "a token is streamed twice": (
        "plain answer",
        Parts(coordinator=of(Tokens, lambda m: [m, m])),
    ),
    "a token is another one": (
        "plain answer",
        Parts(
            coordinator=of(
                Tokens, lambda m: [structs.replace(m, token_ids=(39,) * len(m.token_ids))]
            )
        ),
    ),
    "text is another one": (
        "plain answer",
        Parts(coordinator=of(Tokens, lambda m: [structs.replace(m, text=m.text + "?")])),
    ),
    "news of nothing": (
        "plain answer",
        Parts(coordinator=of(Tokens, lambda m: [structs.replace(m, token_ids=()), m])),
    ),
    "an end comes twice": ("one end", Parts(coordinator=of(Finished, lambda m: [m, m]))),
    "an end never comes": ("one end", Parts(coordinator=of(Finished, lambda m: []))),
    "news behind the end": (
        "one end",
        Parts(coordinator=of(Finished, lambda m: [m, Tokens(m.tag, (1,), "a")])),
    ),
    "an end of nobody": (
        "one end",
        Parts(coordinator=of(Finished, lambda m: [structs.replace(m, tag=5)])),
    ),
    "the end is another one": ("the end repeats the stream", Parts(coordinator=of(Finished, cut))),
    "the end comes too early": (
        "plain answer",
        Parts(coordinator=of(Finished, lambda m: [structs.replace(m, finish_reason="stop")])),
    ),
    "it was not cancelled": (
        "plain answer",
        Parts(coordinator=of(Finished, lambda m: [structs.replace(m, finish_reason="cancelled")])),
    ),
    "it fails without a reason": (
        "plain answer",
        Parts(coordinator=of(Finished, lambda m: [Failed(m.tag, "I feel like it")])),
    ),
    "figures do not add up": (
        "figures add up",
        Parts(
            coordinator=of(Finished, lambda m: [structs.replace(m, rows_wasted=m.rows_wasted + 1)])
        ),
    ),
    "a credit is lost": ("credits", Parts(coordinator=Miscounts)),
    "the coordinator remembers": ("nothing left", Parts(coordinator=Remembers)),
    "a live row is dropped": ("ledgers agree", Parts(stage=DropsLiveRows)),
    "a dead row is kept": ("ledgers agree", Parts(stage=KeepsDeadRows)),
    "a retained set is skipped": ("ledgers agree", Parts(stage=SkipsSets)),
    "guesses of an answered request are kept": ("nothing left", Parts(stage=KeepsGuesses)),
    "rows are copied that are to be shared": (
        "stages share what the coordinator counts",
        Parts(stage=SharesNothing),
    ),
    "an ended request is kept": ("nothing left", Parts(stage=KeepsEndedRequests)),
    "an empty segment stays": ("plain answer", Parts(stage=SwallowsHeaders)),
    "a row is mistaken for another": (
        "equally long committed regions end in the same row",
        Parts(stage=MistakesRows),
    ),
    "a row sees another branch": ("plain answer", Parts(block=SeesTooMuch)),
    "a cache is not gathered": ("caches hold what the ledgers say", Parts(block=GathersNothing)),
    "a cache is not closed": ("caches hold what the ledgers say", Parts(block=NeverCloses)),
    "a draft is not closed": ("nothing left", Parts(draft=NeverForgets)),
}


PLAIN = structs.replace(
    CALM, asks=(structs.replace(CALM_ASK, policy="autoregressive", settings=()),)
)
ROUNDS = structs.replace(
    CALM,
    accuracy=0.0,
    asks=(structs.replace(CALM_ASK, policy="naive_tree", settings=CALM_ASK.settings[:3]),),
)
SHARING = structs.replace(draw(4), faults=())
SCENARIOS = {
    "a live row is dropped": PLAIN,
    "a dead row is kept": ROUNDS,
    "guesses of an answered request are kept": SHARING,
    "rows are copied that are to be shared": SHARING,
}
"""In which a bug is seen at once, before it does more harm; the others are seen in CALM."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    invariant, parts = BUGS[bug]
    with pytest.raises(InvariantViolated) as caught:
        play(SCENARIOS.get(bug, CALM), parts=parts)
    assert caught.value.invariant == invariant
    assert str(caught.value).startswith(f"{invariant}: ")


@pytest.mark.parametrize("scenario", [CALM, PLAIN, ROUNDS, SHARING])
def test_without_a_bug_nothing_is_found(scenario: Scenario) -> None:
    play(scenario)


def test_a_run_without_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.invariants, "PLENTY", 20)
    with pytest.raises(InvariantViolated, match="progress"):
        play(CALM)


def test_a_live_row_is_missed_on_a_stage_that_gets_no_retained_set() -> None:
    class DropsOne(StageMachine):
        """Loses the newest row of a request once its segment has been sent on."""

        def handle(self, event: Event, now: float) -> list[Effect]:
            effects = super().handle(event, now)
            if any(isinstance(e, SendRing) and len(e.segment.parts[0].ids) for e in effects):
                for ledger in self.ledgers().values():
                    ledger._ids = ledger._ids[:-1]
            return effects

    calm = structs.replace(CALM, faults=(Lose("retain", 1.0),))
    play(calm)
    with pytest.raises(InvariantViolated):
        play(calm, parts=Parts(stage=DropsOne))


def test_a_draft_with_a_wrong_context_is_found() -> None:
    class Deceived(SoloOracle):
        def refreshing(self, request: int, context: Any, *more: Any) -> Any:
            return super().refreshing(request, [*context[:-1], 39], *more)

    with pytest.raises(InvariantViolated, match="is no committed text"):
        play(CALM, parts=Parts(draft=Deceived))


def test_a_draft_is_checked_for_being_open_and_for_growing_contexts() -> None:
    oracle = SoloOracle(random.Random(0), 1.0)
    oracle.tell((1, 2, 3, 4))
    with pytest.raises(LocalProtocolError, match="not open"):
        oracle.refresh(1, (1, 2), 1, 1)
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0)
    oracle.open(1, sampling)
    with pytest.raises(LocalProtocolError, match="open on the draft already"):
        oracle.open(1, sampling)
    oracle.refresh(1, (1, 2), 1, 1)
    with pytest.raises(LocalProtocolError, match="did not only grow"):
        oracle.expand(1, (1,), [()], 1)


def test_a_request_that_fits_no_context_must_fail() -> None:
    ask = structs.replace(CALM_ASK, prompt="abcdefghijabcdefgh")
    play(structs.replace(CALM, context_length=16, asks=(ask,)))
