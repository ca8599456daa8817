"""A ring whose stage does not come back: the devices that are left get other places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs
from support.memberships import HOME, Membership, address, asks, goes_up, to, why_down

from edgespec.config import Timing
from edgespec.ring.effects import Log
from edgespec.ring.events import RingReached
from edgespec.ring.membership import MembershipMachine
from edgespec.wire.messages import Assign, Join, Ready, StandBy

RECOVERY = 20.0
TIMING = Timing(beat=1.0, silence=4.0, client_silence=10.0, recovery=RECOVERY)


class Shrinking(Membership):
    """A ring that shares six layers out anew over those who have memory."""

    def __init__(self, stages: int, timing: Timing = TIMING, most: int = 6) -> None:
        super().__init__(stages)
        self.asked: list[tuple[str, ...]] = []
        self.most = most
        self.machine = MembershipMachine(self.places, HOME, timing, replan=self._anew)

    def _anew(self, joins: Sequence[Join]) -> list[Assign] | None:
        self.asked.append(tuple(join.name for join in joins))
        if len(joins) * self.most < 6:
            return None
        used = joins[:2]  # two are always enough, or one
        share = 6 // len(used)
        return [
            structs.replace(
                self.places[0], stage=n, stages=len(used), first=(n - 1) * share, end=n * share
            )
            for n in range(1, len(used) + 1)
        ]

    def lose(self, stage: int) -> None:
        """It is silent for so long that it is lost."""
        while address(stage) in self.machine.stage_peers:
            self.all_beat(stage)
            self.tick()

    def wait(self, seconds: float) -> list[object]:
        """Everybody who is left beats for so long; what was done meanwhile."""
        done: list[object] = []
        until = self.now + seconds
        while self.now < until:
            for place in self.places:
                if address(place.stage) in self.machine.stage_peers:
                    self.beat(place.stage)
            done += self.tick()
        return done

    def beat(self, stage: int) -> None:
        """One stage shows that it lives."""
        self.all_beat(*({1, 2, 3, 4} - {stage}))


def test_nothing_is_shared_out_before_half_of_what_requests_wait() -> None:
    ring = Shrinking(3)
    ring.bring_up()
    ring.lose(2)
    ring.wait(RECOVERY / 2 - 2)
    assert ring.asked == []
    effects = ring.wait(3)
    assert ring.asked == [("board1", "board3")]
    assert Log("the model is shared out anew, over 2 device(s)") in effects
    (why,) = why_down(effects)
    assert why.startswith("stage 2 (board2, process 72) has been silent for "), "who waits reads it"
    assert why.endswith("s; the model is shared out anew, over 2 device(s)")


def test_those_who_are_left_get_places_of_a_new_ring_and_bring_it_up() -> None:
    ring = Shrinking(3)
    ring.bring_up()
    ring.lose(1)
    effects = ring.wait(RECOVERY / 2 + 1)
    before = ring.number(address(2)) - 1
    *_, second = (m for m in to(effects, address(2)) if isinstance(m, Assign))
    *_, third = (m for m in to(effects, address(3)) if isinstance(m, Assign))
    assert (second.stage, second.stages, second.first, second.end) == (1, 2, 0, 3)
    assert (third.stage, third.stages, third.first, third.end) == (2, 2, 3, 6)
    assert second.ring == third.ring == 3, "one was lost with the stage, one with the sharing out"
    assert second.ring_key == third.ring_key
    assert ring.say(address(2), Ready(1.0, before)) == [], "that is of the ring before"
    ring.ready(address(2))
    ring.ready(address(3))
    ring.machine.handle(RingReached(), ring.now)
    ring.connected(address(2))
    assert goes_up(ring.connected(address(3)))
    assert ring.machine.status().stages == 2


def test_who_is_not_needed_stands_by_and_who_comes_back_too() -> None:
    ring = Shrinking(4)
    ring.bring_up()
    ring.lose(2)
    effects = ring.wait(RECOVERY / 2 + 1)
    assert [type(m) for m in to(effects, address(4)) if isinstance(m, StandBy)] == [StandBy]
    (told,) = to(ring.say(b"back", asks(4, pid=99, port=7777)), b"back")
    assert isinstance(told, StandBy), "its number is none of this ring's"


def test_without_memory_for_it_the_place_stays_empty_and_it_is_tried_again() -> None:
    ring = Shrinking(2, most=5)
    ring.bring_up()
    ring.lose(2)
    effects = ring.wait(RECOVERY + 3)
    assert Log("the devices that are left have no memory for the whole model") in effects
    assert ring.asked == [("board1",)] * 2
    (assign,) = to(ring.join(2), address(2))
    assert isinstance(assign, Assign)
    assert (assign.stage, assign.first, assign.end) == (2, 1, 2)
    ring.wait(RECOVERY)
    assert len(ring.asked) == 2, "nobody is missing any more"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_comes_back_in_time_keeps_its_place(stage: int) -> None:
    ring = Shrinking(3)
    ring.bring_up()
    ring.lose(stage)
    ring.wait(RECOVERY / 4)
    ring.join(stage)
    ring.wait(RECOVERY)
    assert ring.asked == []


def test_a_ring_that_was_never_up_waits_for_all_its_devices() -> None:
    ring = Shrinking(3)
    for stage in (1, 2):
        ring.join(stage)
    ring.wait(3 * RECOVERY)
    assert ring.asked == []


def test_with_no_recovery_nothing_is_shared_out() -> None:
    ring = Shrinking(2, timing=replace(TIMING, recovery=0.0))
    ring.bring_up()
    ring.lose(2)
    ring.wait(60.0)
    assert ring.asked == []
