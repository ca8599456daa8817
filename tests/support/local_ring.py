"""Local ring: coordinator and stages in one thread of one process.

The same machines, codec and compute as in the daemons; only sockets, threads and clocks are
missing. What happens next is chosen among everything that could (`Step`), so that a test can
play any timing; `run` plays lock-step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgespec.backends.compute import COMPUTE, CoordinatorCompute, StageCompute
from edgespec.backends.jobs import events_of, failure
from edgespec.backends.waiting import Waiting
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import AbortBlock, EncodePrompt, Renew, RunHead, SendRing
from edgespec.decoding.events import SegmentArrived
from edgespec.decoding.stage import StageMachine
from edgespec.errors import EdgespecError, RequestFailed
from edgespec.machines.effects import Effect, RunBlock, SendCoordinator, SendPeer, SendStages
from edgespec.machines.events import Event, MessageArrived, RingDown, RingUp
from edgespec.wire.client_messages import Cancel, Failed, Finished, Submit
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment

CLIENT = b"local"


class _Machine(Protocol):
    def handle(self, event: Event, now: float) -> list[Effect]: ...


class InprocLink:
    """A one-way link between two machines of this process, first in, first out."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def send(self, message: Message) -> None:
        """Encode a message and put it behind those on the way."""
        self._frames.append(encode(message))

    def receive(self, index: int = 0) -> Message:
        """Take the message at `index` of those on the way (the oldest) and decode it."""
        frame = self._frames[index]
        del self._frames[index]
        return decode(frame)

    def waiting(self) -> list[Message]:
        """The messages on the way, the oldest first."""
        return [decode(frame) for frame in self._frames]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that could happen next: the oldest (or `index`-th) item at a place is taken.

    `kind`: "ring" (a segment arrives at `node`), "control" (a message arrives at `node`), "work"
    (`node` carries out compute effects). Node 0 is the coordinator, node s stage s.
    """

    kind: str
    node: int
    index: int = 0


@dataclass(slots=True)
class _Node:
    machine: _Machine
    compute: StageCompute | CoordinatorCompute
    ring: InprocLink = field(default_factory=InprocLink)
    control: InprocLink = field(default_factory=InprocLink)
    work: Waiting = field(default_factory=Waiting)
    # With the request whose rows are left out; None: the whole job.
    aborted: set[tuple[int, int | None]] = field(default_factory=set)


class LocalRing:
    """A whole ring in this thread; `ask` runs one prompt to its end."""

    def __init__(
        self,
        coordinator: CoordinatorMachine,
        head: CoordinatorCompute,
        stages: Sequence[tuple[StageMachine, StageCompute]],
    ) -> None:
        self.nodes = [_Node(coordinator, head)] + [_Node(m, c) for m, c in stages]
        self.coordinator = coordinator
        self.stages = [machine for machine, _ in stages]
        self.replies: list[Message] = []
        self.now = 0.0
        self.renewal = ""
        """Why a node wants a new ring; `run` sees to it."""
        self.dispatch(0, coordinator.handle(RingUp(), self.now))

    # --- asking -------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """Hand a request to the coordinator."""
        self._tell_coordinator(submit)

    def cancel(self, tag: int) -> None:
        """Cancel a request."""
        self._tell_coordinator(Cancel(tag))

    def ask(self, submit: Submit) -> Finished:
        """Run one request to its end in lock-step; raises RequestFailed with its reason."""
        self.submit(submit)
        self.run()
        reply = next(
            m for m in self.replies if isinstance(m, Finished | Failed) and m.tag == submit.tag
        )
        if isinstance(reply, Failed):
            raise RequestFailed(reply.reason)
        return reply

    def run(self) -> None:
        """Run in lock-step until nothing is left to do: the time of decoding.flights.RingClock.

        In every step each stage computes one segment, which takes it that step whatever the rows,
        and hands it on; the coordinator takes no time at all.
        """
        while self.renewal or any(True for _ in self.steps()):
            self.now += 1.0
            if self.renewal:
                self.lose(self.renewal)
                self.renewal = ""
                self.mend()
            self._settle(0, whole=True)
            # The last stage first, so that a segment moves one stage a step.
            for number in range(len(self.nodes) - 1, 0, -1):
                self._settle(number, whole=False)

    def _settle(self, number: int, *, whole: bool) -> None:
        """Let a node do what it has: all of it, or everything up to its next finished segment."""
        node = self.nodes[number]
        while True:
            if node.control:
                self.take(Step("control", number))
            elif node.ring:
                self.take(Step("ring", number))
            elif node.work:
                _, effect = node.work.first
                takes_a_step = isinstance(effect, RunBlock) and not whole
                self._work(number, node, self.now + takes_a_step)
                if takes_a_step:
                    while node.work and isinstance(node.work.first[1], RunHead):
                        self.take(Step("work", number))
                    return
            else:
                return

    # --- losing and mending it ----------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """The ring is lost; what the stages said on the control channel still arrives."""
        self.dispatch(0, self.coordinator.handle(RingDown(reason), self.now))

    def mend(self) -> None:
        """The next ring is up, of the same stages; nothing that was under way comes through."""
        for number, node in enumerate(self.nodes):
            node.ring = InprocLink()
            if number:
                node.control = InprocLink()
        for number, stage in enumerate(self.stages, 1):
            self.dispatch(number, stage.reset())
        self.dispatch(0, self.coordinator.handle(RingUp(), self.now))

    # --- single steps -------------------------------------------------------------------------

    def steps(self) -> Iterable[Step]:
        """Everything that could happen now, one step for each place that has something."""
        for number, node in enumerate(self.nodes):
            if node.control:
                yield Step("control", number)
            if node.ring:
                yield Step("ring", number)
            if node.work:
                yield Step("work", number)

    def waiting_control(self, node: int) -> list[Message]:
        """The control messages on their way to a node, the oldest first."""
        return self.nodes[node].control.waiting()

    def is_quiet(self, node: int) -> bool:
        """Whether a node has carried out all its compute effects."""
        return not self.nodes[node].work

    def take(self, step: Step, *, repeat: bool = False, lose: bool = False) -> None:
        """Let a step happen; a message may also be delivered twice, or lost."""
        node = self.nodes[step.node]
        if step.kind == "work":
            self._work(step.node, node, self.now)
            return
        link = node.ring if step.kind == "ring" else node.control
        message = link.receive(step.index)
        event: Event = (
            SegmentArrived(message)
            if isinstance(message, Segment)
            else MessageArrived(b"", message)
        )
        for _ in range(0 if lose else 2 if repeat else 1):
            self.dispatch(step.node, node.machine.handle(event, self.now))

    def _work(self, number: int, node: _Node, ends: float) -> None:
        """Carry out the first effect, which is done at `ends`."""
        _, effect = node.work.take()
        job = getattr(effect, "job", -1)

        def stop(request: int | None = None) -> bool:
            return not node.aborted.isdisjoint({(job, None), (job, request)})

        event: Event | None
        try:
            event = node.compute.perform(effect, stop)
        except EdgespecError as problem:
            event = failure(effect, problem)
        node.aborted = {one for one in node.aborted if one[0] != job}
        for one in events_of(event):
            self.dispatch(number, node.machine.handle(one, ends))

    def _tell_coordinator(self, message: Message) -> None:
        self.dispatch(0, self.coordinator.handle(MessageArrived(CLIENT, message), self.now))

    def dispatch(self, number: int, effects: Iterable[Effect]) -> None:
        """See to what the machine of a node asks for; whatever it does passes through here."""
        node = self.nodes[number]
        for effect in effects:
            match effect:
                case SendRing(segment):
                    self.nodes[(number + 1) % len(self.nodes)].ring.send(segment)
                case SendStages(message):
                    for stage in self.nodes[1:]:
                        stage.control.send(message)
                case SendCoordinator(message):
                    self.nodes[0].control.send(message)
                case SendPeer(_, message):
                    self.replies.append(decode(encode(message)))
                case EncodePrompt():  # takes no time here
                    event = self.coordinator.encode(effect)
                    self.dispatch(0, self.coordinator.handle(event, self.now))
                case AbortBlock(job, request):
                    if any(isinstance(e, RunBlock) and e.job == job for e in node.work):
                        node.aborted.add((job, request))
                case _ if isinstance(effect, COMPUTE):
                    node.work.add(effect)
                case Renew(why):
                    self.renewal = why
                case _:
                    raise TypeError(f"a local ring carries out no {type(effect).__name__}")
