"""Node: the I/O loop of a daemon, which owns the sockets; startup, steps, shutdown."""

from __future__ import annotations

import logging
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable

from edgespec.backends.compute import COMPUTE
from edgespec.config import Address
from edgespec.decoding.effects import AbortBlock, Renew
from edgespec.decoding.events import SegmentArrived
from edgespec.errors import ConfigError, PeerLost
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event, MessageArrived, Tick
from edgespec.net.emulated_link import Stamped
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.net.zones import with_zone
from edgespec.ring.effects import LoadBlock, Log, Stop
from edgespec.ring.events import RingBroke
from edgespec.runtime.supervisor import Nobody, Supervisor
from edgespec.runtime.worker import Perform, Worker
from edgespec.wire.segment import Segment

log = logging.getLogger("edgespec")

LONGEST_POLL = 0.5
"""Seconds after which a loop looks up even if nothing came, so that signals are seen."""


BROKEN_S = 2.0
"""Seconds that a broken connection to the next node is put up with: if that node died, the
membership says so first, and says it better."""

LOST = "its connection to the next node of the ring broke"

REACH_S = 5.0
"""So long a node tries to reach the next one of the ring before it is said that it cannot: several
attempts, each within a LAN's round trip."""


REPORTS, REPORT_S = 10, 1.0
"""Lines of log that each stage may cause at once, and the seconds until it may cause another: what
a node does again and again, because it is broken or bad, shall not fill the log."""

MOST_KINDS = 256

RENEW_S = 5.0
"""Seconds from one new ring that a node asks for because of a fault to the next one: a fault that
comes again with every ring shall not keep everybody busy with rings."""

TICK_AGAIN_S = 1.0
"""Seconds until a Tick that could not be handled is tried again."""

BUG = "it met a bug of this program, of which its log says more"
"""What people are told of an exception."""


