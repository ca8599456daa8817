"""Health: reports once that a device is hot, throttled or slow, and once that it is over.

The coordinator compares the figures of a device with its limits, its own best and the others'.
What lasts only for seconds is not reported.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from msgspec.structs import replace

from edgespec.machines.effects import Effect
from edgespec.ring.assignment import Member
from edgespec.ring.effects import Log
from edgespec.types.shown import BIDI
from edgespec.wire.client_messages import NodeStatus
from edgespec.wire.messages import Health, Heartbeat

HEALTH_S, RESTING_HEALTH_S = 2.0, 8.0
"""Seconds between two Health messages of a stage, and in a ring that rests."""

STALE_S = 6 * HEALTH_S
"""The age at which figures of a device are no longer shown or compared."""

TEXT_CHARS = 120
"""The longest text of another node that is shown."""

REASON_CHARS = 400
"""The same of the reason of a loss, since errors say what to do."""

LINE_CHARS = 3_000
"""The same of a line of the log, which may tell of several nodes."""

NEAR_LIMIT = 5.0
"""°C below its own limit at which a device counts as hot."""

HOT = 85.0
"""°C from which a device of unknown limit counts as hot: small boards (a Raspberry Pi at 80 to 85)
lower their clocks about there, and no device runs for long far above it."""

COOLED = 3.0
"""°C below the temperature that counts as hot at which it no longer does."""

SLOW, NOT_SLOW = 1.5, 1.3
"""A stage's time over its own best from which it is slow, and below which it no longer is."""

IDLE_S = 60.0
"""Seconds without work after which it is unknown whether a stage is still slow."""

FAR_SLOWER, NOT_FAR_SLOWER = 2.0, 1.6
"""The same, over the others' time per layer."""

HOLDS_UP = 1.25
"""A stage is reported only if it takes so many times as long for a segment as any other: a slow
one with few layers delays no other."""


def printable(text: str, most: int = TEXT_CHARS) -> str:
    """A text of another node, as one short line that a terminal can show."""
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return "".join(c if c.isprintable() else BIDI.get(ord(c), " ") for c in shown)[:most]


# --- alarms ---------------------------------------------------------------------------------------

LEAST_TIMES = 3
"""How often in a row something must be seen to be reported."""


@dataclass(slots=True)
class _Alarm:
    """Something that is reported once it has lasted, and again once it has been over as long."""

    lasts: float  # seconds until it is reported
    over_lasts: float
    is_on: bool = False
    since: float | None = None  # when the change was first seen, of those in a row
    times: int = 0

    def seen(self, bad: bool, good: bool, now: float) -> bool:
        """Note one observation, which may be neither bad nor good; returns whether the alarm
        changed."""
        if not (good if self.is_on else bad):
            self.since = None
            return False
        if self.since is None:
            self.since, self.times = now, 0
        self.times += 1
        lasts = self.over_lasts if self.is_on else self.lasts
        if now - self.since < lasts or self.times < LEAST_TIMES:
            return False
        self.is_on, self.since = not self.is_on, None
        return True

    def end(self) -> None:
        self.is_on, self.since = False, None


@dataclass(slots=True)
class _Device:
    """What is known of one device; `layers` 0: it stands by."""

    layers: int = 0
    at: float = 0.0
    health: Health | None = None
    why_throttled: str = ""
    slowdown: float = 0.0  # when it computed last
    hot: _Alarm = field(default_factory=lambda: _Alarm(4.0, 10.0))
    # Governors turn throttling on and off: its end takes longer to report.
    throttled: _Alarm = field(default_factory=lambda: _Alarm(4.0, 20.0))
    computed_at: float = 0.0
    slow: _Alarm = field(default_factory=lambda: _Alarm(10.0, 10.0))
    slowest: _Alarm = field(default_factory=lambda: _Alarm(10.0, 10.0))

    @property
    def is_slower(self) -> bool:
        """Whether it was slow, and is not yet clearly faster."""
        return self.slow.is_on and self.slowdown >= NOT_SLOW


