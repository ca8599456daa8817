"""Who stood still does not judge: a process that was stopped gives nobody up for that."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from support.memory_rings import BEAT_S, TIMING, MemoryRing
from support.rings import submit

from edgespec.runtime import own_time
from edgespec.runtime.own_time import SLACK_S, OwnTime
from edgespec.wire.client_messages import Finished

STALL_S = 8.0


class Clock:
    """A machine's clock that a test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 50.0
        monkeypatch.setattr(own_time, "time", SimpleNamespace(monotonic=lambda: self.now))


def test_a_loop_s_time_goes_on_as_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    own = OwnTime()
    for _ in range(20):
        clock.now += 0.5
        assert own.turned(0.5) == own.now() == clock.now


def test_a_turn_that_lasts_for_longer_than_meant_counts_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    own = OwnTime()
    clock.now += STALL_S
    assert own.turned(0.5) == pytest.approx(50.0 + 0.5 + SLACK_S)
    clock.now += 0.5
    assert own.turned(0.5) == pytest.approx(50.0 + 1.0 + SLACK_S)
    assert own.stood_still == pytest.approx(STALL_S - 0.5 - SLACK_S)


def test_what_another_thread_ended_meanwhile_ended_after_it_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lasted for less than no time once, and the ring began anew for that."""
    clock = Clock(monkeypatch)
    own = OwnTime()
    clock.now += 0.5
    began = own.turned(0.5)
    clock.now += STALL_S
    now = own.turned(0.5)
    ended = [own.of(began + after) for after in (0.001, 0.5, 1.0, STALL_S, STALL_S + 0.1)]
    assert ended[0] == pytest.approx(began + 0.001)
    assert ended == sorted(ended)
    assert ended[2] == ended[3] == now
    assert ended[4] == pytest.approx(now + 0.1)


def test_a_block_that_a_loop_slept_over_renews_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = MemoryRing(monkeypatch, 2)
    ring.until(lambda: ring.membership.status().ready, 100)
    asked = submit(max_new_tokens=30)
    ring.ask(asked)
    before = ring.membership.status().ring
    for _ in range(400):
        ring.round()
        ring.now += STALL_S  # nothing but the blocks went on
        if ring.ends(asked.tag):
            break
    (end,) = ring.ends(asked.tag)
    assert isinstance(end, Finished)
    assert end.text == ring.expected(asked).text
    assert (end.recoveries, ring.membership.status().ring) == (0, before)
    ring.close()


def test_a_ring_of_which_all_stood_still_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop's lid, a paused machine: 8 s in which nobody said anything."""
    ring = MemoryRing(monkeypatch, 3)
    ring.until(lambda: ring.membership.status().ready, 100)
    asked = submit(max_new_tokens=30)
    ring.ask(asked)
    for _ in range(5):
        ring.round()
    before = ring.membership.status().ring
    assert not ring.ends(asked.tag)
    ring.now += STALL_S
    assert 4 * TIMING.silence < STALL_S
    assert ring.until(lambda: bool(ring.ends(asked.tag)), 400)
    (end,) = ring.ends(asked.tag)
    assert isinstance(end, Finished)
    assert end.text == ring.expected(asked).text
    assert end.recoveries == 0
    assert ring.membership.status().ring == before, "none was given up"
    ring.close()


def test_who_is_silent_while_the_others_run_is_given_up_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ring = MemoryRing(monkeypatch, 2)
    ring.until(lambda: ring.membership.status().ready, 100)
    silent = ring.nodes.pop()
    began = ring.now
    assert ring.until(lambda: not ring.membership.status().ready, 400)
    assert TIMING.silence < ring.now - began < 2 * TIMING.silence + 2 * BEAT_S
    ring.nodes.append(silent)
    ring.close()


def test_time_that_is_told_is_the_machine_s() -> None:
    assert OwnTime().now() <= time.monotonic()
