"""Hints: what a stage says of rows on their way, and what the coordinator makes of it."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs
from support.rings import FakeRing, submit
from support.stages import REQUEST, Stage, draft, hidden, opened
from support.wires import Wire

from edgespec.decoding.effects import RunLens, SendRing, TakeLenses
from edgespec.decoding.events import LensDone
from edgespec.decoding.hints import HintingStages
from edgespec.machines.effects import Effect, RunBlock, SendCoordinator, SendStages
from edgespec.machines.events import ComputeFailed, MessageArrived
from edgespec.sim.toy import VOCABULARY
from edgespec.sim.toy_model import FakeBlock, toy_hidden, toy_lenses
from edgespec.tree.draft_tree import DraftTree
from edgespec.types.record import IntArray
from edgespec.types.tensor import Layers, Tensor
from edgespec.wire.hints import Hint
from edgespec.wire.segment import Segment, StageTime

# --- a stage --------------------------------------------------------------------------------------


def asked(seq: int, *triples: tuple[int, int, int], by: tuple[int, ...] = (2,)) -> Segment:
    """Guesses that the stage before computed, and of which these stages shall say something."""
    segment = draft(seq, *triples)
    header = structs.replace(segment.header, hints=Layers(by))
    return structs.replace(segment, header=header, cost=(StageTime(1, 0.1),))


def lens_of(effects: list[Effect]) -> RunLens:
    """The one that is to be run."""
    (lens,) = [effect for effect in effects if isinstance(effect, RunLens)]
    return lens


def hints_of(effects: list[Effect]) -> list[Hint]:
    """What the coordinator is told."""
    messages = [e.message for e in effects if isinstance(e, SendCoordinator)]
    return [message for message in messages if isinstance(message, Hint)]


def lens_done(job: int, rows: int) -> LensDone:
    """Tokens 10, 11 behind the first row, 12, 13 behind the second, …"""
    tokens = 10 + np.arange(2 * rows).reshape(rows, 2)
    return LensDone(job, REQUEST, tokens, np.full((rows, 2), -1.0, np.float32))


def test_the_rows_are_read_once_the_segment_has_left_and_before_the_next_one() -> None:
    stage = opened()
    stage.segment(asked(2, (2, 1, 2), (3, 2, 3)))
    stage.segment(asked(3, (4, 3, 4)))
    effects = stage.done(after=0.5)
    kinds = [type(e) for e in effects if isinstance(e, SendRing | RunLens | RunBlock)]
    assert kinds == [SendRing, RunLens, RunBlock]
    lens = lens_of(effects)
    assert lens.hidden == hidden(102, 103)
    stage.now += 0.25
    (hint,) = hints_of(stage.tell(lens_done(lens.job, 2)))
    assert (hint.request, hint.stage, hint.seconds) == (REQUEST, 2, 0.25)
    assert (hint.ids.tolist(), hint.tokens.tolist()) == ([2, 3], [10, 11, 12, 13])


def test_only_those_that_are_asked_say_something() -> None:
    stage = opened()
    stage.segment(asked(2, (2, 1, 2), by=(1, 3)))
    assert not [e for e in stage.done() if isinstance(e, RunLens)]


def test_nothing_is_said_of_rows_that_were_dropped_meanwhile() -> None:
    stage = opened()
    stage.segment(asked(2, (2, 1, 2), (3, 1, 2)))
    lens = lens_of(stage.done())
    stage.retain(1, 3, (), (3,))
    (hint,) = hints_of(stage.tell(lens_done(lens.job, 2)))
    assert (hint.ids.tolist(), hint.tokens.tolist()) == ([3], [12, 13])
    stage.segment(asked(3, (4, 3, 3)))
    lens = lens_of(stage.done())
    stage.end()
    assert not hints_of(stage.tell(lens_done(lens.job, 1)))


def test_a_lens_that_fails_ends_no_request() -> None:
    stage = opened()
    stage.segment(asked(2, (2, 1, 2)))
    lens = lens_of(stage.done())
    assert stage.tell(ComputeFailed(lens.job, REQUEST, "no lens")) == []
    assert REQUEST in stage.machine.ledgers()


@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_of_a_ring_that_is_over_is_no_news(fails: bool) -> None:
    stage = opened()
    stage.segment(asked(2, (2, 1, 2)))
    lens = lens_of(stage.done())
    stage.machine.reset()
    late = ComputeFailed(lens.job, REQUEST, "") if fails else lens_done(lens.job, 1)
    assert stage.tell(late) == []


def test_lenses_go_to_the_block() -> None:
    lenses = toy_lenses(2, VOCABULARY)
    assert Stage().tell(MessageArrived(b"", lenses)) == [TakeLenses(lenses)]


# --- the whole ring -------------------------------------------------------------------------------


class Knowing(FakeBlock):
    """It knows what comes behind each row of one text, and says it, or another token."""

    def __init__(self, stage: int, text: tuple[int, ...], off: int = 0) -> None:
        super().__init__(stage)
        numbers = toy_hidden(text, stage + 1).tolist()
        self._behind = dict(zip(numbers[:-1], text[1:], strict=True))
        self._off = off
        self.told = 0

    def expect(self, hidden: Tensor) -> tuple[IntArray, npt.NDArray[np.float32]]:
        """One token a row."""
        self.told += 1
        numbers = np.frombuffer(hidden.data, np.uint64).tolist()
        tokens = [(self._behind.get(n, 0) + self._off) % VOCABULARY for n in numbers]
        return np.array(tokens)[:, None], np.full((len(tokens), 1), math.log(0.9), np.float32)


def played(off: int | None, accuracy: float = 0.2) -> tuple[int, int, int]:
    """Trips, and hints, of a text by `adaptive` with a poor draft; and the last stage's mix."""
    ask = submit(max_new_tokens=60, policy="adaptive")
    ring = FakeRing(4, accuracy=accuracy, hints=off is not None)
    right = ring.expected(ask)
    knowing = [Knowing(stage, right.whole, off or 0) for stage in range(4)]
    for node, block in zip(ring.ring.nodes[1:], knowing, strict=True):
        node.compute._block = block  # type: ignore[union-attr]
    ring.blocks = list(knowing)
    answer = ring.ring.ask(ask)
    assert (answer.token_ids, answer.text) == (right.token_ids, right.text)
    ring.assert_nothing_left()
    assert knowing[3].told == 0, "behind the last stage is the head"
    return answer.trips, sum(block.told for block in knowing), answer.rows_sent