class _Reports:
    """Counts reports by what they are about, which is what stands before the first bracket."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def may_say(self, text: str, now: float) -> bool:
        """Whether the log has room for it."""
        about = text.partition(" (")[0]
        if len(self._due) >= MOST_KINDS:
            self._due.clear()
        due = max(self._due.get(about, now), now)
        if due - now > (REPORTS - 1) * REPORT_S:
            return False
        self._due[about] = due + REPORT_S
        return True


class Node(ABC):
    """What coordinator and stage daemons share: poll → events → machines → effects → carry out."""

    def __init__(self, transport: ZmqTransport, perform: Perform) -> None:
        self.transport = transport
        self.worker = Worker(perform)
        self.workers = [self.worker]  # with those that do other work beside the models'
        self.ended: Stop | None = None
        self.supervisor: Supervisor = Nobody()
        self._reports = _Reports()
        self._renewal: tuple[float, str] | None = None  # when, and why
        self._renewed = self._no_tick_until = float("-inf")
        self.happened_at = time.monotonic()
        """When what is being handled now happened: emulated times count from there."""

    # --- what a node is -----------------------------------------------------------------------

    def admit(self, incoming: Incoming) -> bool:
        """Whether a message may be handled at all."""
        return True

    @abstractmethod
    def route(self, event: Event, now: float) -> list[Effect]:
        """Hand an event to the machine that it is for."""

    @abstractmethod
    def deadline(self) -> float | None:
        """When a machine wants a Tick."""

    @abstractmethod
    def carry_out(self, effect: Effect, now: float) -> None:
        """Carry out an effect that only this kind of node knows."""

    @abstractmethod
    def on_reached(self, now: float) -> list[Effect]:
        """The connection to the next node of the ring stands."""

    @abstractmethod
    def on_broken(self, why: str, now: float) -> list[Effect]:
        """It does not come about, or it broke and segments may have been lost with it."""

    @abstractmethod
    def renew(self, why: str, now: float) -> list[Effect]:
        """Have a new ring begun. `why` is a clause whose subject is the node."""

    @abstractmethod
    def not_carried_out(self, effect: Effect) -> list[Effect]:
        """What follows if carrying out `effect` raised, so that its request ends all the same."""

    @abstractmethod
    def farewell(self, reason: str, now: float) -> None:
        """Last messages before a good-order end."""

    # --- the loop -----------------------------------------------------------------------------

    def run(self, does: str = "waiting") -> Stop:
        """Run until a machine or a signal ends it; returns why. `does`: what it does at first."""
        self._startup()
        self.supervisor.ready(does)
        try:
            while self.ended is None:
                self._step()
        finally:
            self._shutdown()
        return self.ended

    def end(self, reason: str, failed: bool) -> None:
        """Leave the loop after this step; the first reason counts."""
        if self.ended is None:
            self.ended = Stop(reason, failed)

    def _startup(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)
        for worker in self.workers:
            self.transport.wake_on(worker.waker)
            worker.start()

    def _step(self) -> None:
        self.supervisor.beat()
        incoming = self.transport.poll(self._timeout())
        now = time.monotonic()
        events = [
            (i.at if isinstance(i, Stamped) else now, _event(i)) for i in incoming if self.admit(i)
        ]
        events += [event for worker in self.workers for event in worker.timed_events()]
        deadline = self._next_tick()
        if deadline is not None and now >= deadline:
            events.append((now, Tick()))
        for self.happened_at, event in events:
            at = self.happened_at
            self.perform_all(self._route(event, at), at)
        self._look_at_ring(now)
        self._look_at_renewal(now)

    def _next_tick(self) -> float | None:
        deadline = self.deadline()
        return None if deadline is None else max(deadline, self._no_tick_until)

    # --- bugs ---------------------------------------------------------------------------------

    def _route(self, event: Event, now: float) -> list[Effect]:
        """Whatever an event does, the process goes on: others have requests here too."""
        try:
            return self.route(event, now)
        except Exception:
            self.note_bug(event, now)
            return [Renew(BUG)]

    def note_bug(self, cause: Event | Effect, now: float) -> None:
        """To be called where the exception is caught: it goes to the log, for developers."""
        if isinstance(cause, Tick):
            self._no_tick_until = now + TICK_AGAIN_S
        what = type(getattr(cause, "message", cause)).__name__
        if self._reports.may_say(f"bug {what}", now):
            log.exception("%s could not be handled: a bug of this program", what)

    def _renew_soon(self, why: str, now: float) -> None:
        """With this step, or once the last time is long enough ago."""
        if self._renewal is None:
            self._renewal = max(now, self._renewed + RENEW_S), why

    def _look_at_renewal(self, now: float) -> None:
        if self._renewal is None or now < self._renewal[0]:
            return
        (_, why), self._renewal, self._renewed = self._renewal, None, now
        try:
            effects = self.renew(why, now)
        except Exception:
            self.note_bug(RingBroke(why), now)
            self._renew_soon(why, now)
        else:
            self.perform_all(effects, now)

    def _look_at_ring(self, now: float) -> None:
        """Whether the connection to the next node stands: who waits for what is lost with it would
        wait for ever."""
        transport = self.transport
        broke, awaited = transport.ring_broke, transport.ring_awaited
        if transport.ring_reached:
            transport.ring_reached = False
            self.perform_all(self.on_reached(now), now)
        if broke is not None and now - broke > BROKEN_S:
            transport.ring_broke = None
            self.perform_all(self.on_broken(LOST, now), now)
        elif awaited is not None and now - awaited > REACH_S:
            transport.ring_awaited = None
            why = (
                f"it cannot reach the next node of the ring, at {transport.next_node}; the devices "
                "must reach each other over TCP, on any port: look at firewalls and cables"
            )
            self.perform_all(self.on_broken(why, now), now)

    def _timeout(self) -> float:
        deadline = self._next_tick()
        if deadline is None:
            return LONGEST_POLL
        return min(max(deadline - time.monotonic(), 0.0), LONGEST_POLL)

    def perform_all(self, effects: Iterable[Effect], now: float) -> None:
        """Carry out effects in order: compute goes to the worker, the rest is for the sockets."""
        for effect in effects:
            if isinstance(effect, (*COMPUTE, LoadBlock)):
                self.worker.submit(effect, self.happened_at)
                continue
            match effect:
                case AbortBlock(job):
                    self.worker.abort(job)
                case Log(text):
                    if self._reports.may_say(text, now):
                        log.info(text)
                        self.supervisor.status(text)
                case Stop(reason, failed):
                    self.end(reason, failed)
                case Renew(why):
                    self._renew_soon(why, now)
                case _:
                    try:
                        self.carry_out(effect, now)
                    except PeerLost as lost:
                        log.debug("%s not delivered: %s", type(effect).__name__, lost)
                    except ConfigError as problem:  # an address that a peer gave
                        self._renew_soon(str(problem), now)
                    except Exception:
                        self.note_bug(effect, now)
                        self.perform_all(self.not_carried_out(effect), now)

    def _on_signal(self, number: int, frame: object) -> None:
        self.end(f"stopped by {signal.Signals(number).name}", failed=False)

    def _shutdown(self) -> None:
        reason = self.ended.reason if self.ended else "it failed"
        self.supervisor.stopping(reason)
        try:
            self.farewell(reason, time.monotonic())
        finally:
            for worker in self.workers:
                worker.stop()
            self.transport.close()


def _event(incoming: Incoming) -> Event:
    if incoming.on_ring:
        assert isinstance(incoming.message, Segment)
        return SegmentArrived(incoming.message)
    return MessageArrived(incoming.peer, incoming.message, incoming.key)


def ring_address(host: str, port: int, coordinator: str) -> Address:
    """Where a ConnectRing points: an empty host is the coordinator's."""
    return Address(with_zone(host, coordinator) if host else coordinator, port)
