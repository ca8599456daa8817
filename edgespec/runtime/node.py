"""Ring node: the I/O loop of a daemon, which owns the sockets: startup, steps, shutdown."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import nullcontext

from edgespec.backends.charged_time import LoopTime, is_charged
from edgespec.backends.compute import COMPUTE
from edgespec.config import Address
from edgespec.decoding.effects import AbortBlock, Draft, Renew, RunHead, SendRing
from edgespec.decoding.events import SegmentArrived
from edgespec.errors import ConfigError, PeerLost
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event, MessageArrived, Tick
from edgespec.net.emulated_link import Stamped
from edgespec.net.slowness import slowness
from edgespec.net.sockets import with_zone
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.ring.effects import LoadBlock, Log, Stop
from edgespec.ring.events import ControlEnded, RingBroke, RingFaulty, RingReached
from edgespec.ring.health import LINE_CHARS, printable
from edgespec.runtime.own_time import OwnTime
from edgespec.runtime.worker import Perform, Worker
from edgespec.wire.segment import Segment

log = logging.getLogger(__name__)

Handle = Callable[[Event, float], list[Effect]]

LONGEST_POLL = 5.0
"""The longest wait for messages: a watchdog wants to see the loop turn."""

LOOK_S = 0.5
"""The same while something is to last no longer than its limit."""

BROKEN_S = 2.0
"""Seconds until a broken connection to the next node ends the ring: if that node died, the
membership finds out first, and its message names the stage."""

LOST = "its connection to the next node of the ring broke"

REACH_S = 5.0
"""Seconds in which a node must reach the next one of the ring: several attempts, each within a
LAN's round trip. More where all is slower."""

BURST, LINE_S = 10, 1.0
"""Log lines of one subject that may come at once, and the seconds until one more may: a node that
repeats itself because it is broken or hostile must not fill the log."""

MOST_SUBJECTS = 256

RENEW_S = 5.0
"""Seconds between two new rings that a node asks for because of a fault: a fault that comes back
with every ring must not keep all nodes busy with new rings."""

TICK_AGAIN_S = 1.0
"""Seconds until a Tick that could not be handled is tried again."""

_FOR_WORKER = (*COMPUTE, LoadBlock)
_JOINED = (RunHead, Draft)
"""Effects of which the worker makes one job if it has several."""

BUG = "it met a bug of this program, of which its log says more"
"""The reason of an exception, for users."""


