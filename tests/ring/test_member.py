"""A stage's way into the ring: asking, loading, connecting, and noticing that it is alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from edgespec.config import RESTS, Timing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import (
    Effect,
    SendCoordinator,
)
from edgespec.machines.events import (
    MessageArrived,
    Tick,
)
from edgespec.machines.events import (
    RingUp as Unexpected,
)
from edgespec.ring.effects import (
    ConnectRing,
    DropBlock,
    FetchBlock,
    LoadBlock,
    Log,
    OpenRing,
    ResetStage,
    Stop,
)
from edgespec.ring.events import (
    BlockFetched,
    BlockLoaded,
    BlockLoading,
    ControlEnded,
    LoadFailed,
    RingBroke,
    RingFaulty,
    RingReached,
)
from edgespec.ring.member import LATER, REPORT_S, MemberMachine
from edgespec.wire.messages import (
    ALL_REQUESTS,
    NO_RING,
    THIS_RING,
    Assign,
    CloseRequest,
    Connect,
    Connected,
    Fault,
    Goodbye,
    Heartbeat,
    Join,
    Loading,
    Message,
    Ready,
    Refuse,
    StandBy,
)

TIMING = Timing(beat=0.5, silence=4.0, retry=1.0)
JOIN = Join(2, "board", 7, "10.0.0.2", 5002, "key of V2")
PLACE = Assign(2, 3, 4, 8, "/models/big", "mark", "bfloat16", "int4", 4096, 7, "key")
SECOND = replace(PLACE, ring=2, ring_key="key of the second", number=2)
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

    def load(self) -> None:
        """It has its place and its block."""
        self.tick()
        self.hear(PLACE)
        self.machine.handle(BlockLoaded(2.5), self.now)

    def hear(self, message: Message) -> list[Effect]:
        """The coordinator says something."""
        return self.machine.handle(MessageArrived(b"", message), self.now)


def sent(effects: list[Effect]) -> list[Message]:
    """What goes to the coordinator."""
    return [e.message for e in effects if isinstance(e, SendCoordinator)]


def reports(effects: list[Effect]) -> list[str]:
    """What the person at the terminal reads."""
    return [e.text for e in effects if isinstance(e, Log)]


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
    assert member.hear(SECOND) == [OpenRing("key of the second")]
    effects = member.machine.handle(BlockLoaded(2.0), member.now)
    assert effects[:2] == [ResetStage(SECOND), SendCoordinator(Ready(2.0, 2))]


def test_another_block_is_loaded_behind_the_one_that_is_and_that_one_is_for_nobody() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    other = replace(PLACE, first=0)
    assert LoadBlock(other) in member.hear(other)
    assert member.machine.handle(BlockLoaded(1.0), member.now) == []
    effects = member.machine.handle(BlockLoaded(2.0), member.now)
    assert effects[:2] == [ResetStage(other), SendCoordinator(Ready(2.0))]
    member.hear(PLACE)
    member.hear(other)
    assert member.machine.handle(LoadFailed("too large"), member.now) == []


def test_in_the_next_ring_it_is_ready_at_once() -> None:
    member = Member()
    member.load()
    again = replace(SECOND, stage=1, stages=2)
    effects = member.hear(again)
    assert effects[:3] == [
        OpenRing("key of the second"),
        ResetStage(again),
        SendCoordinator(Ready(0.0, 2)),
    ]


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
    assert effects[:2] == [ResetStage(PLACE), SendCoordinator(Ready(2.5))]
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
    assert ConnectRing(host, 5003, "its key") in member.hear(Connect(host, 5003, "its key"))


# --- alone ----------------------------------------------------------------------------------------


def test_a_message_that_was_held_back_makes_the_coordinator_not_silent() -> None:
    member = Member()
    member.load()
    member.machine.handle(RingReached(), member.now)
    due = member.now
    for _ in range(int(2 * TIMING.silence / TIMING.beat)):
        member.hear(Heartbeat())
        member.machine.handle(MessageArrived(b"", CloseRequest(1)), due)
        assert not reports(member.tick())


def test_loading_that_makes_no_progress_says_that_it_goes_on() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    said = []
    for _ in range(16):  # of half a second
        said += reports(member.tick())
        member.hear(Heartbeat())
    assert said == [f"still loading layers 4 to 7 ({after} s)" for after in (2, 5, 8)]
    member.machine.handle(BlockLoading("receiving the block: 3 %"), member.now)
    assert reports(member.tick()) == []
    member.now += 5.0
    member.hear(Heartbeat())
    assert reports(member.tick()) == ["still receiving the block: 3 % (13 s)"]
    member.machine.handle(BlockLoaded(13.0), member.now)
    member.now += 9.0
    member.hear(Heartbeat())
    assert reports(member.tick()) == ["still waiting for the other stages (9 s)"]
    member.machine.handle(RingReached(), member.now)
    member.now += 9.0
    member.hear(Heartbeat())
    assert reports(member.tick()) == []


@pytest.mark.parametrize("is_loading", [False, True])
def test_a_silent_coordinator_is_asked_again_after_the_silence_and_not_before(
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
        if any("silent" in words for words in reports(effects)):
            break
        assert member.now - begun <= TIMING.silence
        assert sent(effects) == [Heartbeat()]
    assert member.now - begun <= TIMING.silence + TIMING.beat
    assert reports(effects)[0].startswith("the coordinator at d0:7430 has been silent for 4.")
    for _ in range(500):  # for ever, and without a flood of words
        effects = member.tick()
        assert sent(effects) == [JOIN]
        assert not any(isinstance(e, Stop) for e in effects)
    assert reports(effects) == []


def test_a_coordinator_is_waited_for_as_long_as_it_says() -> None:
    member = Member()
    member.load()
    member.hear(Heartbeat(silence=3 * TIMING.silence))
    begun = member.now
    while not any("silent" in words for words in reports(member.tick())):
        assert member.now - begun <= 3 * TIMING.silence
    assert member.now - begun > 3 * TIMING.silence


def test_under_a_patient_coordinator_it_beats_as_ever() -> None:
    """`serve --silence` is more than a stage's own: that is no rest."""
    member = Member()
    member.load()
    patient = Heartbeat(silence=10 * TIMING.silence)
    member.hear(patient)
    heard = member.now
    assert not member.machine.rests
    member.tick()
    before = member.now
    assert sent(member.tick()) == [Heartbeat()]
    assert member.now - before == TIMING.beat
    member.machine.handle(ControlEnded(), member.now)
    while not any("silent" in words for words in reports(member.tick())):
        assert member.now - heard <= 10 * TIMING.silence
    assert member.now - heard > 10 * TIMING.silence


