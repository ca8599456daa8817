"""Membership when a stage is gone: who takes its place, and what the old one becomes."""

from __future__ import annotations

from support.memberships import TIMING, Membership, address, asks, goes_up, to, why_down

from edgespec.machines.effects import Effect, Forward, SendPeer
from edgespec.machines.events import RingProgress
from edgespec.ring.events import RingReached
from edgespec.wire.messages import (
    NO_RING,
    Assign,
    Goodbye,
    Heartbeat,
    Loading,
    Ready,
    StandBy,
)

# --- coming back ----------------------------------------------------------------------------------


def test_a_new_daemon_takes_the_place_of_one_that_is_silent() -> None:
    ring = Membership(2)
    ring.bring_up()
    ring.now += TIMING.beat * 2.5
    ring.say(address(1), Heartbeat())
    effects = ring.say(b"new", asks(2, pid=99, port=9))
    assert why_down(effects) == [
        "stage 2 (board2, process 72) was replaced by process 99 on board2"
    ]
    assert to(effects, b"new") == [ring.place(2, 2)]
    assert ring.machine.stage_at(address(2)) is None


def test_a_new_daemon_that_comes_at_once_is_not_refused_but_waits_for_a_beat() -> None:
    ring = Membership(1)
    ring.bring_up()
    new = asks(1, pid=99, port=9)
    assert ring.say(b"new", new) == []
    ring.now += TIMING.beat * 1.5
    assert ring.say(b"new", new) == []
    ring.now += TIMING.beat
    assert to(ring.say(b"new", new), b"new") == [ring.place(1, 2)]


def test_a_daemon_whose_connection_was_made_anew_has_its_place_again() -> None:
    ring = Membership(2)
    ring.bring_up()
    assert ring.say(b"anew", asks(2)) == [], "anybody could say so while it is heard"
    ring.now += TIMING.beat * 2.5
    effects = ring.say(b"anew", asks(2))
    assert why_down(effects) == ["stage 2 (board2, process 72) lost its connection"]
    assert to(effects, b"anew") == [ring.place(2, 2)]


# --- spares ---------------------------------------------------------------------------------------


def test_who_wants_any_place_gets_the_first_that_is_free() -> None:
    ring = Membership(2)
    ring.join(1)
    assert to(ring.say(b"any", asks(0)), b"any") == [ring.place(2, 1)]


def test_a_spare_makes_room_for_a_stage_that_wants_the_place_by_its_number() -> None:
    """Nobody was lost yet: the order of starting shall not decide who runs what."""
    ring = Membership(2)
    ring.say(b"any", asks(0))
    effects = ring.join(1)
    assert to(effects, address(1)) == [ring.place(1, 1)]
    assert to(effects, b"any") == [ring.place(2, 1)]
    effects = ring.join(2)
    assert to(effects, address(2)) == [ring.place(2, 1)]
    assert to(effects, b"any") == [StandBy("standing by as a spare")]


def with_spare() -> Membership:
    """A ring of two that is up, with a spare."""
    ring = Membership(2)
    ring.bring_up()
    assert to(ring.say(b"spare", asks(0)), b"spare") == [StandBy("standing by as a spare")]
    return ring


def test_a_spare_takes_a_lost_place_at_once_and_the_old_stage_stands_by() -> None:
    ring = with_spare()
    assert ring.machine.status().lines[-1] == "spare: board0 standing by"
    assert ring.machine.stage_peers == [address(1), address(2)]
    assert ring.machine.daemon_peers[-1] == b"spare"
    effects = ring.say(address(2), Goodbye("stopped"))
    assert to(effects, b"spare") == [ring.place(2, 2)]
    ring.ready(b"spare")
    ring.ready(address(1))
    ring.machine.handle(RingReached(), ring.now)
    ring.connected(b"spare")
    assert goes_up(ring.connected(address(1)))
    (told,) = to(ring.join(2), address(2))
    assert isinstance(told, StandBy)
    assert "stage 2 was given to another" in told.text
    assert to(ring.join(2), address(2))[0] == told, "it asked twice"
    assert ring.machine.status().ready


def test_a_spare_prepares_for_one_place_after_the_other() -> None:
    ring = with_spare()
    first = ring.tick()
    assert prepares(first, b"spare") == [1]
    assert prepares(ring.tick(), b"spare") == [], "it was told"
    ring.say(b"spare", Loading("receiving the block: 34 %"))
    line = "spare: board0 standing by; receiving the block: 34 %"
    assert ring.machine.status().lines[-1] == line
    prepared(ring, first, b"spare")
    ring.say(b"spare", Heartbeat())
    assert ring.machine.status().lines[-1] == "spare: board0 standing by; layers 0 to 0 fetched"
    second = ring.tick()
    assert prepares(second, b"spare") == [2]
    prepared(ring, first, b"spare")
    assert "1 to 1" not in ring.machine.status().lines[-1], "that is said of the first place"
    prepared(ring, second, b"spare")
    (spare,) = [node for node in ring.machine.status().nodes if not node.stage]
    assert spare.words == "standing by; layers 0 to 0, 1 to 1 fetched"
    assert prepares(ring.tick(), b"spare") == [], "it has all that it may need"


