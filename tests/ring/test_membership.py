"""Membership: who gets a place, when the ring is up, and what happens when somebody is gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.memberships import (
    ASK,
    HOME,
    TIMING,
    Membership,
    address,
    asks,
    goes_up,
    ring_key,
    to,
    why_down,
)
from support.segments import retain_message

from edgespec.config import RESTS
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import (
    Forward,
    SendPeer,
)
from edgespec.machines.events import (
    Event,
    MessageArrived,
    PeerGone,
    RingUp,
    Tick,
)
from edgespec.ring.effects import ConnectRing, Log, OpenRing
from edgespec.ring.events import ControlEnded, RingBroke, RingReached
from edgespec.ring.membership import MembershipMachine
from edgespec.wire.client_messages import Cancel, Status, StatusRequest
from edgespec.wire.messages import (
    ALL_REQUESTS,
    CloseRequest,
    Connect,
    Connected,
    Credit,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Loading,
    Message,
    Ready,
    Refuse,
)

# --- places ---------------------------------------------------------------------------------------


def test_a_stage_that_asks_gets_its_place() -> None:
    ring = Membership(3)
    effects = ring.join(2)
    assert to(effects, address(2)) == [ring.place(2, 1)]
    assert Log("stage 2 (board2, process 72) joined, 1 of 3") in effects


def logged(ring: Membership, seconds: float) -> list[str]:
    """What the log says in the next seconds, in which nothing else happens."""
    end, said = ring.now + seconds, []
    while (deadline := ring.machine.deadline()) is not None and max(deadline, ring.now) <= end:
        said += [effect.text for effect in ring.tick() if isinstance(effect, Log)]
        for peer in ring.machine.daemon_peers:
            ring.say(peer, Heartbeat())
    ring.now = end
    return said


def test_the_log_is_not_silent_while_stages_are_waited_for() -> None:
    ring = Membership(3)
    assert logged(ring, 60.0) == [], "a person is to do something, and was told what"
    ring.machine = MembershipMachine(ring.places, HOME, TIMING, own_stage=3)
    said = logged(ring, 12.0)
    assert len(said) >= 3
    assert {*said} == {"stage 3: not here yet"}
    ring.join(1)
    ring.ready(address(1))
    said = logged(ring, 12.0)
    assert len(said) >= 3
    assert {*said} == {"stage 2: not here yet; stage 3: not here yet"}
    assert len(logged(ring, 600.0)) < 40, "once a minute when it goes on"
    for stage in (2, 3):
        ring.join(stage)
    ring.all_ready()
    assert logged(ring, 12.0) == []


def test_a_device_gets_the_stage_that_the_plan_has_for_it() -> None:
    ring = Membership(3)
    # A tuple, as the settings have it.
    ring.machine = MembershipMachine(ring.places, HOME, TIMING, names=("board3", "b", "board1"))
    for stage, planned in ((3, 1), (1, 3), (2, 2)):
        effects = ring.say(address(stage), replace(asks(stage), stage=0))
        assert to(effects, address(stage)) == [ring.place(planned, 1)]


def test_a_plan_comes_before_what_a_device_held_and_a_new_device_gets_what_none_held() -> None:
    ring = Membership(3)
    held = ("key of V1", "key of V2")
    ring.machine = MembershipMachine(
        ring.places, HOME, TIMING, names=("board2", "", ""), holders=held
    )
    for stage, place in ((4, 3), (1, 2), (2, 1)):
        effects = ring.say(address(stage), replace(asks(stage), stage=0))
        assert to(effects, address(stage)) == [ring.place(place, 1)]


def test_a_stage_that_asks_twice_gets_the_same_place_again() -> None:
    ring = Membership(2)
    ring.join(1)
    again = ring.join(1)
    assert to(again, address(1)) == [ring.place(1, 1)]
    assert len(again) == 1, "and it is no news"


@pytest.mark.parametrize("stage", [-1, 4, 2**40])
def test_a_stage_that_does_not_exist_is_refused(stage: int) -> None:
    ring = Membership(3)
    (refusal,) = to(ring.say(b"x", asks(stage)), b"x")
    assert isinstance(refusal, Refuse)
    assert f"no stage {stage}" in refusal.reason
    assert "3 stage(s)" in refusal.reason
    assert ring.machine.stage_peers == []


def test_a_second_daemon_for_a_stage_is_refused_and_the_first_goes_on() -> None:
    ring = Membership(2)
    ring.join(1)
    late = asks(1, pid=5, port=9)
    assert ring.say(b"late", late) == [], "the first one may be dead"
    ring.now += TIMING.beat * 1.5
    ring.say(address(1), Heartbeat())
    (refusal,) = to(ring.say(b"late", late), b"late")
    assert isinstance(refusal, Refuse)
    assert "taken by process 71 on board1" in refusal.reason
    assert ring.machine.stage_peers == [address(1)]


def test_one_daemon_holds_one_stage() -> None:
    ring = Membership(2)
    ring.join(1)
    (refusal,) = to(ring.say(address(1), asks(2)), address(1))
    assert isinstance(refusal, Refuse)
    assert "is stage 1" in refusal.reason
    assert ring.machine.stage_peers == [address(1)]


@pytest.mark.parametrize(
    ("host", "port"),
    [("", 1), ("a.b.c", 1), ("::1%lo", 1), ("10.0.0.1", 0), ("10.0.0.1", 65536), ("10.0.0.1\n", 1)],
)
def test_an_address_that_nobody_can_connect_to_is_refused(host: str, port: int) -> None:
    ring = Membership(1)
    (refusal,) = to(ring.join(1, host=host, port=port), address(1))
    assert isinstance(refusal, Refuse)
    assert "is no address for others" in refusal.reason


def test_the_ring_is_up_when_all_are_ready_and_each_pushes_to_the_next() -> None:
    ring = Membership(3)
    for stage in (3, 1, 2):
        ring.join(stage)
    for stage in (2, 3):
        assert not goes_up(ring.ready(address(stage)))
        assert not ring.machine.status().ready
    effects = ring.ready(address(1))
    assert effects[1:3] == [OpenRing(ring_key(1)), ConnectRing("10.0.0.1", 5001, "key of V1")]
    assert to(effects, address(1)) == [Connect("10.0.0.2", 5002, "key of V2")]
    assert to(effects, address(2)) == [Connect("10.0.0.3", 5003, "key of V3")]
    assert to(effects, address(3)) == [HOME]
    for stage in (3, 1):
        assert not goes_up(ring.connected(address(stage)))
    assert not goes_up(ring.machine.handle(RingReached(), ring.now))
    assert not ring.machine.status().ready
    assert goes_up(ring.connected(address(2)))
    assert ring.machine.status().ready


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1"])
def test_a_stage_on_the_coordinator_s_machine_is_reached_as_the_coordinator_is(host: str) -> None:
    ring = Membership(3)
    ring.join(1)
    ring.join(2, host=host, key="own")
    ring.join(3)
    effects = ring.all_ready()
    assert to(effects, address(1)) == [Connect("", 5002, "own")]
    ring = Membership(2)
    ring.join(1, host=host)
    ring.join(2)
    assert ConnectRing(host, 5001, "key of V1") in ring.all_ready()


def test_a_status_says_which_stage_is_on_the_coordinator_s_machine() -> None:
    ring = Membership(2)
    ring.machine = MembershipMachine(ring.places, HOME, TIMING, own_keys=["own", "key of owner"])
    ring.join(1)
    ring.join(2, key="own")
    assert [node.with_coordinator for node in ring.machine.status().nodes] == [False, True]


def test_a_place_without_a_name_is_for_anybody_before_one_with_another_s_name() -> None:
    ring = Membership(3)
    ring.machine = MembershipMachine(ring.places, HOME, TIMING, names=["own", "", ""])
    for peer, name in ((b"a", "x"), (b"b", "own"), (b"c", "y")):
        ring.say(peer, replace(asks(1), stage=0, name=name, port=6000 + peer[0], key=name))
    assert [node.name for node in ring.machine.status().nodes] == ["own", "x", "y"]


def test_a_ring_is_not_up_while_one_node_does_not_reach_the_next() -> None:
    ring = Membership(2)
    ring.bring_up()
    ring.join(2)  # by a connection that it made anew: another ring
    before = ring.number(address(2))
    ring.machine.handle(RingBroke("it cannot reach it"), ring.now)
    for stage in (1, 2):
        ring.ready(address(stage))
    ring.connected(address(1))
    ring.say(address(2), Connected(before))
    assert not goes_up(ring.machine.handle(RingReached(), ring.now))
    why = "it cannot reach the next node"
    assert ring.say(address(2), Fault(ALL_REQUESTS, why, before)) == []
    down = ring.say(address(2), Fault(ALL_REQUESTS, why, ring.number(address(2))))
    (why,) = why_down(down)
    assert why == "stage 2 (board2, process 72) cannot go on: it cannot reach the next node"
    assert not goes_up(ring.connected(address(1)))


def test_a_ring_of_one_stage_leads_back_to_the_coordinator() -> None:
    effects = Membership(1).bring_up()
    assert ConnectRing("10.0.0.1", 5001, "key of V1") in effects
    assert to(effects, address(1)) == [HOME]


def test_ready_twice_changes_nothing() -> None:
    ring = Membership(2)
    ring.bring_up()
    assert ring.ready(address(1)) == []


def test_status_tells_who_is_missing_loading_and_ready() -> None:
    ring = Membership(3)
    ring.join(1)
    ring.join(2)
    ring.ready(address(1))
    ring.say(address(2), Loading("loading 3 of 8 layers"))
    (status,) = to(ring.say(b"client", StatusRequest()), b"client")
    assert isinstance(status, Status)
    assert status.lines == (
        "stage 1: layers 0 to 0: board1 ready",
        "stage 2: layers 1 to 1: board2 loading 3 of 8 layers",
        "stage 3: layers 2 to 2: missing",
    )


def test_what_a_stage_says_about_itself_is_one_short_line() -> None:
    ring = Membership(1)
    ring.join(1)
    ring.say(address(1), Loading("\x1b[2J\n" + "x" * 5000))
    (line,) = ring.machine.status().lines
    assert line.isprintable()
    assert len(line) < 200


# --- stages go ------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_when_a_stage_is_lost_the_others_begin_the_next_ring(lost: int) -> None:
    ring = Membership(3)
    ring.bring_up()
    before = [(stage, ring.number(address(stage))) for stage in (1, 2, 3)]
    effects = ring.say(address(lost), Goodbye("stopped by SIGTERM"))
    reason = f"stage {lost} (board{lost}, process {70 + lost}) left: stopped by SIGTERM"
    assert why_down(effects) == [reason]
    assert Log(reason) in effects
    for stage in {1, 2, 3} - {lost}:
        assert to(effects, address(stage)) == [ring.place(stage, 2)]
    assert to(effects, address(lost)) == []
    assert not ring.machine.status().ready
    assert to(ring.join(lost), address(lost)) == [ring.place(lost, 2)]
    for stage, number in before:
        assert ring.say(address(stage), Ready(1.0, number)) == [], "that is of the ring before"
    effects = ring.all_ready()
    assert goes_up(effects)
    assert OpenRing(ring_key(2)) in effects
    assert ring.machine.status().ready


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_stage_lost_before_the_ring_is_up_is_named_and_the_others_go_on(lost: int) -> None:
    ring = Membership(3)
    for stage in (1, 2, 3):
        ring.join(stage)
    fault = Fault(ALL_REQUESTS, "the model is another one", ring.number(address(lost)))
    effects = ring.say(address(lost), fault)
    (reason,) = why_down(effects)
    assert reason == (
        f"stage {lost} (board{lost}, process {70 + lost}) cannot go on: the model is another one"
    )
    assert not any(isinstance(e, SendPeer) for e in effects)
    ring.join(lost)
    assert goes_up(ring.all_ready())


def test_a_ring_whose_connection_broke_is_made_anew() -> None:
    ring = Membership(2)
    ring.bring_up()
    effects = ring.machine.handle(RingBroke("its connection broke"), ring.now)
    assert why_down(effects) == ["the coordinator cannot go on: its connection broke"]
    assert goes_up(ring.all_ready())


def test_a_fault_of_one_request_is_not_the_end_of_the_ring() -> None:
    ring = Membership(2)
    ring.bring_up()
    assert ring.say(address(1), Fault(7, "out of memory")) == []


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_silent_stage_is_lost_after_the_silence_and_not_before(lost: int) -> None:
    ring = Membership(3)
    ring.bring_up()
    begun = ring.now
    while True:
        ring.all_beat(lost)
        effects = ring.tick()
        if why_down(effects):
            break
        assert ring.now - begun <= TIMING.silence
        beats = [to(effects, address(s)) for s in (1, 2, 3)]
        assert [[type(beat) for beat in each] for each in beats] == [[Heartbeat]] * 3
        assert {beat.silence for (beat,) in beats} == {TIMING.silence}
    assert ring.now - begun <= TIMING.silence + TIMING.beat
    (reason,) = why_down(effects)
    assert reason.startswith(f"stage {lost} (board{lost}, process {70 + lost}) has been silent for")
    assert isinstance(to(effects, address(lost))[0], Goodbye), "should it go on, it knows at once"


def test_a_ring_in_which_nothing_happens_beats_seldom() -> None:
    ring = Membership(2)
    ring.rest()
    begun, beats = ring.now, []
    for _ in range(3):
        beats += to(ring.tick(), address(1))
        for quiet in (Heartbeat(), Health(0.0, 0.0, 0, 0, 0.0, False, ""), StatusRequest()):
            ring.say(address(1), quiet)
            ring.say(address(2), quiet)
    slow = TIMING.resting
    assert (ring.now - begun) == 3 * slow.beat == 3 * RESTS * TIMING.beat
    assert [getattr(one, "silence", 0.0) for one in beats] == 3 * [slow.silence]


def test_a_ring_with_requests_does_not_rest() -> None:
    ring = Membership(2)
    ring.running = 1
    ring.rest()
    before = ring.now
    ring.tick()
    assert ring.now - before == TIMING.beat


def test_a_silent_stage_is_lost_in_a_ring_that_rests_too() -> None:
    ring = Membership(2)
    ring.rest()
    begun = ring.now
    while not (reasons := why_down(ring.tick())):
        ring.all_beat(2)
    assert reasons[0].startswith("stage 2 (board2, process 72) has been silent for")
    assert TIMING.silence < ring.now - begun <= TIMING.resting.silence + TIMING.resting.beat
    before = ring.now
    ring.tick()
    assert ring.now - before == TIMING.beat, "what it leaves is not waited for at rest"


@pytest.mark.parametrize("wakes", [MessageArrived(b"client", ASK), ControlEnded(), RingReached()])
def test_what_may_be_work_or_a_loss_wakes_a_ring_that_rests(wakes: Event) -> None:
    """A dead stage is then noticed as soon as ever, and one that lives is not taken for one."""
    ring = Membership(2)
    ring.rest()
    ring.now += 0.9 * TIMING.resting.beat
    begun = ring.now
    ring.machine.handle(wakes, ring.now)
    (told,) = to(ring.tick(), address(1))
    assert ring.now == begun, "all are told at once"
    assert isinstance(told, Heartbeat)
    assert told.silence == TIMING.silence
    while not (reasons := why_down(ring.tick())):
        ring.all_beat(2)
    assert reasons[0].startswith("stage 2 (board2, process 72) has been silent for")
    assert TIMING.silence < ring.now - begun <= TIMING.silence + TIMING.beat


def test_a_stage_that_loads_may_be_silent_for_longer() -> None:
    ring = Membership(1)
    ring.join(1)
    begun = ring.now
    while not why_down(ring.tick()):
        assert ring.now - begun <= TIMING.loading_silence
    assert ring.now - begun > TIMING.loading_silence


def test_a_message_that_was_held_back_makes_no_stage_silent() -> None:
    """Over emulated links messages of requests come when they are due, which may be long past."""
    ring = Membership(1)
    ring.bring_up()
    due = ring.now
    for _ in range(int(2 * TIMING.silence / TIMING.beat)):
        ring.say(address(1), Heartbeat())
        ring.machine.handle(MessageArrived(address(1), Credit(1)), due)
        assert not why_down(ring.tick())


@pytest.mark.parametrize(
    "message", [Heartbeat(), Loading("x"), asks(1), Fault(3, "x"), StatusRequest()]
)
def test_whatever_a_stage_says_shows_that_it_lives(message: Message) -> None:
    ring = Membership(1)
    ring.bring_up()
    for _ in range(20):
        ring.now += TIMING.silence - 0.5
        ring.say(address(1), message)
        assert not why_down(ring.tick())


@pytest.mark.parametrize(
    "message",
    [
        Ready(1.0),
        Goodbye("bye"),
        Loading("x"),
        Fault(ALL_REQUESTS, "dead"),
        Fault(1, "dead"),
        Heartbeat(),
        CloseRequest(1),
        retain_message(1, 1, 1, (), ()),
        Connect("10.0.0.1", 1, "key"),
        Refuse("no"),
    ],
)
def test_a_stranger_changes_nothing_and_gets_nothing(message: Message) -> None:
    ring = Membership(2)
    ring.bring_up()
    before = ring.machine.status()
    assert ring.say(b"stranger", message) == []
    assert ring.machine.status() == before
    assert ring.machine.stage_at(b"stranger") is None
    ring.now += TIMING.beat
    assert to(ring.tick(), b"stranger") == []


def test_stages_are_named_by_where_their_messages_come_from() -> None:
    ring = Membership(2)
    ring.bring_up()
    assert str(ring.machine.stage_at(address(2))) == "stage 2 (board2, process 72)"


# --- clients --------------------------------------------------------------------------------------


@pytest.mark.parametrize("hello", [ASK, Cancel(1)])
def test_a_client_gets_its_heartbeats_answered(hello: Message) -> None:
    ring = Membership(1)
    assert ring.say(b"client", Heartbeat()) == [], "not before it wants something"
    assert ring.say(b"client", hello) == []
    assert ring.say(b"client", Heartbeat()) == [
        SendPeer(b"client", Heartbeat(silence=TIMING.answer_silence))
    ]


def test_a_silent_client_is_given_up_after_its_silence_and_not_before() -> None:
    ring = Membership(1)
    ring.bring_up()
    ring.say(b"client", ASK)
    begun = ring.now
    while (effects := ring.tick()) and Forward(PeerGone(b"client")) not in effects:
        ring.say(address(1), Heartbeat())
        assert ring.now - begun <= TIMING.client_silence
    assert ring.now - begun <= TIMING.client_silence + TIMING.beat
    assert not why_down(effects), "a client is no stage"
    assert ring.say(b"client", Heartbeat()) == [], "it shall notice that it was given up"


def test_a_client_that_says_heartbeat_is_kept() -> None:
    ring = Membership(1)
    ring.say(b"client", ASK)
    for _ in range(30):
        ring.say(b"client", Heartbeat())
        assert ring.tick() == []


# --- time -----------------------------------------------------------------------------------------


def test_there_is_no_deadline_while_nobody_is_there() -> None:
    ring = Membership(1)
    assert ring.machine.deadline() is None
    ring.say(b"stranger", Heartbeat())
    assert ring.machine.deadline() is None
    ring.join(1)
    assert ring.machine.deadline() == ring.now + TIMING.beat


def test_a_tick_before_its_time_does_nothing() -> None:
    ring = Membership(1)
    ring.join(1)
    assert ring.machine.handle(Tick(), ring.now + TIMING.beat / 2) == []


def test_a_first_client_long_after_the_last_beat_is_not_silent_at_once() -> None:
    ring = Membership(1)
    ring.say(b"first", ASK)
    while ring.machine.deadline() is not None:
        ring.tick()
    ring.now += 1000.0
    ring.say(b"second", ASK)
    assert ring.tick() == []


def test_it_handles_no_other_events() -> None:
    with pytest.raises(LocalProtocolError, match="RingUp"):
        Membership(1).machine.handle(RingUp(), 0.0)


def test_how_far_stages_are_is_told_until_they_are_ready() -> None:
    ring = Membership(2)
    ring.join(1)
    ring.join(2)
    ring.say(address(1), Loading("receiving the block: 3 of 9 MB"))
    ring.ready(address(2))
    said = []
    for _ in range(int(6.0 / TIMING.beat)):
        said += [effect.text for effect in ring.tick() if isinstance(effect, Log)]
        ring.say(address(1), Heartbeat())
        ring.say(address(2), Heartbeat())
    assert set(said) == {"stage 1 (board1, process 71): receiving the block: 3 of 9 MB"}
    ring.ready(address(1))
    for _ in range(int(6.0 / TIMING.beat)):
        assert not [effect for effect in ring.tick() if isinstance(effect, Log)]
        ring.say(address(1), Heartbeat())
        ring.say(address(2), Heartbeat())
