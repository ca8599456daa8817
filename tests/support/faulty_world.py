"""Faulty world: a ring in virtual time in which things go wrong, and what of it can be watched."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from support.event_log import EventLog, effect_words, message_words
from support.faults import Change, Crash, Dice, Fault

from edgespec.backends.compute import COMPUTE
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import EncodePrompt, Renew
from edgespec.machines.effects import Effect, RunBlock, SendPeer
from edgespec.machines.events import Event, Hold, RingDown
from edgespec.sim.durations import Durations
from edgespec.sim.links import Link, Network
from edgespec.sim.wires import Wires
from edgespec.sim.world import CoordinatorParts, StageParts, World
from edgespec.wire.client_messages import Cancel
from edgespec.wire.codec import encode
from edgespec.wire.messages import Message, Retain
from edgespec.wire.segment import Segment


class FaultyWires(Wires):
    """Wires that lose, bend, delay and repeat messages.

    `control`: how many messages of each request are under way on the control channel. `lost`:
    {(stage, request): epoch of the newest retained set that never arrived}.
    """

    def __init__(self, *args: Any, dice: Dice, note: Callable[[int, str], None]) -> None:
        super().__init__(*args)
        self._dice, self._note = dice, note
        self.control: Counter[int] = Counter()
        self.lost: dict[tuple[int, int], int] = {}

    def cut(self) -> None:
        """As ever."""
        super().cut()
        self.lost.clear()

    def _send(self, link: Link, node: int, message: Message) -> None:
        if self._dice.loses(message):
            self._note(node, f"never gets {message_words(message)}")
            if isinstance(message, Retain):
                self.lost[node, message.request] = message.keep.epoch
            return
        message = self._dice.bent(message)
        frame = encode(message)
        size = self._message_bytes(message, len(frame))
        late = self._dice.lateness(message)
        at = link.send(self._clock.now, size, self._dice.delay()) + late
        for when in (at, *(at + after for after in self._dice.repeats(message))):
            if not isinstance(message, Segment):
                self.control[_request_of(message)] += 1
            self._book(when, node, message, frame)

    def _come(self, ring: int, node: int, message: Message, frame: bytes) -> None:
        if not isinstance(message, Segment):
            self.control[_request_of(message)] -= 1
        super()._come(ring, node, message, frame)


class FaultyWorld(World):
    """A World with faults, a log and a watch.

    `work`: how many compute effects of each request stages have still to do.
    """

    wires: FaultyWires

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
        faults: Sequence[Fault] = (),
        watch: Callable[[FaultyWorld, int], None] = lambda world, node: None,
        log: EventLog | None = None,
    ) -> None:
        """`watch`: called with the node (0: the coordinator) after every event there."""
        self._faults, self._watch, self._log = faults, watch, log
        self.is_faulty = False
        self.work: Counter[int] = Counter()
        self.down_since = 0.0
        super().__init__(
            *(coordinator, device, make_stages, durations, network, seed), with_stage=with_stage
        )
        for fault in faults:
            if isinstance(fault, Crash):
                self._clock.book(fault.at, self._crash, fault)
            elif isinstance(fault, Change):
                self._clock.book(fault.at, self._hold, fault)

    def cancel(self, tag: int, at: float) -> None:
        """Cancel a request at `at` virtual seconds."""
        self._clock.book(at, self._told, Cancel(tag))

    def quiet(self, stage: int) -> bool:
        """Whether stage `stage` has carried out all its compute effects."""
        return stage not in self._gone and self._workers[stage - 1].quiet

    @property
    def gone(self) -> bool:
        """Whether a stage is lost, or the whole ring is, or what it does counts no more."""
        return not self.is_up or self.is_faulty or bool(self._gone)

    # --- what goes wrong ----------------------------------------------------------------------

    def _make_wires(self, network: Network, rng: random.Random) -> Wires:
        self._dice = Dice(self._faults, rng)
        return FaultyWires(
            *(network, rng, self._clock, self._durations.message_bytes, self._arrived),
            dice=self._dice,
            note=self._note,
        )

    def _crash(self, crash: Crash) -> None:
        node = crash.stage
        if node in self._gone:
            self._note(node, "would crash, but is gone already")
            return
        self._note(node, "crashes")
        self._gone.add(node)
        self._workers[node - 1].vanish()
        if self.is_up:
            at = self.now + crash.noticed_after
            self._clock.book(at, self._ring_down, self.wires.rings, node, crash.restart_after)
            self._watch(self, node)
        else:  # it will be replaced with the other one
            self._handle(0, RingDown(_crashed(node)))

    def _ring_down(self, ring: int, node: int, restart_after: float) -> None:
        if ring != self.wires.rings:
            return  # another stage of that ring was missed before
        self._note(0, f"stage {node} is missed")
        self._end_ring(restart_after, RingDown(_crashed(node)))

    def _end_ring(self, seconds: float, why: RingDown) -> None:
        self.is_faulty = False
        self.down_since = self.now
        super()._end_ring(seconds, why)

    def _renew(self, ring: int, why: str) -> None:
        if ring == self.wires.rings and self.is_up:
            self._note(0, f"a new ring: {why}")
        super()._renew(ring, why)

    def _hold(self, change: Change) -> None:
        if self.is_up:
            self._note(0, "holds further requests")
            self._handle(0, Hold("the devices will get other layers"))
            self._change(self.wires.rings, change)

    def _change(self, ring: int, change: Change) -> None:
        if ring != self.wires.rings:
            return  # a stage of it was missed before
        if self.coordinator.load()[0]:
            self._clock.book(self.now + change.beat, self._change, ring, change)
            self._watch(self, 0)  # it counts as an event: a request that never ends is found
            return
        self._note(0, "the devices get other layers")
        self._end_ring(change.seconds, RingDown("the devices get other layers", lost=False))

    def _stage_seconds(self, number: int, effect: Effect, done: Event | None) -> float:
        return super()._stage_seconds(number, effect, done) * self._dice.slowness(number, self.now)

    # --- what can be watched ------------------------------------------------------------------

    def _told(self, message: Message) -> None:
        self._note(0, message_words(message))
        super()._told(message)

    def _arrived(self, node: int, message: Message) -> None:
        if node in self._gone:
            self._note(node, f"gone: {message_words(message)}")
            self._watch(self, node)
            return
        self._note(node, message_words(message))
        super()._arrived(node, message)

    def _computed(self, node: int, effect: Effect, event: Event | None) -> None:
        self._note(node, effect_words(effect))
        if node:
            self.work.subtract(_requests_of(effect))
        super()._computed(node, effect, event)
        if event is None:
            self._watch(self, node)

    def _encoded(self, effect: EncodePrompt) -> None:
        self._note(0, effect_words(effect))
        super()._encoded(effect)

    def _ticked(self) -> None:
        self._note(0, "tick")
        super()._ticked()

    def _ring_up(self) -> None:
        self._note(0, "the ring is up")
        super()._ring_up()

    def _take(self, node: int, effects: list[Effect]) -> None:
        super()._take(node, effects)
        self._watch(self, node)

    def _carry_out(self, node: int, effect: Effect) -> None:
        if isinstance(effect, SendPeer):
            self._note(0, f"tells {message_words(effect.message)}")
        elif isinstance(effect, Renew):
            self.is_faulty = True
        elif node and isinstance(effect, COMPUTE):
            self.work.update(_requests_of(effect))
        super()._carry_out(node, effect)

    def _note(self, node: int, what: str) -> None:
        if self._log is not None:
            self._log.add(self.now, f"V{node}" if node else "D0", what)


def _request_of(message: Message) -> int:
    return int(getattr(message, "request", -1))


def _requests_of(effect: Effect) -> list[int]:
    """Whose a stage's compute effect is."""
    if isinstance(effect, RunBlock):
        return [part.request for part in effect.parts]
    return [effect.request]  # type: ignore[attr-defined]


def _crashed(node: int) -> str:
    return f"stage {node} was lost: it crashed"