def test_two_spares_prepare_for_different_places_and_the_unsteadiest_comes_first() -> None:
    ring = Membership(3)
    ring.bring_up()
    for _ in range(2):
        ring.say(address(3), Goodbye("stopped"))
        ring.join(3)
        ring.all_ready()
    ring.say(b"spare", asks(0))
    ring.say(b"other", asks(0, pid=98, port=98))
    effects = ring.tick()
    assert (prepares(effects, b"spare"), prepares(effects, b"other")) == ([3], [1])
    prepared(ring, effects, b"other")
    assert prepares(ring.tick(), b"other") == [2]
    ring.say(b"other", Goodbye("stopped"))
    ring.say(b"other", asks(0, pid=99, port=98))
    assert prepares(ring.tick(), b"other") == [1], "a new process says itself what it has"


def prepared(ring: Membership, effects: list[Effect], peer: bytes) -> None:
    """A device is prepared for what these effects told it."""
    told = (e.message for e in effects if isinstance(e, SendPeer) and e.peer == peer)
    (number,) = [message.number for message in told if isinstance(message, Assign)]
    ring.say(peer, Ready(9.0, number))


def prepares(effects: list[Effect], peer: bytes) -> list[int]:
    """The places that a device is told to prepare for."""
    told = [one for one in to(effects, peer) if isinstance(one, Assign)]
    assert all(one.ring == NO_RING for one in told)
    return [one.stage for one in told]


def test_what_a_replacement_does_is_told_as_far_as_it_comes_on() -> None:
    ring = with_spare()
    ring.say(b"other", asks(0, pid=98, port=98))
    ring.say(address(2), Goodbye("stopped"))
    who = "stage 2 (board0, process 70) is still"
    text = "compiling the kernels for this CPU (once)"
    assert progress(ring.say(b"spare", Loading(text))) == [f"{who} {text}"]
    assert progress(ring.say(b"spare", Loading(text))) == [], "it does not come on"
    assert progress(ring.say(b"other", Loading("receiving"))) == [], "nobody waits for it"
    assert progress(ring.say(b"spare", Loading("loading"))) == [f"{who} loading"]
    assert progress(ring.ready(b"spare")) == [""]
    assert progress(ring.ready(address(1))) == [], "it has had its layers"
    assert progress(ring.say(b"spare", Loading("receiving"))) == []


def progress(effects: list[Effect]) -> list[str]:
    """What the coordinator machine is told of those that are awaited."""
    told = [e.event for e in effects if isinstance(e, Forward)]
    return [event.doing for event in told if isinstance(event, RingProgress)]


def test_a_spare_that_is_gone_disturbs_nobody() -> None:
    ring = with_spare()
    assert why_down(ring.say(b"spare", Goodbye("stopped"))) == []
    assert ring.machine.status().ready
    assert not any("spare" in line for line in ring.machine.status().lines)


def test_a_stage_and_its_spare_that_fall_silent_together_are_both_lost() -> None:
    ring = with_spare()
    reasons: list[str] = []
    for _ in range(int(TIMING.loading_silence / TIMING.beat) + 3):
        ring.all_beat(2)
        reasons += why_down(ring.tick())
    assert [reason.split(" (")[0] for reason in reasons] == ["stage 2", "stage 2"]
    assert "stage 2: layers 1 to 1: missing" in ring.machine.status().lines


def test_of_several_spares_the_one_that_was_heard_last_takes_the_place() -> None:
    """The others may have died with the stage, which shows later: as long as a load may take."""
    ring = with_spare()
    ring.say(b"alive", asks(0, pid=98, port=98))
    reasons: list[str] = []
    while not reasons:
        ring.all_beat(2)
        ring.say(b"alive", Heartbeat())
        reasons = why_down(ring.tick())
    assert ring.machine.stage_peers == [address(1), b"alive"]


def test_of_several_spares_that_live_the_one_that_has_the_block_takes_the_place() -> None:
    ring = with_spare()
    ring.say(b"other", asks(0, pid=98, port=98))
    effects = ring.tick()
    assert (prepares(effects, b"spare"), prepares(effects, b"other")) == ([1], [2])
    prepared(ring, effects, b"spare")
    ring.now += TIMING.beat
    ring.say(b"other", Heartbeat())
    assert to(ring.say(address(1), Goodbye("stopped")), b"spare") == [ring.place(1, 2)]


def test_a_connection_that_was_made_anew_costs_no_stage_its_place() -> None:
    """A coordinator that hung for seconds finds that of every stage anew: its block is there."""
    ring = with_spare()
    ring.now += TIMING.beat * 2.5
    ring.say(b"spare", Heartbeat())
    effects = ring.say(b"anew", asks(2))
    assert why_down(effects) == ["stage 2 (board2, process 72) lost its connection"]
    assert to(effects, b"anew") == [ring.place(2, 2)]
    assert to(effects, b"spare") == []
    assert ring.machine.stage_peers == [address(1), b"anew"]