class _LogLimit:
    """Limits log lines by subject, which is the text before the first bracket."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def allows(self, text: str, now: float) -> bool:
        subject = text.partition(" (")[0]
        if len(self._due) >= MOST_SUBJECTS:
            self._due.clear()
        due = max(self._due.get(subject, now), now)
        if due - now > (BURST - 1) * LINE_S:
            return False
        self._due[subject] = due + LINE_S
        return True


class Supervisor:
    """Learns how a node is, such as a service manager does; this base class ignores it.

    Called from a node's I/O loop; no method may wait or raise.
    """

    def ready(self, status: str) -> None:
        """The loop begins."""

    def status(self, text: str) -> None:
        """What the node does now."""

    def beat(self) -> None:
        """The loop has turned."""

    def leaving(self, seconds: float) -> None:
        """The node will end, after so many seconds at most."""

    def stopping(self, reason: str) -> None:
        """The node is about to end."""


class RingNode(ABC):
    """What coordinator and stage daemons share: poll → events → machines → effects → carry out."""

    def __init__(self, transport: ZmqTransport, perform: Perform) -> None:
        self.transport = transport
        self.worker = Worker(perform)
        self.workers = [self.worker]  # with those that do other work beside the models'
        self.ended: Stop | None = None
        self.supervisor = Supervisor()
        self._log_limit = _LogLimit()
        self._time = OwnTime()
        self._renewal: tuple[float, Renew] | None = None  # when, and why
        self._renewed = self._no_tick_until = float("-inf")
        self.happened_at = time.monotonic()
        """When what is being handled now happened: emulated times count from there."""
        self._loop: LoopTime | None = None
        self._is_computing: Callable[[], bool] = lambda: False

    # --- what each kind of node does ----------------------------------------------------------

    def admit(self, incoming: Incoming) -> bool:
        """Whether a message may be handled at all."""
        return True

    @abstractmethod
    def route(self, event: Event, now: float) -> list[Effect]:
        """Hand an event to the machine that it is for."""

    @abstractmethod
    def to_ring(self, event: Event, now: float) -> list[Effect]:
        """Hand an event to the machine of this node's part in the ring."""

    @abstractmethod
    def deadline(self) -> float | None:
        """When a machine wants a Tick."""

    @abstractmethod
    def carry_out(self, effect: Effect, now: float) -> None:
        """Carry out an effect that only this kind of node knows."""

    @abstractmethod
    def not_carried_out(self, effect: Effect) -> list[Effect]:
        """What follows if carrying out `effect` raised, so that its request ends all the same."""

    @abstractmethod
    def farewell(self, reason: str, now: float) -> None:
        """Send the last messages before a good-order end."""

    # --- the loop -----------------------------------------------------------------------------

    def run(self, status: str = "waiting") -> Stop:
        """Run until a machine or a signal ends it; returns why. `status`: what it does at first."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)
            # One that comes just before the poll is heard by it, too, and not after a long one.
            signal.set_wakeup_fd(self.worker.bell.fileno(), warn_on_full_buffer=False)
        for worker in self.workers:
            self.transport.wake_on(worker.waker)
            worker.start()
        self.supervisor.ready(status)
        try:
            while self.ended is None:
                self.step()
        finally:
            self._shutdown()
        return self.ended

    def charge_loop(self, loop: LoopTime, is_computing: Callable[[], bool]) -> None:
        """From now on events are taken up, and what comes of them leaves, when an emulated loop
        would have; `is_computing`: whether the worker is at a job, as charged."""
        self._loop, self._is_computing = loop, is_computing

    def end(self, reason: str, failed: bool) -> None:
        """Leave the loop after this step; the first reason counts."""
        if self.ended is None:
            self.ended = Stop(reason, failed)
            self.worker.wake_loop()

    def step(self) -> None:
        self.supervisor.beat()
        longest = LOOK_S if self._has_limits else LONGEST_POLL
        timeout = min(max(self._next_tick() - self._time.now(), 0.0), longest)
        incoming = self.transport.poll(timeout)
        now = self._time.turned(timeout)
        read = self._time.turned_at
        events = [
            (i.at if isinstance(i, Stamped) else read, _event(i), i.ring_key)
            for i in incoming
            if self.admit(i)
        ]
        done = (event for worker in self.workers for event in worker.timed_events())
        events += [(at, event, "") for at, event in done]
        if now >= self._next_tick():
            events.append((read, Tick(), ""))
        if any(isinstance(one, Stamped) for one in incoming):
            events.sort(key=lambda event: event[0])  # as they happened on the emulated devices
        # What several events ask of the models may be one job.
        with self.worker.gathering() if len(events) > 1 else nullcontext():
            for self.happened_at, event, ring_key in events:
                if ring_key and ring_key != self.transport.ring_key:
                    continue  # what was read with it has begun another ring
                self._take(event)
        self._look_at_ring(read)
        self._look_at_renewal(now)

    def _take(self, event: Event) -> None:
        """Hand on an event, and carry out what comes of it."""
        loop = self._loop if is_charged(event) else None
        if loop is not None:
            self.happened_at = loop.starts(self.happened_at)
        at = self._time.of(self.happened_at)
        effects = self.guarded(self.route, event, at)
        if loop is not None:
            beside = self._is_computing()
            self.happened_at = loop.ends(event, effects, self.happened_at, beside=beside)
        self.perform_all(effects, at)

    def _on_signal(self, number: int, frame: object) -> None:
        self.leave(f"stopped by {signal.Signals(number).name}")

    def leave(self, reason: str) -> None:
        """End in good order, as a signal asks."""
        self.end(reason, failed=False)

    def _shutdown(self) -> None:
        reason = self.ended.reason if self.ended else "it failed"
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
        self.supervisor.stopping(reason)
        try:
            self.farewell(reason, self._time.now())
        finally:
            for worker in self.workers:
                worker.stop()
            self.transport.close()

    def _next_tick(self) -> float:
        deadline = self.deadline()
        return math.inf if deadline is None else max(deadline, self._no_tick_until)

    # --- bugs ---------------------------------------------------------------------------------

    def guarded(self, handle: Handle, event: Event, now: float) -> list[Effect]:
        """Whatever an event does, the process goes on: it has other requests too."""
        try:
            return handle(event, now)
        except Exception:
            self.note_bug(event, now)
            return [Renew(BUG)]

    def note_bug(self, cause: Event | Effect, now: float) -> None:
        """Log the exception that is being handled."""
        if isinstance(cause, Tick):
            self._no_tick_until = now + TICK_AGAIN_S
        what = type(getattr(cause, "message", cause)).__name__
        if self._log_limit.allows(f"bug {what}", now):
            log.exception("%s could not be handled: a bug of this program", what)

    def renew_soon(self, why: Renew, now: float) -> None:
        """Have a new ring begun, but not sooner than RENEW_S after the last time."""
        if self._renewal is None:
            self._renewal = max(now, self._renewed + RENEW_S), why

    def open_ring(self, key: str) -> None:
        """A new ring begins, in which the faults of the one before count no more."""
        self._renewal = None
        self.transport.open_ring(key)

    def _look_at_renewal(self, now: float) -> None:
        if self._renewal is not None and now >= self._renewal[0]:
            (_, why), self._renewal, self._renewed = self._renewal, None, now
            self._tell_ring(RingFaulty(why.why, why.by_sender), now)

    # --- the connection to the next node ------------------------------------------------------

    def _tell_ring(self, event: Event, now: float) -> None:
        self.perform_all(self.guarded(self.to_ring, event, now), now)

    @property
    def _has_limits(self) -> bool:
        """Whether something may last too long of which no message tells."""
        ring = self.transport
        since = self._renewal, ring.ring_broke, ring.ring_awaited
        return any(one is not None for one in since)

    def _look_at_ring(self, read: float) -> None:
        """Notice a connection to the next node that stands, broke or does not come about, one of
        the control channel that ended, and segments that came and cannot be read: what is lost with
        it would be waited for without end.
        `read`: when messages were read last (time.monotonic)."""
        transport, now = self.transport, read - self._time.stood_still
        broke, awaited = transport.ring_broke, transport.ring_awaited
        if transport.ring_fault:
            self.renew_soon(Renew(transport.ring_fault, by_sender=True), now)
            transport.ring_fault = ""
        if transport.control_ended:
            transport.control_ended = False
            self._tell_ring(ControlEnded(), now)
        if transport.ring_reached:
            transport.ring_reached = False
            self._tell_ring(RingReached(), now)
        if broke is not None and read - broke > BROKEN_S:
            transport.ring_broke = None
            self._tell_ring(RingFaulty(LOST), now)
        elif awaited is not None and read - awaited > REACH_S * slowness():
            transport.ring_awaited = None
            why = (
                f"it cannot reach the next node of the ring, at {transport.next_node}; the devices "
                "must reach each other over TCP, on any port: look at firewalls and cables"
            )
            self._tell_ring(RingBroke(why), now)

    # --- the log ------------------------------------------------------------------------------

    def note(self, text: str, now: float) -> bool:
        """Write a line to the log, if there were not too many of its kind; returns whether. What
        peers say in it may have any length."""
        text = printable(text, LINE_CHARS)
        is_due = self._log_limit.allows(text, now)
        if is_due:
            log.info(text)
        return is_due

    # --- effects ------------------------------------------------------------------------------

    def perform_all(self, effects: Iterable[Effect], now: float) -> None:
        """Carry out effects in order: compute goes to the worker, the rest is for the sockets."""
        every = list(effects)
        if len(every) > 1 and sum(isinstance(effect, _JOINED) for effect in every) > 1:
            with self.worker.gathering():
                self._perform_each(every, now)
        else:
            self._perform_each(every, now)

    def _perform_each(self, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, _FOR_WORKER):
                self.worker.submit(effect, self.happened_at)
                continue
            match effect:
                case AbortBlock(job, request):
                    self.worker.abort(job, request, self.happened_at)
                case Log(text):
                    if self.note(text, now):
                        self.supervisor.status(text)
                case Stop(reason, failed):
                    self.end(reason, failed)
                case Renew():
                    self.renew_soon(effect, now)
                case _:
                    try:
                        self.carry_out(effect, now)
                    except PeerLost as lost:
                        log.debug("%s not delivered: %s", type(effect).__name__, lost)
                        if isinstance(effect, SendRing):
                            self.renew_soon(Renew(str(lost)), now)
                    except ConfigError as problem:  # an address that a peer gave
                        self.renew_soon(Renew(str(problem)), now)
                    except Exception:
                        self.note_bug(effect, now)
                        self.perform_all(self.not_carried_out(effect), now)


def _event(incoming: Incoming) -> Event:
    if incoming.on_ring:
        assert isinstance(incoming.message, Segment)
        return SegmentArrived(incoming.message)
    return MessageArrived(incoming.peer, incoming.message, incoming.key)


def ring_address(host: str, port: int, coordinator: str) -> Address:
    """Where a ConnectRing points: an empty host is the coordinator's."""
    return Address(with_zone(host, coordinator) if host else coordinator, port)