def test_good_hints_save_trips() -> None:
    """Of stages that know the text: each token is known two steps of four after its row left."""
    without, none, _ = played(None)
    with_hints, told, _ = played(0)
    assert (none, told > 20) == (0, True)
    assert with_hints < 0.7 * without


@pytest.mark.thorough
def test_hints_that_are_always_wrong_are_soon_hardly_asked_for() -> None:
    """What they say comes to count for nothing, and it is asked for of one segment in 32."""
    without, _, rows = played(None, 0.9)
    misled, told, more = played(1, 0.9)
    assert misled <= 1.2 * without
    assert more <= 2 * rows
    assert told < 200


# --- what a stage may not say ---------------------------------------------------------------------


def hint(**changes: object) -> Hint:
    """Of row 5 of request 1, by stage 1."""
    scores = np.full((1, 2), -1.0, "<f4")
    told = Tensor("float32", (1, 2), scores.tobytes())
    usual = Hint(1, 1, 0.1, np.array([5]), np.array([3, 4]), told)
    return structs.replace(usual, **changes)  # type: ignore[arg-type]


class Flying:
    """A request of `adaptive` whose root is on the ring of three stages."""

    def __init__(self) -> None:
        self.wire = Wire(3, lenses=toy_lenses(3, VOCABULARY), ends=(1, 2, 3))
        self.wire.machine.learnt["adaptive"].segment([(1, 0.1)] * 3, 3)
        self.wire.submit(submit(policy="adaptive"))
        self.wire.back(self.wire.segments.pop())
        self.wire.head(7)
        self.request = self.wire.request
        assert self.wire.segments[-1].header.hints == (1, 2)
        assert self.tree[self.tree.root].sent

    @property
    def tree(self) -> DraftTree:
        assert self.request.tree is not None
        return self.request.tree

    def tell(self, one: Hint) -> dict[int, float]:
        """The guesses below the root, and their scores."""
        self.wire.take(self.wire.machine.handle(MessageArrived(b"", one), 0.0))
        children = self.tree[self.tree.root].children
        return {token: self.tree.score(child) for token, child in children.items()}