def test_in_a_ring_that_rests_it_beats_seldom_and_after_the_coordinator() -> None:
    member = Member()
    member.load()
    resting = Heartbeat(silence=TIMING.resting.silence, rests=True)
    member.hear(resting)
    member.tick()
    before = member.now
    assert sent(member.tick()) == [Heartbeat()]
    assert member.now - before == LATER * RESTS * TIMING.beat
    for _ in range(3):  # the coordinator's beats come a little earlier: one wake-up does for both
        member.now += TIMING.resting.beat
        member.hear(resting)
        before = member.now
        assert sent(member.tick()) == [Heartbeat()]
        assert member.now == before


@pytest.mark.parametrize("told", [True, False])
def test_it_is_awake_again_when_the_coordinator_says_so_or_its_connection_ends(told: bool) -> None:
    member = Member()
    member.load()
    member.hear(Heartbeat(silence=TIMING.resting.silence, rests=True))
    member.tick()
    if told:
        member.hear(Heartbeat(silence=TIMING.silence))
    else:
        member.machine.handle(ControlEnded(), member.now)
    begun = member.now
    assert sent(member.tick()) == [Heartbeat()]
    assert member.now == begun, "at once"
    while not any("silent" in words for words in reports(member.tick())):
        assert member.now - begun <= TIMING.silence
    assert member.now - begun <= TIMING.silence + TIMING.beat


def test_a_coordinator_that_was_missed_for_a_while_finds_it_as_it_was() -> None:
    member = Member()
    member.load()
    member.now += TIMING.silence + 1.0
    assert reports(member.tick())
    assert sent(member.tick()) == [JOIN]
    assert member.hear(PLACE) == [SendCoordinator(Ready(0.0))], "the ring may well go on"
    assert sent(member.tick()) == [Heartbeat()]


def test_a_block_that_is_loaded_meanwhile_is_kept() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    member.hear(Goodbye("it ends"))
    effects = member.machine.handle(BlockLoaded(2.5), member.now)
    assert ResetStage(PLACE) in effects
    assert sent(effects) == []
    assert sent(member.hear(PLACE)) == [Ready(0.0)]


def test_it_gives_its_block_up_if_the_coordinator_says_so() -> None:
    member = Member()
    member.load()
    assert DropBlock() in member.hear(Goodbye("it ends", unloads=True))
    assert sent(member.tick()) == [JOIN]
    again = replace(PLACE, ring_key="another", number=PLACE.number + 1)
    assert LoadBlock(again) in member.hear(again)


