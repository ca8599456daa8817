"""Shared board: the coordinator's worker and a stage's take turns on one device."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.faults import Crash
from support.segments import run_block
from support.spans import Span, keeping
from support.tiers import tiered
from support.toy_answers import plain_answer
from support.worlds import FixedDurations, submit, toy_world

from edgespec.decoding.effects import Draft, RunHead
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.policy.base import Grow
from edgespec.policy.pace import Pace
from edgespec.sim.clock import Clock
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import ToyCodec
from edgespec.sim.worker import Turns
from edgespec.tree.ledger import Rows
from edgespec.types.draft_pass import DraftPass, DraftWork
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Finished, Tokens

ONE = np.zeros(1, np.int64)
ROWS = Rows(ONE, ONE, ONE, ONE)


def block(job: int) -> RunBlock:
    return run_block(job, 1, ROWS, None, 0, np.ones((1, 1), np.bool_))


def head(job: int) -> RunHead:
    return RunHead(job, 1, Tensor("float32", (1, 1), bytes(4)), ROWS, Sampling())


def draft(job: int) -> Draft:
    return Draft(job, 1, Grow(1, 1, 1), ())


class SharedBoard:
    """The coordinator's worker and a stage's on one device: a head takes a second, a draft four, a
    block four, each of these in four parts."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.turns = Turns()
        self.spans: list[Span] = []
        self.done: list[tuple[float, int, str]] = []
        self.own, self.stage = (
            keeping(self.spans)(
                node,
                self.clock,
                lambda effect, stop: None,
                lambda effect, done: 1.0 if isinstance(effect, RunHead) else 4.0,
                lambda effect: (1.0,) * 4,
                self._done,
                self.turns,
                at_start=node == 0,
            )
            for node in (0, 2)
        )

    def _done(self, node: int, effect: Effect, event: Event | None) -> None:
        self.done.append((self.clock.now, node, type(effect).__name__))

    def run(self) -> None:
        """Everything."""
        while self.clock.step():
            pass

    def never_idle(self) -> bool:
        """Whether one effect followed on the other, and no two ran at once."""
        edges = sorted((span.start, span.end) for span in self.spans)
        return [start for start, _ in edges] == [0.0, *(end for _, end in edges[:-1])]


def test_on_one_board_heads_come_first_then_blocks_then_drafts() -> None:
    board = SharedBoard()
    board.own.add(draft(1))
    board.clock.book(0.5, board.stage.add, block(2))
    board.clock.book(2.5, board.own.add, head(3))
    board.run()
    # The draft runs one part, the block two, the head; then what is left of the two.
    assert board.done == [(4.0, 0, "RunHead"), (6.0, 2, "RunBlock"), (9.0, 0, "Draft")]
    assert board.never_idle()
    assert (board.own.busy, board.stage.busy) == (5.0, 4.0)
    assert board.own.quiet
    assert board.stage.quiet


def test_a_block_that_waits_for_a_head_can_be_stopped() -> None:
    board = SharedBoard()
    board.stage.add(block(2))
    board.clock.book(1.5, board.own.add, head(3))
    board.clock.book(2.5, board.stage.abort, 2)
    board.run()
    assert board.done == [(3.0, 0, "RunHead"), (3.0, 2, "RunBlock")]
    assert board.never_idle()
    assert board.spans[-1].stopped


def test_a_stage_that_vanishes_leaves_its_board_to_the_coordinator() -> None:
    board = SharedBoard()
    board.stage.add(block(2))
    board.own.add(draft(1))
    board.clock.book(1.0, board.stage.vanish)
    board.run()
    assert board.done == [(5.0, 0, "Draft")]
    assert board.stage.busy == 1.0


# Times in these tests are binary fractions, so that sums are exact.


@pytest.mark.parametrize("with_stage", [0, 1, 2])
def test_one_row_at_a_time_does_not_notice(with_stage: int) -> None:
    """Plain decoding has one effect on the whole ring at a time."""
    world = toy_world(FixedDurations((0.25, 0.5), head=0.125), with_stage=with_stage)
    world.submit(submit(limit=3))
    world.run()
    times = [one.at for one in world.replies if isinstance(one.message, Tokens)]
    assert times == [0.875, 1.75, 2.625]
    assert world.busy_seconds == [3 * 0.125, 3 * 0.25, 3 * 0.5]