def test_tokens_that_are_expected_become_guesses() -> None:
    flying = Flying()
    found = flying.tell(hint(ids=np.array([flying.tree.root])))
    assert set(found) == {3, 4}
    assert tuple(flying.tree.unsent())


def test_a_later_stage_knows_better_and_none_speaks_twice() -> None:
    flying = Flying()
    root = np.array([flying.tree.root])
    first = flying.tell(hint(ids=root))
    assert flying.tell(hint(ids=root, tokens=np.array([8, 9]))) == first, "it has spoken"
    later = flying.tell(hint(ids=root, stage=2, tokens=np.array([3, 9])))
    assert set(later) == {3, 4, 9}
    assert later[4] < first[4]
    assert flying.tell(hint(ids=root)) == later, "an earlier stage, too late"


@pytest.mark.parametrize(
    "strange",
    [
        {"request": 2},
        {"stage": 0},
        {"stage": 3},
        {"stage": 4},
        {"ids": np.array([99])},
        {"tokens": np.array([3, VOCABULARY])},
        {"tokens": np.array([3, 2**62])},
    ],
)
def test_what_no_stage_of_the_ring_can_say_changes_nothing(strange: dict[str, object]) -> None:
    flying = Flying()
    root = {"ids": np.array([flying.tree.root])}
    assert flying.tell(hint(**root | strange)) == {}
    assert flying.tell(hint(**root)), "it may still be told of"


def test_the_tree_stays_small_whatever_is_said() -> None:
    """Of each row every stage is heard once, and unlikely tokens are no guesses."""
    flying = Flying()
    scores = np.full((1, 64), -0.01, "<f4")
    told = Tensor("float32", (1, 64), scores.tobytes())
    for times in range(50):
        for stage in (1, 2):
            for row in flying.tree.ids:
                tokens = (times + np.arange(64)) % VOCABULARY
                flying.tell(hint(ids=np.array([row]), stage=stage, tokens=tokens, log_probs=told))
    assert len(flying.tree) <= 2 + 2 * VOCABULARY


def test_without_lenses_nobody_is_asked_or_heard() -> None:
    wire = Wire(3)
    wire.machine.learnt["adaptive"].segment([(1, 0.1)] * 3, 3)
    wire.submit(submit(policy="adaptive"))
    wire.back(wire.segments.pop())
    wire.head(7)
    assert wire.segments[-1].header.hints == ()
    assert wire.machine.handle(MessageArrived(b"", hint()), 0.0) == []


def test_other_policies_ask_nobody() -> None:
    wire = Wire(3, lenses=toy_lenses(3, VOCABULARY), ends=(1, 2, 3))
    wire.first_token("flowspec")
    assert all(segment.header.hints == () for segment in wire.segments)


def test_a_ring_of_other_layers_asks_other_stages() -> None:
    lenses = toy_lenses(3, VOCABULARY)
    machine = HintingStages(lenses)
    assert machine.ring_up((1, 5, 9)) == [SendStages(lenses)]
    assert machine._stages == (1,)
    assert machine.ring_up((5, 9)) == []
    assert machine._stages == ()
