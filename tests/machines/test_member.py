"""A stage's way into the ring: asking, loading, connecting, and noticing that it is alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.config import Timing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import (
    ConnectRing,
    Effect,
    LoadBlock,
    OpenRing,
    Report,
    SendCoordinator,
    Stop,
)
from edgespec.machines.events import BlockLoaded, BlockLoading, LoadFailed, MessageArrived, Tick
from edgespec.machines.events import RingUp as Unexpected
from edgespec.machines.member import REPORT_S, MemberMachine
from edgespec.machines.membership import ALL_REQUESTS
from edgespec.wire.messages import (
    Assign,
    Connect,
    End,
    Fault,
    Goodbye,
    Heartbeat,
    Join,
    Loading,
    Message,
    Ready,
    Refuse,
)

TIMING = Timing(beat=0.5, silence=4.0, retry=1.0)
JOIN = Join(2, "board", 7, "10.0.0.2", 5002)
PLACE = Assign(2, 3, 4, 8, "/models/big", "mark", "bfloat16", "int4", 4096, 7, "key")
WAIT = 10.0


class Member:
    """The machine with a clock that a test turns."""

    def __init__(self, now: float = 50.0) -> None:
        self.machine = MemberMachine(JOIN, "d0:7430", WAIT, TIMING)
        self.now = now

    def tick(self) -> list[Effect]:
        """The deadline comes."""
        deadline = self.machine.deadline()
        assert deadline is not None
        self.now = max(self.now, deadline)
        return self.machine.handle(Tick(), self.now)

    def hear(self, message: Message) -> list[Effect]:
        """The coordinator says something."""
        return self.machine.handle(MessageArrived(b"", message), self.now)


def sent(effects: list[Effect]) -> list[Message]:
    """What goes to the coordinator."""
    return [e.message for e in effects if isinstance(e, SendCoordinator)]


def reports(effects: list[Effect]) -> list[str]:
    """What the person at the terminal reads."""
    return [e.text for e in effects if isinstance(e, Report)]


# --- asking ---------------------------------------------------------------------------------------


def test_it_asks_at_once() -> None:
    member = Member()
    assert member.tick() == [SendCoordinator(JOIN)]


def test_it_asks_again_and_says_that_it_waits() -> None:
    member = Member()
    begun, asked, said = member.now, 0, []
    while not isinstance((effects := member.tick())[0], Stop):
        assert sent(effects) == [JOIN]
        asked += 1
        said += reports(effects)
    assert asked == WAIT / TIMING.retry + 1
    assert said[0] == "waiting for the coordinator at d0:7430 (1 s)"
    assert len(said) == WAIT / REPORT_S
    assert WAIT < member.now - begun <= WAIT + TIMING.retry
    (stop,) = effects
    assert isinstance(stop, Stop)
    assert stop.failed
    assert "no coordinator answered at d0:7430 within 10 s" in stop.reason


def test_a_tick_before_its_time_does_nothing() -> None:
    member = Member()
    member.tick()
    assert member.machine.handle(Tick(), member.now + TIMING.retry / 2) == []


def test_an_answer_ends_the_asking() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    for _ in range(6):
        assert sent(member.tick()) == [Heartbeat()]


def test_it_beats_from_its_first_answer_however_long_it_waits_between_asking() -> None:
    member = Member()
    member.tick()
    member.now += 0.01
    member.hear(PLACE)
    assert member.machine.deadline() == member.now
    assert sent(member.tick()) == [Heartbeat()]
    assert member.machine.deadline() == member.now + TIMING.beat


def test_refused_it_ends_with_the_reason() -> None:
    member = Member()
    member.tick()
    (stop,) = member.hear(Refuse("stage 2 is taken"))
    assert stop == Stop("the coordinator refused: stage 2 is taken", failed=True)


# --- its place ------------------------------------------------------------------------------------


def test_a_place_is_loaded_once_however_often_it_comes() -> None:
    member = Member()
    member.tick()
    effects = member.hear(PLACE)
    assert effects[1:] == [OpenRing("key"), LoadBlock(PLACE)]
    assert "stage 2 of 3" in reports(effects)[0]
    assert "layers 4 to 7" in reports(effects)[0]
    assert member.hear(PLACE) == []
    assert member.hear(replace(PLACE, stage=3, first=0)) == []


def test_loading_is_told_to_the_coordinator_always_and_to_the_person_now_and_then() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    said = []
    for done in range(1, 101):
        member.now += REPORT_S / 10
        effects = member.machine.handle(BlockLoading(f"loading {done} of 100 layers"), member.now)
        assert sent(effects) == [Loading(f"loading {done} of 100 layers")]
        said += reports(effects)
    assert 9 <= len(said) <= 10
    assert said[0] == "loading 10 of 100 layers"


def test_loaded_it_says_ready() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    effects = member.machine.handle(BlockLoaded(2.5), member.now)
    assert sent(effects) == [Ready(2.5)]
    assert "2.5 s" in reports(effects)[0]


def test_if_it_cannot_load_it_tells_the_coordinator_and_ends() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    effects = member.machine.handle(LoadFailed("another model"), member.now)
    assert effects == [
        SendCoordinator(Fault(ALL_REQUESTS, "another model")),
        Stop("another model", failed=True),
    ]


@pytest.mark.parametrize("host", ["10.0.0.3", ""])
def test_told_where_to_push_it_connects(host: str) -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    assert ConnectRing(host, 5003) in member.hear(Connect(host, 5003))


# --- alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_silent_coordinator_is_given_up_after_the_silence_and_not_before(
    is_loading: bool,
) -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    begun = member.now
    while True:
        if is_loading:  # its own progress is no sign of life of the coordinator
            member.machine.handle(BlockLoading("loading 1 of 9 layers"), member.now)
        effects = member.tick()
        if any(isinstance(e, Stop) for e in effects):
            break
        assert member.now - begun <= TIMING.silence
        assert sent(effects) == [Heartbeat()]
    assert member.now - begun <= TIMING.silence + TIMING.beat
    (stop,) = effects
    assert isinstance(stop, Stop)
    assert stop.failed
    assert stop.reason.startswith("the coordinator at d0:7430 has been silent for 4.")


@pytest.mark.parametrize("message", [Heartbeat(), Connect("", 1), PLACE, End(1)])
def test_whatever_the_coordinator_says_shows_that_it_lives(message: Message) -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    for _ in range(20):
        member.now += TIMING.silence - 0.1
        member.hear(message)
        assert not any(isinstance(e, Stop) for e in member.tick())


def test_goodbye_is_the_end_with_the_coordinators_reason() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    (stop,) = member.hear(Goodbye("stage 1 (a, process 3) has been silent for 4.1 s"))
    assert isinstance(stop, Stop)
    assert stop.failed
    assert "stage 1 (a, process 3) has been silent" in stop.reason


def test_it_handles_no_other_events() -> None:
    with pytest.raises(LocalProtocolError, match="RingUp"):
        Member().machine.handle(Unexpected(), 0.0)
