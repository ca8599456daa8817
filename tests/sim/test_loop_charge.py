"""What the coordinator's own loop is charged: in virtual time, and on an emulated node."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from support.toy_answers import plain_answer
from support.worlds import FixedDurations, submit, toy_world

from edgespec.backends.charged_time import LoopTime
from edgespec.backends.timed import CoordinatorDurations
from edgespec.daemon.profiles import profile_named
from edgespec.decoding.effects import Draft
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event, MessageArrived, Tick
from edgespec.net.emulated_link import Stamped
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import NodeCosts
from edgespec.planning.profile import LoopSeconds
from edgespec.policy.base import Expand
from edgespec.runtime.node import RingNode
from edgespec.sim.oracle import Oracle
from edgespec.sim.toy import ToyCodec
from edgespec.types.draft_pass import DraftPass
from edgespec.wire.client_messages import Finished, Tokens
from edgespec.wire.messages import Credit

# Binary fractions, so that sums are exact.
EVENT, ROW = 1 / 64, 1 / 1024
COSTS = LoopSeconds(EVENT, ROW, "a test")


def times(
    policy: str, loop: LoopTime | None, stages: tuple[float, ...] = (0.5, 0.25)
) -> list[float]:
    """When an answer's tokens came, of a ring on which heads take 1/8 s."""
    ask, codec = submit(limit=8, policy=policy), ToyCodec()
    plain = plain_answer(codec, ask, len(stages), 2000).token_ids
    oracle = Oracle(random.Random(1), 0.7)
    oracle.tell([*codec.encode(ask.prompt), *plain])
    durations = FixedDurations(stages, head=0.125, draft_row=1 / 256, loop=loop)
    world = toy_world(durations, draft=oracle)
    world.submit(ask)
    world.run()
    (end,) = [one.message for one in world.replies if isinstance(one.message, Finished)]
    assert end.token_ids == plain
    assert world.loop_seconds == (loop.busy if loop else None)
    return [one.at for one in world.replies if isinstance(one.message, Tokens)]


def test_a_plain_token_is_later_by_the_loop_s_share_of_its_trip() -> None:
    """The row comes home; its token is known, and the next row leaves. V1 hands a row on while V2
    computes: that event keeps nobody waiting."""
    free, charged = times("autoregressive", None), times("autoregressive", LoopTime(COSTS))
    late = [with_loop - without for with_loop, without in zip(charged, free, strict=True)]
    sent, trip = 2 * EVENT + ROW, 2 * (EVENT + ROW)
    assert late[:-1] == [sent + number * trip for number in range(7)]
    assert late[-1] == late[-2] + trip - ROW  # nothing leaves behind the last one


def test_a_tree_s_rows_are_charged_too_and_no_loop_costs_nothing() -> None:
    free = times("flowspec", None)
    assert times("flowspec", LoopTime(LoopSeconds(0, 0, "a test"))) == free
    by_row, both = LoopTime(LoopSeconds(0, ROW, "a test")), LoopTime(COSTS)
    assert free[-1] < times("flowspec", by_row)[-1] < times("flowspec", both)[-1]
    assert by_row.busy > 50 * ROW


def test_of_events_that_come_together_one_waits_for_the_other() -> None:
    """On a ring of one stage the credit comes with the row."""
    free = times("autoregressive", None, (0.5,))
    charged = times("autoregressive", LoopTime(COSTS), (0.5,))
    late = [with_loop - without for with_loop, without in zip(charged, free, strict=True)]
    assert late[2] - late[1] == late[3] - late[2] == 3 * EVENT + 2 * ROW


def test_what_the_loop_takes_beside_a_job_the_next_one_takes_longer() -> None:
    """As far as that one is Python: here a draft whose layers the host launches one by one."""
    profile = profile_named("jetson-orin-nano-8gb")
    costs, loop = NodeCosts(profile, cost_model_named("llama-2-13b"), 0), LoopTime(COSTS)
    draft = Draft(1, 1, Expand((0,), 1, 1), (1, 2))
    work = (DraftPass(1, ""),)
    alone = CoordinatorDurations(costs).seconds(draft, None, work)
    durations = CoordinatorDurations(costs, loop=loop)
    credit = MessageArrived(b"", Credit(1))
    assert loop.ends(credit, [], 1.0, beside=False) == 1.0 + EVENT
    assert durations.seconds(draft, None, work) == alone
    assert loop.ends(Tick(), [], 2.0, beside=True) == 2.0, "it does not come with every token"
    host = costs.launch_seconds(costs.model.draft.layers)
    assert EVENT > host > 0
    assert loop.starts(1.0) == loop.ends(credit, [], 1.0, beside=True) == 1.0 + EVENT
    assert durations.seconds(draft, None, work) == pytest.approx(alone + host)
    assert sum(durations.parts(draft)) == pytest.approx(alone + host)
    assert durations.seconds(draft, None, work) == alone, "once"


class _Sockets:
    """Gives what is due, and sends nothing."""

    ring_key = ring_fault = ""
    ring_broke = ring_awaited = None
    ring_reached = control_ended = False

    def __init__(self, due: list[Stamped]) -> None:
        self.due = due

    def poll(self, timeout: float) -> list[Stamped]:
        due, self.due = self.due, []
        return due


class _Node(RingNode):
    """Notes when what comes of an event leaves."""

    def __init__(self, due: list[Stamped]) -> None:
        super().__init__(cast(Any, _Sockets(due)), lambda effect, stop: None)
        self.left: list[float] = []
        self.told: list[float] = []

    def route(self, event: Event, now: float) -> list[Effect]:
        self.told.append(now)
        return [Effect()]

    def to_ring(self, event: Event, now: float) -> list[Effect]:
        return []

    def deadline(self) -> float | None:
        return 0.0  # a Tick in every turn

    def carry_out(self, effect: Effect, now: float) -> None:
        self.left.append(self.happened_at)

    def not_carried_out(self, effect: Effect) -> list[Effect]:
        return []

    def farewell(self, reason: str, now: float) -> None:
        """Nobody is there."""


def test_an_emulated_node_takes_up_one_event_after_the_other() -> None:
    start = 1.0
    due = [Stamped(False, b"v1", Credit(number), at=start) for number in range(2)]
    due.append(Stamped(False, b"v1", Credit(2), at=start + 1))
    node = _Node(due)
    node.charge_loop(LoopTime(COSTS), lambda: False)
    node.step()
    node.worker.stop()
    assert node.told[:3] == [start, start + EVENT, start + 1]
    assert node.left[:3] == [start + EVENT, start + 2 * EVENT, start + 1 + EVENT]
    assert node.told[3] == node.left[3] > start + 2, "a Tick is free"