class HealthMonitor:
    """The latest figures and the alarms of each device, by its address."""

    def __init__(self) -> None:
        self._devices: dict[bytes, _Device] = {}

    def of(self, peer: bytes, now: float) -> Health | None:
        """The device's latest figures; None if they are missing or stale."""
        device = self._devices.get(peer)
        return device.health if device and now - device.at <= STALE_S else None

    def forget(self, peer: bytes) -> None:
        """The device is gone, or becomes another stage with other times."""
        self._devices.pop(peer, None)

    def warning(self, peer: bytes, now: float) -> str:
        """What is wrong with a device, in a few words; "" if nothing is."""
        device = self._devices.get(peer)
        if device is None or self.of(peer, now) is None:
            return ""
        alarms = {
            "hot": device.hot.is_on,
            f"throttled ({device.why_throttled})": device.throttled.is_on,
            f"{device.slowdown:.1f} times as slow as it was": device.is_slower,
            "the slowest": device.slowest.is_on,
        }
        return ", ".join(words for words, is_on in alarms.items() if is_on)

    def heard(self, peer: bytes, who: str, layers: int, health: Health, now: float) -> list[Effect]:
        """Note a device's figures; returns what to report. `layers` 0: a spare."""
        device = self._devices.setdefault(peer, _Device())
        device.layers, device.at = layers, now
        device.health = health = replace(health, text=printable(health.text))
        texts = [
            _temperature_news(device, health, now),
            _throttle_news(device, health, now),
            _slow_news(device, health, now),
            self._slowest_news(peer, device, now),
        ]
        return [Log(f"{who} {text}") for text in texts if text]

    def _slowest_news(self, peer: bytes, device: _Device, now: float) -> str:
        """Against the other stages, on segments of the same size, which all have computed."""
        found = self._compared(peer, device, now)
        if found is None:
            return ""
        ratio, holds_up = found
        bad = ratio > FAR_SLOWER and holds_up > HOLDS_UP
        good = ratio < NOT_FAR_SLOWER or holds_up < 1.0
        if not device.slowest.seen(bad, good, now):
            return ""
        if not device.slowest.is_on:
            return "is no longer slower than the others by far"
        cure = "give it fewer layers (--layers)" if device.layers > 1 else "a faster one would help"
        return f"is the slowest: {ratio:.1f} times the others' time a layer; {cure}"

    def _compared(self, peer: bytes, device: _Device, now: float) -> tuple[float, float] | None:
        """A stage's time per layer over the others' median, and its whole time over the longest
        of the others'. None if there is nothing to compare."""
        others = [
            other
            for address, other in self._devices.items()
            if address != peer and other.layers and now - other.at <= STALE_S
        ]
        own = device.health
        if own is None or not device.layers:
            return None
        for size in ("one_row", "few_rows"):
            times = [(getattr(other.health, size), other.layers) for other in others]
            mine = getattr(own, size)
            if mine and times and all(seconds for seconds, _ in times):
                usual = median(seconds / layers for seconds, layers in times)
                return mine / device.layers / usual, mine / max(seconds for seconds, _ in times)
        return None


def home_status(name: str, health: Health) -> NodeStatus:
    """What a status says of the coordinator's own machine; what is not known is 0."""
    return NodeStatus(
        *(0, 0, 0),
        name=name,
        state="ready",
        words="ready",
        temperature=health.temperature,
        limit=health.limit,
        memory=health.memory,
        free=health.free,
        throttled=health.throttled,
        warning=health.text,
    )


def _temperature_news(device: _Device, health: Health, now: float) -> str:
    if not health.temperature:
        return ""
    hot_from = health.limit - NEAR_LIMIT if health.limit else HOT
    bad = health.temperature >= hot_from
    if not device.hot.seen(bad, health.temperature <= hot_from - COOLED, now):
        return ""
    if not device.hot.is_on:
        return f"has cooled down to {health.temperature:.0f} °C"
    limit = f" and slows down at {health.limit:.0f}" if health.limit else ""
    return f"is hot: it has {health.temperature:.0f} °C{limit}; cool it (fan, heat sink, shade)"


def _throttle_news(device: _Device, health: Health, now: float) -> str:
    if health.throttled:
        device.why_throttled = health.text or "it does not say why"
    if not device.throttled.seen(health.throttled, not health.throttled, now):
        return ""
    if not device.throttled.is_on:
        return "is no longer throttled"
    return f"is throttled: {device.why_throttled}; cool it, or look at its power supply"


