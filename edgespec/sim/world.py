"""World: a whole ring in virtual time; machines, computes and links, one event at a time.

Durations and latencies say what happens next. Everything follows from the arguments: two equal
worlds run alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add

from edgespec.backends.base import BlockBackend, Head
from edgespec.backends.compute import COMPUTE, CoordinatorCompute, StageCompute
from edgespec.backends.emulated import Perform
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import AbortBlock, EncodePrompt, Renew, SendRing
from edgespec.decoding.events import SegmentArrived, StageBeat
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.grower import TreeGrower
from edgespec.machines.effects import Effect, SendCoordinator, SendPeer, SendStages
from edgespec.machines.events import Event, MessageArrived, RingDown, RingUp, Tick
from edgespec.sim.clock import Booking, Clock
from edgespec.sim.durations import Durations
from edgespec.sim.links import Network
from edgespec.sim.wires import Wires
from edgespec.sim.worker import Turns, VirtualLoop, VirtualWorker
from edgespec.wire.client_messages import Submit
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment

CLIENT = b"client"

BEAT_S, RENEW_S, RENEWAL_S = 1.0, 5.0, 0.1
"""Seconds between two beats of a stage, at least between two new rings that a node asks for, and
until such a ring is up."""


@dataclass(frozen=True, slots=True)
class CoordinatorParts:
    """What the coordinator's device holds: the output head, unless the last stage does, and the
    draft source, if any."""

    head: Head | None
    draft: TreeGrower | None


@dataclass(frozen=True, slots=True)
class StageParts:
    """One stage as a ring starts with it; `head`: if the last one holds it."""

    machine: StageMachine
    block: BlockBackend
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class TimedReply:
    """A message to a client and when it left, in virtual seconds."""

    at: float
    message: Message


class World:
    """A ring of one coordinator and N stages; `submit`, `run`, then read `replies`.

    `make_stages` is called for every ring, from which the stages that are gone take their place, as
    all are before the first; the others forget what they had. `wires`: the messages under way.
    """

    worker_kind: type[VirtualWorker] = VirtualWorker

    def __init__(
        self,
        coordinator: CoordinatorMachine,
        device: CoordinatorParts,
        make_stages: Callable[[], Sequence[StageParts]],
        durations: Durations,
        network: Network,
        seed: int = 0,
        *,
        with_stage: int = 0,
    ) -> None:
        """`with_stage`: the stage that shares the coordinator's device; 0: none."""
        self.coordinator = coordinator
        self.draft = device.draft
        self.replies: list[TimedReply] = []
        self.is_up = False
        self.stages: list[StageParts] = []
        self._make_stages = make_stages
        self._durations = durations
        self._clock = Clock()
        self.wires = self._make_wires(network, random.Random(f"{seed} world"))
        self._tick: Booking | None = None
        self._beats: Booking | None = None
        self._renewed = float("-inf")
        self._busy = [0.0] * len(network.ring)
        self._turns = [Turns() for _ in network.ring]
        self._turns[with_stage] = self._turns[0]
        compute = CoordinatorCompute(device.head, device.draft)
        self._head = self._worker(0, compute.perform, durations.nodes[0].seconds)
        self._loop = VirtualLoop(
            *(durations.loop, self._clock, self._turns[0], self._head),
            lambda event: self.coordinator.handle(event, self.now),
            partial(self._take, 0),
        )
        self._workers: list[VirtualWorker] = []
        self._gone: set[int] = set(range(1, len(network.ring)))
        self._clock.book(0.0, self._ring_up)

    # --- using it -----------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._clock.now

    def submit(self, submit: Submit, at: float = 0.0) -> None:
        """Hand a request to the coordinator at `at` virtual seconds."""
        self._clock.book(at, self._told, submit)

    def step(self, until: float | None = None) -> bool:
        """Let the next thing happen; False if nothing is left (up to `until` virtual seconds)."""
        return self._clock.step(until)

    def run(self, until: float | None = None) -> None:
        """Let everything happen (up to `until` virtual seconds) until nothing is left to do."""
        while self.step(until):
            pass

    @property
    def busy_seconds(self) -> list[float]:
        """How long each node has computed: the coordinator's, then the stages'."""
        present = [worker.busy for worker in self._workers] or [0.0] * (len(self._busy) - 1)
        return [self._head.busy, *map(add, self._busy[1:], present)]

    @property
    def loop_seconds(self) -> float | None:
        """How long D0's own loop has worked; None if it takes no time."""
        return None if self._loop.time is None else self._loop.time.busy

    # --- what happens -------------------------------------------------------------------------

    def _make_wires(self, network: Network, rng: random.Random) -> Wires:
        return Wires(network, rng, self._clock, self._durations.message_bytes, self._arrived)

    def _told(self, message: Message) -> None:
        self._handle(0, MessageArrived(CLIENT, message))

    def _arrived(self, node: int, message: Message) -> None:
        if isinstance(message, Segment):
            if node == 0:
                segments = self.wires.segments
                segments.pop(message.header.seq, None)
                if not segments and self._beats is not None:
                    self._beats.cancel()
                    self._beats = None
            self._handle(node, SegmentArrived(message))
        else:
            self._handle(node, MessageArrived(b"", message))

    def _computed(self, node: int, effect: Effect, event: Event | None) -> None:
        if event is not None:
            self._handle(node, event)

    def _encoded(self, effect: EncodePrompt) -> None:
        self._handle(0, self.coordinator.encode(effect))

    def _ticked(self) -> None:
        self._tick = None
        self._handle(0, Tick())

    def _end_ring(self, seconds: float, why: RingDown) -> None:
        self.is_up = False
        self.wires.cut()
        self._clock.book(self.now + seconds, self._ring_up)
        self._handle(0, why)

    def _renew(self, ring: int, why: str) -> None:
        if ring == self.wires.rings and self.is_up:
            self._renewed = self.now
            self._end_ring(RENEWAL_S, RingDown(why))

    def _book_beat(self) -> None:
        if self._beats is None:
            self._beats = self._clock.book(self.now + BEAT_S, self._beat)

    def _beat(self) -> None:
        """The stages say where the segments are, as long as there are any."""
        self._beats = None
        for number, stage in enumerate(self.stages, 1):
            if number not in self._gone:
                machine = stage.machine
                self._handle(0, StageBeat(number, machine.holds, machine.passed))
        if self.wires.segments:
            self._book_beat()

    def _ring_up(self) -> None:
        fresh = list(self._make_stages())
        if not self.stages:
            self.stages = fresh.copy()
            self._workers = [self._stage_worker(number) for number in sorted(self._gone)]
        for number, stage in enumerate(fresh, 1):
            if number not in self._gone:
                self._dispatch(number, self.stages[number - 1].machine.reset())
                continue
            self.stages[number - 1] = stage
            self._busy[number] += self._workers[number - 1].busy
            self._workers[number - 1] = self._stage_worker(number)
        self._gone.clear()
        self.wires.mend()
        self.is_up = True
        self._handle(0, RingUp())

    def _stage_worker(self, number: int) -> VirtualWorker:
        stage, seconds = self.stages[number - 1], partial(self._stage_seconds, number)
        return self._worker(number, StageCompute(stage.block, stage.head).perform, seconds)

    def _worker(
        self, node: int, perform: Perform, seconds: Callable[[Effect, Event | None], float]
    ) -> VirtualWorker:
        return self.worker_kind(
            *(node, self._clock, perform, seconds, self._durations.nodes[node].parts),
            *(self._computed, self._turns[node]),
            at_start=not node,
        )

    def _stage_seconds(self, number: int, effect: Effect, done: Event | None) -> float:
        return self._durations.nodes[number].seconds(effect, done)

    # --- machines -----------------------------------------------------------------------------

    def _handle(self, node: int, event: Event) -> None:
        if node == 0:
            self._loop.add(event)
        else:
            self._take(node, self.stages[node - 1].machine.handle(event, self.now))

    def _take(self, node: int, effects: list[Effect]) -> None:
        """An event was handled there."""
        self._dispatch(node, effects)
        if node == 0:
            self._book_tick()

    def _book_tick(self) -> None:
        deadline = self.coordinator.deadline()
        if self._tick is not None and self._tick.at != deadline:
            self._tick.cancel()
            self._tick = None
        if self._tick is None and deadline is not None:
            self._tick = self._clock.book(deadline, self._ticked)

    def _dispatch(self, node: int, effects: Iterable[Effect]) -> None:
        with self._turns[node].gathering():
            for effect in effects:
                self._carry_out(node, effect)

    def _carry_out(self, node: int, effect: Effect) -> None:
        match effect:
            case SendRing(segment):
                if node == 0 and self.is_up:
                    self._book_beat()
                self.wires.send_on(node, segment)
            case SendStages(message):
                self.wires.send_stages(message)
            case SendCoordinator(message):
                self.wires.send_coordinator(node, message)
            case SendPeer(_, message):
                self.replies.append(TimedReply(self.now, decode(encode(message))))
            case Renew(why):
                at = max(self.now, self._renewed + RENEW_S)
                self._clock.book(at, self._renew, self.wires.rings, f"V{node} was lost: {why}")
            case EncodePrompt():  # beside all else, and of toy prompts: it is charged nothing
                self._clock.book(self.now, self._encoded, effect)
            case AbortBlock(job, request):
                self._workers[node - 1].abort(job, request)
            case _ if isinstance(effect, COMPUTE):
                (self._workers[node - 1] if node else self._head).add(effect)
            case _:
                raise TypeError(f"a simulated ring carries out no {type(effect).__name__}")