def test_a_block_that_was_given_up_while_it_was_loaded_is_no_place_in_a_ring() -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    assert DropBlock() in member.hear(Goodbye("it ends", unloads=True))
    effects = member.machine.handle(BlockLoaded(2.5), member.now)
    assert ResetStage(PLACE) not in effects


def test_once_it_had_a_place_a_refusal_is_no_end() -> None:
    member = Member()
    member.load()
    member.hear(Goodbye("silent"))
    assert sent(member.tick()) == [JOIN]
    assert not any(isinstance(e, Stop) for e in member.hear(Refuse("stage 2 is taken")))
    assert member.machine.deadline() == member.now + TIMING.retry
    assert sent(member.tick()) == [JOIN]


def test_a_spare_waits_for_its_place_and_beats() -> None:
    member = Member()
    member.tick()
    assert reports(member.hear(StandBy("standing by as a spare"))) == ["standing by as a spare"]
    assert sent(member.tick()) == [Heartbeat()]
    assert LoadBlock(PLACE) in member.hear(PLACE)


def test_a_spare_fetches_what_it_may_need_and_loads_what_it_does() -> None:
    member = Member()
    member.tick()
    member.hear(StandBy("standing by"))
    first, second = (replace(PLACE, stage=s, first=s, end=s + 1, ring=NO_RING) for s in (1, 2))
    assert FetchBlock(first) in member.hear(first)
    assert member.hear(first) == [], "it does already"
    member.machine.handle(BlockLoading("receiving the block: 34 %"), member.now)
    assert FetchBlock(second) in member.hear(second)
    assert member.machine.handle(BlockFetched(first, 1.0), member.now) == [], "not asked any more"
    told = member.machine.handle(BlockFetched(second, 1.5), member.now)
    assert sent(told) == [Ready(1.5, NO_RING)]
    member.hear(first)
    effects = member.hear(PLACE)
    assert FetchBlock(None) in effects
    assert LoadBlock(PLACE) in effects
    assert member.machine.handle(BlockFetched(first, 1.0), member.now) == []


def test_a_stage_that_became_a_spare_keeps_its_block() -> None:
    member = Member()
    member.load()
    member.hear(Goodbye("silent"))
    member.hear(StandBy("standing by"))
    later = replace(PLACE, ring=5, number=5)
    assert sent(member.hear(later)) == [Ready(0.0, 5)]


def test_that_it_has_reached_the_next_node_is_told_with_the_number_of_its_place() -> None:
    member = Member()
    member.load()
    member.hear(SECOND)
    member.hear(Connect("", 1, "key", SECOND.number))
    assert sent(member.machine.handle(RingReached(), member.now)) == [Connected(SECOND.number)]


def test_a_broken_connection_is_told_and_it_asks_again() -> None:
    member = Member()
    member.load()
    (fault,) = sent(member.machine.handle(RingBroke("its cable broke"), member.now))
    assert fault == Fault(ALL_REQUESTS, "its cable broke")
    assert sent(member.tick()) == [fault, JOIN], "it may have been lost"
    assert sent(member.hear(PLACE)) == []
    assert sent(member.tick()) == [fault, JOIN], "in this place it cannot go on"
    member.hear(SECOND)
    assert sent(member.tick()) == [Heartbeat()]


def test_a_fault_of_the_ring_is_told_until_there_is_another_one_and_it_keeps_its_place() -> None:
    member = Member()
    member.load()
    (fault,) = sent(member.machine.handle(RingFaulty("sent nonsense", by_sender=True), member.now))
    assert fault == Fault(THIS_RING, "the node before it sent nonsense")
    assert sent(member.tick()) == [Heartbeat(), fault]
    assert sent(member.hear(SECOND)) == [Ready(0.0, 2)]
    assert sent(member.tick()) == [Heartbeat()]


@pytest.mark.parametrize("message", [Heartbeat(), Connect("", 1, "key"), PLACE, CloseRequest(1)])
def test_whatever_the_coordinator_says_shows_that_it_lives(message: Message) -> None:
    member = Member()
    member.tick()
    member.hear(PLACE)
    for _ in range(20):
        member.now += TIMING.silence - 0.1
        member.hear(message)
        assert not any(isinstance(e, Stop) for e in member.tick())


def test_goodbye_lets_it_ask_again_with_the_coordinators_reason() -> None:
    member = Member()
    member.load()
    effects = member.hear(Goodbye("stage 2 (a, process 3) has been silent for 4.1 s"))
    assert "stage 2 (a, process 3) has been silent" in reports(effects)[0]
    assert sent(member.tick()) == [JOIN]
    assert member.hear(Goodbye("again")) == []


def test_it_handles_no_other_events() -> None:
    with pytest.raises(LocalProtocolError, match="RingUp"):
        Member().machine.handle(Unexpected(), 0.0)
