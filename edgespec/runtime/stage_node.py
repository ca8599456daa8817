"""Stage node: routes messages between its sockets, the member machine and the stage machine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from edgespec.backends.compute import StageCompute
from edgespec.config import Address
from edgespec.decoding.effects import Renew, SendRing
from edgespec.decoding.events import SegmentArrived
from edgespec.decoding.stage import StageMachine
from edgespec.errors import EdgespecError
from edgespec.machines.effects import Effect, RunBlock, SendCoordinator
from edgespec.machines.events import Event, MessageArrived, Tick
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.ring.effects import (
    CloseRing,
    ConnectRing,
    DropBlock,
    FetchBlock,
    LoadBlock,
    OpenRing,
    ResetStage,
)
from edgespec.ring.events import BlockFetched, BlockLoaded, BlockLoading, LoadFailed
from edgespec.ring.health import HEALTH_S, RESTING_HEALTH_S
from edgespec.ring.member import MemberMachine
from edgespec.runtime.client import check_refusal
from edgespec.runtime.instrumentation import Instrumentation
from edgespec.runtime.node import BUG, RingNode, ring_address
from edgespec.runtime.stage_load import StageLoad
from edgespec.runtime.worker import Perform
from edgespec.types.stop_check import StopCheck
from edgespec.wire.messages import (
    Assign,
    CloseRequest,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Removed,
    Retain,
)
from edgespec.wire.snapshots import SubscribeActivity

Loader = Callable[[Assign, Callable[[str], None], Callable[[], bool]], StageCompute]
"""Builds the assigned block, and the head if that is assigned. The second argument takes the
progress in words, and raises EdgespecError once the block is no longer wanted; the third says
whether that is so."""

Fetcher = Callable[[Assign, Callable[[str], None], Callable[[], bool]], object]
"""Puts the block on this device's disk, so that a Loader needs no other node and compiles nothing.
It has the arguments of a Loader and its own thread."""

log = logging.getLogger(__name__)

FETCH_AGAIN_S, LONGEST_PAUSE_S = 10.0, 640.0
"""Seconds after which a fetch that failed is tried again; each time twice as long, up to these."""

PROGRESS_S = 0.2
"""Seconds between two reports of how far loading is."""

SPECULATIVE_LIMIT = 4_096
"""Rows that a stage holds at most beside those that are planned (Assign.rows)."""


class StageNode(RingNode):
    """One stage as a program: member and stage machines over one transport."""

    def __init__(
        self,
        transport: ZmqTransport,
        member: MemberMachine,
        coordinator: Address,
        load: Loader,
        instrumentation: Instrumentation | None = None,
        device: Callable[[], Health | None] = lambda: None,
        fetch: Fetcher = lambda assign, say, stop: None,
    ) -> None:
        """`device()`: the device's health as far as it is known; it must not wait."""
        super().__init__(transport, self._perform)
        self.member = member
        self._coordinator = coordinator
        self._load = load
        self._fetch = fetch
        self._fetches = 0
        self._instrumentation = instrumentation
        self._compute: Perform | None = None  # the worker's
        self._is_empty = False  # its block was given up
        self._keeps_tokens = False  # as the block that was loaded last has it
        self.machine: StageMachine | None = None
        """Computes here; None before the first ring."""
        self.device = device
        self.heard_at = time.monotonic()
        """When the coordinator last said anything, or this node was made."""
        self._stage_load = StageLoad()
        self._health_at = float("-inf")

    def admit(self, incoming: Incoming) -> bool:
        """Raises AccessRefused if the coordinator has removed this device."""
        if not incoming.on_ring:
            self.heard_at = time.monotonic()
        if isinstance(incoming.message, Removed):
            check_refusal(incoming.message)
        return True

    def route(self, event: Event, now: float) -> list[Effect]:
        """Segments, retained sets and ends to the stage machine; the rest to the member."""
        match event:
            case MessageArrived(_, Retain() | CloseRequest() | SubscribeActivity()):
                alive = self.member.handle(event, now)
                return alive + self._compute_on(event, now)
            case MessageArrived(_, Heartbeat(number)) if number:  # it measures the round trip
                return [*self.member.handle(event, now), SendCoordinator(Heartbeat(number))]
            case Tick():
                return self._on_tick(now)
            case MessageArrived() | BlockLoading() | BlockLoaded() | BlockFetched() | LoadFailed():
                return self.member.handle(event, now)
            case _:
                return self._compute_on(event, now)

    def _on_tick(self, now: float) -> list[Effect]:
        effects = self.member.handle(Tick(), now)
        beat, machine = SendCoordinator(Heartbeat()), self.machine
        # Send Health with a heartbeat, but not with each.
        pause = RESTING_HEALTH_S if self.member.rests else HEALTH_S
        if beat in effects and now >= self._health_at + pause:
            device = self.device()
            if device is not None:
                self._health_at = now
                effects.append(SendCoordinator(self._stage_load.health(device, now)))
        if beat in effects and machine is not None:
            told = Heartbeat(holds=machine.holds, passed=machine.passed)
            effects[effects.index(beat)] = SendCoordinator(told)
        return effects + self._compute_on(Tick(), now)

    def _compute_on(self, event: Event, now: float) -> list[Effect]:
        if self.machine is None or (self._is_empty and isinstance(event, SegmentArrived)):
            return []
        try:
            self._stage_load.ended(event, now)
            effects = self.machine.handle(event, now)
            self._stage_load.asked(effects, now)
        except Exception:
            self.note_bug(event, now)
            return self._give_up(event.segment.request if isinstance(event, SegmentArrived) else 0)
        return effects

    def _give_up(self, request: int) -> list[Effect]:
        """End this request and those whose rows are held, and ask for a new ring."""
        held = self.machine.ledgers() if self.machine else {}
        faults = [SendCoordinator(Fault(number, BUG)) for number in sorted({request, *held})]
        return [*faults, Renew(BUG)]

    def to_ring(self, event: Event, now: float) -> list[Effect]:
        return self.member.handle(event, now)

    def not_carried_out(self, effect: Effect) -> list[Effect]:
        if isinstance(effect, SendRing):  # its request would wait for it
            return self._give_up(effect.segment.request)
        return [Renew(BUG)]

    @property
    def place(self) -> Assign | None:
        """Its place in the ring; None as a spare, or before the first."""
        return self.member.place

    @property
    def is_connected(self) -> bool:
        """Whether the ring is up for it."""
        return self.transport.is_in_ring

    def deadline(self) -> float | None:
        both = (self.member.deadline(), self.machine.deadline() if self.machine else None)
        return min((d for d in both if d is not None), default=None)

    def carry_out(self, effect: Effect, now: float) -> None:
        match effect:
            case SendRing(segment):
                self.transport.send_ring(segment)
            case SendCoordinator(message):
                self.transport.send_control(b"", message)
            case OpenRing(key):
                self.open_ring(key)
            case ConnectRing(host, port, key):
                self.transport.connect_ring(ring_address(host, port, self._coordinator.host), key)
            case CloseRing():
                self.transport.close_ring()
            case FetchBlock(assign):
                self._begin_fetch(assign)
            case DropBlock():
                self._is_empty = True
                if self.machine is not None:  # it is kept: no number of a job comes twice
                    self.perform_all(self.machine.reset(), now)
                self.worker.submit(effect, self.happened_at)
            case ResetStage(assign):
                self.perform_all(self._reset(assign), now)
            case _:
                raise TypeError(f"a stage carries out no {type(effect).__name__}")

    def _reset(self, assign: Assign) -> list[Effect]:
        """Begin a new ring, in which the loaded block is this stage."""
        self._is_empty = False
        self._stage_load.take_place(assign.block)
        is_first, is_last = assign.stage == 1, assign.stage == assign.stages
        row_limit = assign.rows + SPECULATIVE_LIMIT
        place = {"is_first": is_first, "is_last": is_last, "keeps_tokens": self._keeps_tokens}
        if self.machine is None:
            self.machine = StageMachine(row_limit=row_limit, **place)
            return []
        self.machine.take_place(row_limit=row_limit, **place)
        return self.machine.reset()

    def farewell(self, reason: str, now: float) -> None:
        self.perform_all([SendCoordinator(Goodbye(reason))], now)

    def _begin_fetch(self, assign: Assign | None) -> None:
        self._fetches += 1
        if assign is not None:
            arguments = (assign, self._fetches)
            # A daemon thread: neither the ring nor the end of the program waits for it.
            threading.Thread(
                target=self._fetch_block, args=arguments, name="edgespec-fetch", daemon=True
            ).start()

    def _fetch_block(self, assign: Assign, number: int) -> None:
        def stop() -> bool:
            return self._fetches != number or self.ended is not None

        pause = FETCH_AGAIN_S
        while not stop():
            started = time.monotonic()
            try:
                self._fetch(assign, self._progress(stop), stop)
            except Exception as problem:  # the ring goes on as it is: there is time to try again
                if stop():
                    return
                log.warning("cannot prepare for stage %d: %s", assign.stage, problem)
                self.worker.post(BlockLoading(f"cannot prepare for another place: {problem}"))
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)  # a disk may stay full
            else:
                self.worker.post(BlockFetched(assign, time.monotonic() - started))
                return

    def _progress(self, stop: Callable[[], bool]) -> Callable[[str], None]:
        """Takes the progress of a block; it raises EdgespecError once `stop()` is true."""
        said = float("-inf")

        def progress(text: str) -> None:
            nonlocal said
            if stop():
                raise EdgespecError("loading was given up")
            if time.monotonic() - said >= PROGRESS_S:
                said = time.monotonic()
                self.worker.post(BlockLoading(text))

        return progress

    # --- in the worker's thread ---------------------------------------------------------------

    def _perform(self, effect: Effect, stop: StopCheck) -> Event | None:
        if isinstance(effect, LoadBlock):
            return self._load_block(effect.assign, stop)
        if isinstance(effect, DropBlock):
            self._compute = None
            return None
        if self._compute is None and not isinstance(effect, RunBlock):
            return None  # it was for a block that is gone
        assert self._compute is not None, "compute comes after the block is loaded"
        return self._compute(effect, stop)

    def _load_block(self, assign: Assign, stop: Callable[[], bool]) -> Event:
        self._compute = None  # there may be no memory for two blocks
        started = time.monotonic()
        loaded = self._load(assign, self._progress(stop), stop)
        self._compute, self._keeps_tokens = loaded.perform, loaded.keeps_tokens
        if self._instrumentation is not None:
            self._compute = self._instrumentation.equip(assign, self._compute, self)
        return BlockLoaded(time.monotonic() - started)
