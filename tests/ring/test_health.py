"""Health: what is said of hot, throttled and slow devices, when, and how often."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.memberships import HOME, TIMING, Membership, address, asks, to

from edgespec.ring.assignment import MOST_SHOWN
from edgespec.ring.effects import Log
from edgespec.ring.health import (
    HEALTH_S,
    IDLE_S,
    STALE_S,
    TEXT_CHARS,
    HealthMonitor,
    RoundTrips,
    home_status,
    printable,
)
from edgespec.ring.membership import MembershipMachine
from edgespec.wire.client_messages import LiveRequest, NodeStatus, Status, StatusRequest
from edgespec.wire.messages import ALL_REQUESTS, Fault, Goodbye, Health, Heartbeat, Loading

FINE = Health(60.0, 95.0, 8 << 30, 2 << 30, 0.4, False, "", 1.0, 0.02, 0.03)


class Devices:
    """A watch with a clock, and devices that speak to it every HEALTH_S seconds."""

    def __init__(self, *layers: int) -> None:
        self.watch = HealthMonitor()
        self.layers = layers
        self.now = 50.0
        self.said: list[tuple[float, str]] = []

    def say(self, **changes: object) -> None:
        """Once: the last device with these changes, the others fine."""
        self.now += HEALTH_S
        for number, layers in enumerate(self.layers, 1):
            is_last = number == len(self.layers)
            health = replace(FINE, **changes) if is_last else FINE  # type: ignore[arg-type]
            effects = self.watch.heard(b"%d" % number, f"board{number}", layers, health, self.now)
            assert all(isinstance(effect, Log) for effect in effects)
            self.said += [(self.now, e.text) for e in effects if isinstance(e, Log)]

    def go_on(self, seconds: float, **changes: object) -> list[str]:
        """For so long; returns what was said meanwhile."""
        before, end = len(self.said), self.now + seconds
        while self.now < end:
            self.say(**changes)
        return [text for _, text in self.said[before:]]


WRONG: dict[str, tuple[dict[str, object], str, str]] = {
    "hot": ({"temperature": 91.0}, "is hot: it has 91 °C and slows down at 95", "cooled down"),
    "hot without a limit": ({"temperature": 85.0, "limit": 0.0}, "has 85 °C;", "cooled down"),
    "throttled": (
        {"throttled": True, "text": "the CPU clock is limited to 800 of 1500 MHz"},
        "is throttled: the CPU clock is limited to 800 of 1500 MHz",
        "no longer throttled",
    ),
    "slow": ({"slowdown": 1.8}, "computes 1.8 times as slow as it did", "as fast as it did again"),
    "slowest": (
        {"one_row": 0.046},
        "is the slowest: 2.3 times the others' time a layer; give it fewer layers (--layers)",
        "no longer slower than the others",
    ),
}


@pytest.mark.parametrize(("changes", "words", "over"), WRONG.values(), ids=WRONG.keys())
def test_it_is_said_once_and_so_is_its_end(
    changes: dict[str, object], words: str, over: str
) -> None:
    devices = Devices(4, 4, 4)
    assert devices.go_on(60.0) == []
    (said,) = devices.go_on(120.0, **changes)
    assert words in said
    assert said.startswith("board3 ")
    assert devices.watch.warning(b"3", devices.now)
    assert devices.watch.warning(b"1", devices.now) == ""
    (cleared,) = devices.go_on(120.0)
    assert over in cleared
    assert devices.watch.warning(b"3", devices.now) == ""


@pytest.mark.parametrize(("changes", "words", "over"), WRONG.values(), ids=WRONG.keys())
def test_a_wobble_is_not_said(changes: dict[str, object], words: str, over: str) -> None:
    devices = Devices(4, 4, 4)
    devices.go_on(20.0)
    for _ in range(20):  # twice in a row, then fine again
        devices.say(**changes)
        devices.say(**changes)
        devices.say()
    assert devices.said == []


@pytest.mark.parametrize(("changes", "words", "over"), WRONG.values(), ids=WRONG.keys())
def test_nor_is_a_moment_without_it_its_end(
    changes: dict[str, object], words: str, over: str
) -> None:
    devices = Devices(4, 4, 4)
    devices.go_on(30.0, **changes)
    assert len(devices.said) == 1
    for _ in range(20):
        devices.say()
        devices.say()
        devices.say(**changes)
    assert len(devices.said) == 1


@pytest.mark.parametrize("kind", ["slow", "slowest"])
def test_slowness_is_said_after_ten_seconds(kind: str) -> None:
    devices = Devices(4, 4, 4)
    begun = devices.now
    devices.go_on(30.0, **WRONG[kind][0])
    ((at, _),) = devices.said
    assert 10.0 <= at - begun <= 10.0 + 2 * HEALTH_S


def test_a_temperature_about_the_bound_is_said_once() -> None:
    devices = Devices(4)
    for _ in range(50):
        devices.say(temperature=90.5)
        devices.say(temperature=90.5)
        devices.say(temperature=90.5)
        devices.say(temperature=88.0)
    assert len(devices.said) == 1


@pytest.mark.parametrize(
    ("bad", "between"),
    [
        ({"temperature": 91.0}, {"temperature": 88.0}),
        ({"temperature": 86.0, "limit": 0.0}, {"temperature": 83.0, "limit": 0.0}),
        ({"slowdown": 1.8}, {"slowdown": 1.4}),
        ({"one_row": 0.050}, {"one_row": 0.036}),
    ],
)
def test_what_is_a_little_better_is_neither_over_nor_said_anew(
    bad: dict[str, object], between: dict[str, object]
) -> None:
    assert Devices(4, 4).go_on(60.0, **between) == [], "it would not have been said"
    devices = Devices(4, 4)
    assert len(devices.go_on(30.0, **bad)) == 1
    assert devices.go_on(60.0, **between) == []
    assert devices.go_on(30.0, **bad) == []


def test_an_unknown_temperature_is_not_cold() -> None:
    devices = Devices(4)
    assert devices.go_on(30.0, temperature=0.0, limit=0.0) == []
    assert len(devices.go_on(30.0, temperature=99.0)) == 1
    assert devices.go_on(60.0, temperature=0.0) == [], "it is not known to have cooled down"


def test_the_reason_of_slowness_is_what_the_device_says() -> None:
    hot = Devices(4).go_on(30.0, slowdown=2.0, temperature=94.0)
    assert hot[-1].endswith("computes 2.0 times as slow as it did, and is hot (94 °C): cool it")
    held = Devices(4).go_on(30.0, slowdown=2.0, throttled=True, text="gpu is held back")
    assert "as slow as it did, and is throttled: gpu is held back" in held[-1]
    by_turns = Devices(4)
    by_turns.go_on(30.0, throttled=True, text="gpu is held back")
    by_turns.say()
    assert by_turns.watch.warning(b"1", by_turns.now) == "throttled (gpu is held back)"
    (neither,) = Devices(4).go_on(30.0, slowdown=2.0)
    assert "for a reason that it does not know" in neither


def test_a_stage_that_computes_nothing_is_neither_slow_nor_fast_again() -> None:
    devices = Devices(4, 4)
    idle = {"slowdown": 0.0, "one_row": 0.0, "few_rows": 0.0}
    assert devices.go_on(60.0, **idle) == []
    devices.go_on(30.0, slowdown=2.0)
    assert len(devices.said) == 1
    assert devices.go_on(IDLE_S / 2, **idle) == []
    assert devices.watch.warning(b"2", devices.now) == "2.0 times as slow as it was"
    (over,) = devices.go_on(300.0, **idle)
    assert "computes nothing now" in over
    assert devices.watch.warning(b"2", devices.now) == ""
    assert len(devices.go_on(30.0, slowdown=2.0)) == 1, "it is said anew when it is slow again"


@pytest.mark.parametrize("slowdown", [1.0, 1.04, 1.1, 1.25])
def test_what_nobody_would_call_slow_is_no_warning(slowdown: float) -> None:
    devices = Devices(4, 4)
    assert devices.go_on(120.0, slowdown=slowdown) == []
    devices.go_on(30.0, slowdown=2.0)
    devices.say(slowdown=slowdown)
    assert devices.watch.warning(b"2", devices.now) == "", "and it need not last until that is seen"


def test_one_slow_block_now_and_then_is_no_slowness() -> None:
    devices = Devices(4)
    devices.say(slowdown=2.0)
    devices.go_on(600.0, slowdown=0.0)
    devices.say(slowdown=2.0)
    assert devices.said == []


def test_a_slow_device_with_few_layers_holds_nobody_up() -> None:
    """Which is just what a plan gives it."""
    assert Devices(12, 12, 4).go_on(60.0, one_row=0.022) == [], "3.3 times as slow a layer"
    assert len(Devices(12, 12, 4).go_on(60.0, one_row=0.030)) == 1


def test_one_layer_cannot_be_fewer() -> None:
    (said,) = Devices(1, 1).go_on(60.0, one_row=0.1)
    assert "--layers" not in said


def test_stages_are_compared_on_segments_of_the_same_size() -> None:
    some = {"one_row": 0.0, "few_rows": 0.09}
    (said,) = Devices(4, 4).go_on(60.0, **some)
    assert "is the slowest: 3.0 times" in said, "of few rows, as one row was not computed by all"
    assert Devices(4, 4).go_on(60.0, one_row=0.02, few_rows=0.09) == []


def test_a_stage_is_not_compared_with_what_was_said_long_ago_or_by_spares() -> None:
    devices = Devices(4, 4)
    devices.go_on(30.0)
    devices.layers = (4,)
    slow = replace(FINE, one_row=0.1)
    devices.now += STALE_S
    for _ in range(20):
        devices.now += HEALTH_S
        assert devices.watch.heard(b"2", "board2", 4, slow, devices.now) == []
    spares = Devices(0, 0)
    assert spares.go_on(60.0, one_row=0.1) == []
    assert spares.watch.warning(b"2", spares.now) == ""
    assert Devices(0, 4).go_on(60.0, one_row=0.1) == []


def test_who_is_forgotten_begins_anew() -> None:
    devices = Devices(4)
    assert devices.watch.of(b"1", devices.now) is None
    devices.go_on(30.0, slowdown=2.0)
    devices.watch.forget(b"1")
    assert devices.watch.of(b"1", devices.now) is None
    assert devices.watch.warning(b"1", devices.now) == ""
    assert len(devices.go_on(30.0, slowdown=2.0)) == 1


def test_what_a_device_says_is_one_short_line() -> None:
    (said,) = Devices(4).go_on(30.0, throttled=True, text="\x1b[2J\n\u202e" + "x" * 5000)
    assert said.isprintable()
    assert len(said) < 250
    assert printable("a\tb") == "a b"
    assert printable("a\u202eb\u2066") == r"a\u202eb\u2066"
    assert len(printable("\u202e" * 999)) == TEXT_CHARS


# --- round trips ----------------------------------------------------------------------------------


def test_a_round_trip_is_the_shortest_of_the_last_ones() -> None:
    watch = RoundTrips()
    assert watch.seconds(b"a") == 0.0
    now, told = 0.0, []
    for wait in (0.9, 0.004, 0.02, 0.3, 0.01, 0.05, 0.02, 0.03):
        while not (beat := watch.beat(b"a", now, 1.5, False)).number:
            now += 0.25
        watch.back(b"a", beat.number, now + wait)
        told.append(watch.seconds(b"a"))
    expected = [0.9, 0.004, 0.004, 0.004, 0.004, 0.004, 0.01, 0.01]
    assert told == pytest.approx(expected)
    watch.forget(b"a")
    assert watch.seconds(b"a") == 0.0


def test_only_the_newest_heartbeat_counts_and_only_once() -> None:
    watch = RoundTrips()
    assert watch.beat(b"a", 0.0, 1.5, True) == Heartbeat(0, 1.5, rests=True)
    first = watch.beat(b"a", HEALTH_S, 1.5, False).number
    second = watch.beat(b"a", 2 * HEALTH_S, 1.5, False).number
    assert 0 < first < second
    for number in (0, first, second + 1, -1):
        watch.back(b"a", number, 100.0)
    watch.back(b"b", second, 100.0)
    assert watch.seconds(b"a") == 0.0
    watch.back(b"a", second, 2 * HEALTH_S + 0.5)
    watch.back(b"a", second, 2 * HEALTH_S + 0.1)
    assert watch.seconds(b"a") == 0.5


# --- in the membership ----------------------------------------------------------------------------


def status_of(ring: Membership) -> Status:
    """What a client is told."""
    (status,) = to(ring.say(b"client", StatusRequest()), b"client")
    assert isinstance(status, Status)
    return status


def test_a_status_tells_all_of_a_stage_s_health() -> None:
    ring = Membership(2)
    ring.bring_up()
    ring.join(0, name="tablet", pid=9, host="10.0.0.9", port=5009)
    ring.say(b"stage 0", replace(FINE, free=5))
    ring.say(address(2), FINE)
    ring.now += 1.5
    status = status_of(ring)
    assert (status.ready, status.stages, status.ring) == (True, 2, 1)
    assert status.up_for == pytest.approx(1.5)
    first, second, spare = status.nodes
    assert first == NodeStatus(1, 0, 1, "board1", "10.0.0.1:5001", "ready", "ready", 1.5)
    assert second == NodeStatus(
        2, 1, 2, "board2", "10.0.0.2:5002", "ready", "ready", 1.5, 60.0, 95.0, 8 << 30, 2 << 30, 0.4
    )
    assert (spare.stage, spare.name, spare.state) == (0, "tablet", "standing by")
    assert spare.free == 5


def test_a_status_tells_of_places_without_a_stage_and_of_losses() -> None:
    ring = Membership(2)
    assert status_of(ring).nodes == (NodeStatus(1, 0, 1), NodeStatus(2, 1, 2))
    ring.join(1, memory=77)
    ring.say(address(1), Loading("loading 3 of 8 layers"))
    node = status_of(ring).nodes[0]
    assert (node.state, node.words, node.memory) == ("loading", "loading 3 of 8 layers", 77)
    ring.say(address(1), replace(FINE, memory=0, free=0))
    assert ring.machine.status().nodes[0].memory == 77, "what it said when it joined"
    ring.join(2)
    ring.all_ready()
    ring.say(address(2), FINE)
    ring.say(address(2), Goodbye("out of\x1b[2J battery"))
    ring.now += 30.0
    status = status_of(ring)
    assert (status.ready, status.up_for, status.ring) == (False, 0.0, 2)
    first, second = status.nodes
    assert (first.state, first.losses) == ("waiting", 0)
    lost = NodeStatus(2, 1, 2, losses=1, last_loss="left: out of [2J battery", lost_ago=30.0)
    assert second == lost
    ring.join(2)
    ring.ready(address(2))
    (back,) = status_of(ring).nodes[1:]
    assert (back.state, back.losses, back.memory) == ("ready", 1, 0), "its health is not known yet"


def test_one_pulled_cable_is_one_loss() -> None:
    """The board is silent, comes back, and tells of the connection that broke meanwhile."""
    ring = Membership(2)
    ring.bring_up()
    for loss in (1, 2):
        while ring.machine.status().ready:
            ring.all_beat(2)
            ring.tick()
        ring.join(2)
        broke = Fault(ALL_REQUESTS, "its connection broke", ring.number(address(2)))
        ring.say(address(2), broke)
        ring.join(2)
        node = status_of(ring).nodes[1]
        assert node.losses == loss
        assert "silent" in node.last_loss, "what came first is why"
        ring.all_ready()
        assert ring.machine.status().ready


def test_a_status_counts_requests_as_it_is_told_to() -> None:
    ring = Membership(1)
    ring.machine = MembershipMachine(ring.places, HOME, TIMING, requests=lambda: (1, 3))
    status = status_of(ring)
    assert (status.running, status.waiting) == (1, 3)


def test_a_status_lists_what_runs_as_of_now() -> None:
    """At most as many as nodes are shown."""
    ring, asked = Membership(1), []

    def live(now: float) -> tuple[LiveRequest, ...]:
        asked.append(now)
        return tuple(LiveRequest(n, "adaptive", 5, 9, 2.5) for n in range(MOST_SHOWN + 3))

    ring.machine = MembershipMachine(ring.places, HOME, TIMING, live=live)
    told = status_of(ring).live
    assert told[0] == LiveRequest(0, "adaptive", 5, 9, 2.5)
    assert len(told) == MOST_SHOWN
    assert asked == [ring.now]


def test_a_status_tells_the_rows_of_the_caches() -> None:
    ring = Membership(1)
    ring.machine = MembershipMachine(ring.places, HOME, TIMING, rows_told=lambda: (1, 2, 3, 4))
    status = status_of(ring)
    assert (status.rows_live, status.rows_kept, status.rows_room, status.row_bytes) == (1, 2, 3, 4)


def test_a_status_tells_of_the_coordinator_and_of_plain_decoding() -> None:
    ring, here = Membership(1), home_status("desk", replace(FINE, temperature=44.0, text="a fan"))
    ring.machine = MembershipMachine(
        ring.places, HOME, TIMING, here=lambda: here, plain=lambda: 6.5
    )
    status = status_of(ring)
    home = status.home
    assert (home.name, home.temperature, home.warning) == ("desk", 44.0, "a fan")
    assert (home.memory, home.free) == (FINE.memory, FINE.free)
    assert status.plain == 6.5


def test_the_health_of_a_stage_is_reported_by_its_name_and_that_of_strangers_is_not() -> None:
    ring = Membership(1)
    ring.bring_up()
    said = []
    for _ in range(5):
        ring.now += HEALTH_S
        said += ring.say(address(1), replace(FINE, temperature=99.0))
        assert ring.say(b"stranger", replace(FINE, temperature=99.0)) == []
    (report,) = said
    assert isinstance(report, Log)
    assert report.text.startswith("stage 1 (board1, process 71) is hot")
    assert status_of(ring).nodes[0].warning == "hot"


def test_a_report_says_that_a_stage_shares_its_machine_with_the_coordinator() -> None:
    ring = Membership(1)
    key = asks(1).key
    ring.machine = MembershipMachine(ring.places, HOME, TIMING, own_keys=[key])
    ring.bring_up()
    said = []
    for _ in range(5):
        ring.now += HEALTH_S
        said += ring.say(address(1), replace(FINE, temperature=99.0))
    (report,) = said
    assert isinstance(report, Log)
    assert report.text.startswith("stage 1 (board1, process 71), beside the coordinator, is hot")


def test_names_of_devices_are_one_short_line() -> None:
    ring = Membership(1)
    effects = ring.say(address(1), asks(1, name="\x1b]0;title\x07" + "n" * 5000))
    texts = [e.text for e in effects if isinstance(e, Log)]
    assert texts
    assert all(text.isprintable() and len(text) < 200 for text in texts)
    status = status_of(ring)
    assert status.nodes[0].name.isprintable()
    assert len(status.nodes[0].name) < 200


def test_round_trips_are_measured_with_heartbeats() -> None:
    ring = Membership(1)
    ring.bring_up()
    for _ in range(10):
        ring.all_beat()
        beats = to(ring.tick(), address(1))
        for beat in beats:
            if isinstance(beat, Heartbeat) and beat.number:
                ring.now += 0.125
                assert ring.say(address(1), beat) == []
    assert status_of(ring).nodes[0].trip == pytest.approx(0.125)


def test_more_places_and_spares_than_a_status_holds_are_left_out() -> None:
    ring = Membership(250)
    ring.bring_up()
    for number in range(20):
        ring.say(b"spare %d" % number, asks(0, pid=number, port=6000 + number))
    status = status_of(ring)
    assert len(status.nodes) == len(status.lines) == 256


def test_what_was_said_long_ago_is_not_shown() -> None:
    devices = Devices(4, 4)
    devices.go_on(60.0, temperature=91.0)
    assert devices.watch.of(b"2", devices.now) is not None
    assert devices.watch.warning(b"2", devices.now)
    later = devices.now + STALE_S + HEALTH_S
    assert devices.watch.of(b"2", later) is None
    assert devices.watch.warning(b"2", later) == ""