def test_a_prompt_waits_for_nothing_but_its_turn() -> None:
    """Two chunks: the head of D0 cannot run before the last stage, on its board, is done."""
    for with_stage, first in ((0, 1.375), (2, 1.375)):
        durations = FixedDurations((0.25, 0.5), head=0.125)
        world = toy_world(durations, prefill_chunk=2, with_stage=with_stage)
        world.submit(submit(prompt="abcd", limit=1))
        world.run()
        times = [one.at for one in world.replies if isinstance(one.message, Tokens)]
        assert times == [first]


@pytest.mark.parametrize("lost", [1, 2])
def test_the_ring_recovers_from_the_loss_of_either_stage(lost: int) -> None:
    faults = [Crash(at=1.0, stage=lost, noticed_after=0.5, restart_after=0.5)]
    world = toy_world(FixedDurations((0.25, 0.5), head=0.125), faults=faults, with_stage=2)
    world.submit(submit(limit=4))
    world.run()
    (end,) = [one.message for one in world.replies if isinstance(one.message, Finished)]
    assert end.token_ids == plain_answer(ToyCodec(), submit(limit=4), 2, 2000).token_ids


class _LongPasses(FixedDurations):
    """A pass of the draft takes twice as long as a block, and a little more with more rows."""

    def coordinator(self, effect: Effect, done: Event | None, work: tuple[DraftWork, ...]) -> float:
        """The head's time, or the passes'."""
        if isinstance(effect, RunHead):
            return self.head
        return sum(0.5 + one.rows / 128 for one in work if isinstance(one, DraftPass))


class _Pass(FixedDurations):
    """A pass of the draft takes a sixteenth of a second, a block a little more for more rows."""

    def coordinator(self, effect: Effect, done: Event | None, work: tuple[DraftWork, ...]) -> float:
        """The head's time, or the passes'."""
        passes = sum(isinstance(one, DraftPass) for one in work)
        return self.head if isinstance(effect, RunHead) else passes / 16

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        """A further row costs a hundredth."""
        rows = len(effect.rows) if isinstance(effect, RunBlock) else 0
        return super().stage(number, effect, done) * (0.99 + rows / 100)


@pytest.mark.parametrize("accuracy", tiered([0.1, 0.4], [0.4]))
def test_where_guesses_take_the_stage_s_time_plain_decoding_is_kept(
    accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What steps and passes take does not tell it, as long as the coordinator does not know whose
    device it is on: what tokens take does."""
    ask, codec = submit(limit=400, policy="adaptive"), ToyCodec()
    plain = plain_answer(codec, ask, 2, 2000).token_ids

    def seconds(told: bool) -> float:
        oracle = Oracle(random.Random(1), accuracy)
        oracle.tell([*codec.encode(ask.prompt), *plain])
        world = toy_world(
            _LongPasses((0.25, 0.25), head=0.0625), draft=oracle, with_stage=1, told=told
        )
        world.submit(ask)
        world.run()
        (end,) = [one.message for one in world.replies if isinstance(one.message, Finished)]
        assert end.token_ids == plain
        return world.replies[-1].at

    with_pace, alone = seconds(told=False), 400 * 0.5625
    assert with_pace < 1.12 * alone
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    assert seconds(told=False) > 1.3 * alone
    assert seconds(told=True) < 1.02 * alone


@pytest.mark.parametrize(
    ("stages", "accuracy", "least"), [((0.5,), 0.67, 1.6), ((0.25, 0.25), 0.9, 1.95)]
)
def test_drafts_get_their_turn_beside_the_last_stage(
    stages: tuple[float, ...], accuracy: float, least: float
) -> None:
    """Though blocks go first, and one follows on the other where nothing waits for a guess."""
    ask, codec = submit(limit=60, policy="adaptive"), ToyCodec()
    plain = plain_answer(codec, ask, len(stages), 2000).token_ids
    oracle = Oracle(random.Random(1), accuracy)
    oracle.tell([*codec.encode(ask.prompt), *plain])
    world = toy_world(_Pass(stages, head=0.0625), draft=oracle, with_stage=len(stages))
    world.submit(ask)
    world.run()
    (end,) = [one.message for one in world.replies if isinstance(one.message, Finished)]
    assert end.token_ids == plain
    assert world.replies[-1].at < 60 * 0.5625 / least