def _slow_news(device: _Device, health: Health, now: float) -> str:
    if not health.slowdown:  # it computed nothing lately
        if not device.slow.is_on or now - device.computed_at < IDLE_S:
            return ""
        device.slow.end()
        return "computes nothing now: whether it is still slow is not known"
    device.slowdown, device.computed_at = health.slowdown, now
    bad, good = health.slowdown > SLOW, health.slowdown < NOT_SLOW
    if not device.slow.seen(bad, good, now):
        return ""
    if not device.slow.is_on:
        return "computes as fast as it did again"
    return f"computes {health.slowdown:.1f} times as slow as it did{_why_slow(device, health)}"


def _why_slow(device: _Device, health: Health) -> str:
    if device.hot.is_on:
        return f", and is hot ({health.temperature:.0f} °C): cool it"
    if device.throttled.is_on:
        return f", and is throttled: {device.why_throttled}"
    return ", for a reason that it does not know: look for other programs on it"


# --- how far away, and how often lost -------------------------------------------------------------

TRIPS = 5
"""The shortest of so many round trips is shown: the others waited for a busy loop."""


@dataclass(slots=True)
class _Trips:
    """Of one device: the number sent last and when, and the last that came back."""

    sent: float
    number: int = 0
    returned: int = 0
    latest: deque[float] = field(default_factory=lambda: deque(maxlen=TRIPS))


class RoundTrips:
    """Measures how long a control message takes to a device and back."""

    def __init__(self) -> None:
        self._trips: dict[bytes, _Trips] = {}

    def beat(self, peer: bytes, now: float, silence: float, rests: bool) -> Heartbeat:
        """The heartbeat to send now; with a number if it is time to measure again."""
        trips = self._trips.setdefault(peer, _Trips(now))
        if now - trips.sent < HEALTH_S:
            return Heartbeat(0, silence, rests=rests)
        trips.number, trips.sent = trips.number + 1, now
        return Heartbeat(trips.number, silence, rests=rests)

    def back(self, peer: bytes, number: int, now: float) -> None:
        """A heartbeat came back; only the number sent last counts, and once."""
        trips = self._trips.get(peer)
        if trips is not None and number == trips.number and trips.returned < number:
            trips.returned = number
            trips.latest.append(now - trips.sent)

    def seconds(self, peer: bytes) -> float:
        """The shortest of the latest trips; 0 if there was none."""
        trips = self._trips.get(peer)
        return min(trips.latest, default=0.0) if trips else 0.0

    def forget(self, peer: bytes) -> None:
        self._trips.pop(peer, None)


@dataclass(frozen=True, slots=True)
class _Losses:
    """Of one stage: how often its holder was lost, and the last cause with its time."""

    count: int = 0
    cause: str = ""
    at: float = 0.0


class DeviceRecords:
    """Health, round trips and losses of all devices."""

    def __init__(self) -> None:
        self.health = HealthMonitor()
        self.trips = RoundTrips()
        self._losses: dict[int, _Losses] = {}
        self._out: set[int] = set()  # stages that were lost since a ring was up

    def ring_up(self) -> None:
        """All stages are there: the next loss of any of them is another one."""
        self._out.clear()

    def lost(self, peer: bytes, stage: int, cause: str, now: float) -> None:
        """A device is gone, which was this stage or a spare (`stage` 0). What else becomes of that
        stage until a ring is up comes of the same loss, such as one cable that was pulled."""
        self.health.forget(peer)
        self.trips.forget(peer)
        if stage and stage not in self._out:
            self._out.add(stage)
            count = self._losses.get(stage, _Losses()).count + 1
            self._losses[stage] = _Losses(count, printable(cause, REASON_CHARS), now)

    def losses(self, stage: int) -> int:
        """How often that stage was lost."""
        return self._losses.get(stage, _Losses()).count

    def described(self, node: NodeStatus, member: Member | None, now: float) -> NodeStatus:
        """The status with the stage's losses and its device's health added."""
        losses = self._losses.get(node.stage, _Losses())
        ago = now - losses.at if losses.count else 0.0
        node = replace(node, losses=losses.count, last_loss=losses.cause, lost_ago=ago)
        if member is None:
            return node
        warning, trip = self.health.warning(member.peer, now), self.trips.seconds(member.peer)
        node = replace(node, warning=warning, trip=trip)
        said = self.health.of(member.peer, now)
        if said is None:
            return node
        return replace(
            node,
            temperature=said.temperature,
            limit=said.limit,
            memory=said.memory or node.memory,
            free=said.free,
            busy=said.busy,
            throttled=said.throttled,
        )
