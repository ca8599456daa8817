"""Member machine: a stage's way into the ring, and its watch over the coordinator."""

from __future__ import annotations

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
from edgespec.machines.events import (
    BlockLoaded,
    BlockLoading,
    Event,
    LoadFailed,
    MessageArrived,
    Tick,
)
from edgespec.machines.membership import ALL_REQUESTS
from edgespec.wire.messages import (
    Assign,
    Connect,
    Fault,
    Goodbye,
    Heartbeat,
    Join,
    Loading,
    Ready,
    Refuse,
)

REPORT_S = 2.0
"""Seconds between two notes about how far a long wait is."""


class MemberMachine:
    """Asks for a place until it gets one, loads, connects; ends when the coordinator is gone."""

    def __init__(self, join: Join, coordinator: str, wait: float, timing: Timing) -> None:
        """`wait`: seconds to keep asking a coordinator that does not answer."""
        self._join = join
        self._coordinator = coordinator
        self._wait = wait
        self._timing = timing
        self._started: float | None = None
        self._heard: float | None = None
        self._assigned = False
        self._next = 0.0
        self._reported = float("-inf")

    def deadline(self) -> float | None:
        """When to call with Tick next."""
        return self._next

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event; the first Tick starts it."""
        match event:
            case Tick():
                return self._on_tick(now)
            case MessageArrived(_, message):
                if self._heard is None:
                    self._next = now  # from now on it beats, instead of asking
                self._heard = now
                return self._on_message(message, now)
            case BlockLoading(text):
                return self._on_loading(text, now)
            case BlockLoaded(seconds):
                loaded = f"layers loaded in {seconds:.1f} s; waiting for the other stages"
                return [SendCoordinator(Ready(seconds)), Report(loaded)]
            case LoadFailed(reason):
                return [SendCoordinator(Fault(ALL_REQUESTS, reason)), Stop(reason, failed=True)]
            case _:
                raise LocalProtocolError(f"a member cannot handle {type(event).__name__}")

    def _on_message(self, message: object, now: float) -> list[Effect]:
        match message:
            case Assign() if not self._assigned:
                self._assigned = True
                self._reported = now
                layers = f"layers {message.first} to {message.end - 1}"
                text = f"joined as stage {message.stage} of {message.stages}: loading {layers}"
                return [Report(text), OpenRing(message.ring_key), LoadBlock(message)]
            case Connect(host, port):
                return [ConnectRing(host, port), Report("the ring is up")]
            case Refuse(reason):
                return [Stop(f"the coordinator refused: {reason}", failed=True)]
            case Goodbye(reason):
                return [Stop(f"the coordinator ended the ring: {reason}", failed=True)]
        return []

    def _on_loading(self, text: str, now: float) -> list[Effect]:
        effects: list[Effect] = [SendCoordinator(Loading(text))]
        if now - self._reported >= REPORT_S:
            self._reported = now
            effects.append(Report(text))
        return effects

    def _on_tick(self, now: float) -> list[Effect]:
        if self._started is None:
            self._started = self._next = now
        if now < self._next:
            return []
        if self._heard is None:
            return self._ask(now, now - self._started)
        self._next = now + self._timing.beat
        silent = now - self._heard
        if silent > self._timing.silence:
            reason = f"the coordinator at {self._coordinator} has been silent for {silent:.1f} s"
            return [Stop(reason, failed=True)]
        return [SendCoordinator(Heartbeat())]

    def _ask(self, now: float, waited: float) -> list[Effect]:
        if waited > self._wait:
            return [
                Stop(
                    f"no coordinator answered at {self._coordinator} within {self._wait:.0f} s; "
                    "is `edgespec serve` running there, has it finished loading, and is the port "
                    "open?",
                    failed=True,
                )
            ]
        self._next = now + self._timing.retry
        effects: list[Effect] = [SendCoordinator(self._join)]
        if waited >= self._timing.retry and now - self._reported >= REPORT_S:
            self._reported = now
            text = f"waiting for the coordinator at {self._coordinator} ({waited:.0f} s)"
            effects.append(Report(text))
        return effects
