"""Coordinator node: routes messages between its sockets, the membership and the request machine."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from edgespec.backends.compute import CoordinatorCompute
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import EncodePrompt, Renew, SendRing
from edgespec.decoding.events import StageBeat
from edgespec.errors import EdgespecError, PeerLost
from edgespec.machines.effects import Effect, Forward, SendPeer, SendStages
from edgespec.machines.events import Event, MessageArrived, PeerGone, RingEnded, Tick
from edgespec.net.keys import short
from edgespec.net.sockets import Dropped
from edgespec.net.zmq_transport import Incoming, ZmqTransport
from edgespec.ring.effects import ConnectRing, KeepHolders, OpenRing
from edgespec.ring.events import KeyRemoved
from edgespec.ring.health import REASON_CHARS, printable
from edgespec.ring.membership import MembershipMachine
from edgespec.runtime.access_policy import CLIENT, MAY_SEND, OWNER, STAGE, AccessPolicy
from edgespec.runtime.instrumentation import Instrumentation
from edgespec.runtime.node import BUG, RingNode, ring_address
from edgespec.runtime.request_log import RequestLog
from edgespec.runtime.worker import Worker
from edgespec.wire.client_messages import (
    Cancel,
    Echoed,
    Failed,
    Finished,
    Progress,
    Status,
    Submit,
    Tokens,
)
from edgespec.wire.messages import (
    CloseRequest,
    Credit,
    Enrol,
    Enrolled,
    Fault,
    Goodbye,
    Heartbeat,
    Join,
    Leave,
    Message,
    Refuse,
    Removed,
    Retain,
)
from edgespec.wire.snapshots import StageActivity, Subscribe

LAST_S = 1.0
"""Seconds from the last answer's end to that of a node which leaves: with its connection a client
loses what has come and was not read (libzmq, for sockets with ZMQ_IMMEDIATE)."""

_ENDING = "the coordinator is ending, and takes no more requests; ask again when it is back"
_FAILED = f"the coordinator cannot go on with this request: {BUG}"


class CoordinatorNode(RingNode):
    """D0 as a program: membership and coordinator machines over one transport."""

    def __init__(
        self,
        transport: ZmqTransport,
        compute: CoordinatorCompute,
        machine: CoordinatorMachine,
        membership: MembershipMachine,
        access_policy: AccessPolicy,
        instrumentation: Instrumentation | None = None,
    ) -> None:
        super().__init__(transport, compute.perform)
        self._access = access_policy
        self._dropped = Dropped("refused a message")
        self.requests: RequestLog | None = None
        """Logs every request and its end."""
        self.keep_holders: Callable[[tuple[str, ...]], None] = lambda keys: None
        """Remembers the keys of the stages' holders."""
        self.answered: Callable[[Finished], None] = lambda answer: None
        """Is told every answer that is whole."""
        self.drain = 0.0
        """Seconds that requests have to end when the node is to leave; new ones are refused."""
        self.unloads = False
        """Whether stages give their blocks up when it ends."""
        self._leaving = ""  # why it is to leave
        self._leaves_at: float | None = None
        self._is_drained = False  # nobody asks any more
        if instrumentation is not None:
            self.worker.perform = instrumentation.equip(None, compute.perform, self)
        self._machine = machine
        self._membership = membership
        self._unreachable: set[bytes] = set()  # found while carrying out effects
        self._open: Counter[tuple[bytes, int]] = (
            Counter()
        )  # requests without an end, by peer and tag
        # Prompts have their own workers: neither they nor the models wait for the other, nor do
        # prompts for a grammar.
        self._prompts = Worker(self._encode, "edgespec-prompts")
        self._grammars = Worker(self._encode, "edgespec-grammars")
        self.workers += [self._prompts, self._grammars]

    def _encode(self, effect: Effect, stop: Callable[[], bool]) -> Event:
        assert isinstance(effect, EncodePrompt)
        return self._machine.encode(effect)

    def admit(self, incoming: Incoming) -> bool:
        """Whether the sender's role, looked up for each message, allows it."""
        if incoming.on_ring:
            return True  # its sender proved the ring's key
        peer, message, key = incoming.peer, incoming.message, incoming.key
        role = self._access.role_of(key)
        if role is None:
            self._refuse(incoming, Removed(f"this key counts no more: {self._access.why_not(key)}"))
            self._gone(peer, self._time.now())  # its requests end
        elif type(message) not in MAY_SEND[role]:
            more = (
                "; `edgespec token new` here makes a token for a device" if role == CLIENT else ""
            )
            self._refuse(incoming, Refuse(f"a key with the role {role} does not allow that{more}"))
        elif isinstance(message, Join) and message.key != key:
            self._refuse(incoming, Refuse("a stage joins with the key that it connects with"))
        elif isinstance(message, Enrol):
            self._enrol(peer, key, message)
        elif isinstance(message, Leave):
            self._forget(peer, key)
        else:
            return True
        return False

    def _refuse(self, incoming: Incoming, answer: Message) -> None:
        what = type(incoming.message).__name__
        self._dropped.note(f"the key {short(incoming.key)} may not send a {what}")
        self._answer(incoming.peer, answer)

    def _enrol(self, peer: bytes, key: str, enrol: Enrol) -> None:
        now = self._time.now()
        try:
            name = self._access.enrol(key, enrol.key, enrol.name)
        except EdgespecError as problem:
            self.note(f"{short(enrol.key)} is not admitted: {problem}", now)
            self._answer(peer, Refuse(str(problem)))
        else:
            self.note(f"{name} (key {short(enrol.key)}) is admitted to the cluster", now)
            self._answer(peer, Enrolled(name))

    def _forget(self, peer: bytes, key: str) -> None:
        now = self._time.now()
        try:
            self._access.forget(key)
        except EdgespecError as problem:
            self.note(f"{short(key)} cannot leave: {problem}", now)
            self._answer(peer, Refuse(str(problem)))
        else:
            self.note(f"the device with the key {short(key)} has left the cluster", now)
            self._answer(peer, Goodbye("this device is forgotten"))

    def _answer(self, peer: bytes, message: Message) -> None:
        with contextlib.suppress(PeerLost):
            self.transport.send_control(peer, message)

    def route(self, event: Event, now: float) -> list[Effect]:
        """Requests to the coordinator machine; every message to the membership."""
        match event:
            case MessageArrived(peer, Fault()) if self._membership.stage_at(peer) is None:
                return []  # only a stage may end a request of others
            case MessageArrived(peer, Heartbeat(holds=holds, passed=passed)):
                alive, stage = self._heard(event, now), self._membership.stage_at(peer)
                beat = StageBeat(stage.stage, holds, passed) if stage else None
                return alive + (self._tell(beat, now) if beat else [])
            case MessageArrived(peer, message, key):
                told = self._for_requests(peer, message, key)
                alive = self._heard(event, now)
                return alive + (self._tell(MessageArrived(peer, told), now) if told else [])
            case Tick():
                unreachable, self._unreachable = self._unreachable, set()
                for peer in unreachable:
                    self._gone(peer, now)
                keys = self._membership.keys
                for key in [k for k in keys if self._access.role_of(k) not in (OWNER, STAGE)]:
                    self.perform_all(self._heard(KeyRemoved(key), now), now)
                if self._leaving:
                    self._look_at_end(now)
                return self._heard(event, now) + self._tell(event, now)
            case _:
                return self._tell(event, now)

    def _for_requests(self, peer: bytes, message: Message, key: str) -> Message | None:
        """The message for the coordinator machine; None if it is not for it."""
        stage = self._membership.stage_at(peer)
        match message:
            case Submit(tag) if self._leaving:
                self._answer(peer, Failed(tag, _ENDING, "lost"))
            case Submit(scope=scope):
                submit = replace(message, scope=asker_of(key, scope)) if key else message
                self._open[peer, submit.tag] += 1
                if self.requests is not None:
                    self.requests.asked(peer, submit)
                return submit
            case Cancel() | Subscribe():
                return message
            case Fault(reason=reason):
                why = printable(reason, REASON_CHARS)  # it ends on a client's terminal
                return replace(message, reason=f"{stage}: {why}")
            case Credit() if stage:
                return message
            case StageActivity(runs) if stage:
                return StageActivity(tuple(replace(run, stage=stage.stage) for run in runs))
        return None

    def deadline(self) -> float | None:
        """The earlier of both machines'; at once if a client is gone, or nobody asks any more of
        a node that leaves."""
        told = self._leaves_at and (self._open or self._is_drained)
        is_due = self._leaving and not told
        if self._unreachable or is_due:
            return 0.0
        every = (self._membership.deadline(), self._machine.deadline(), self._leaves_at)
        return min((d for d in every if d is not None), default=None)

    def leave(self, reason: str) -> None:
        """End when all requests have, or `drain` seconds are over; told again, at once."""
        if self._leaving or not (self.drain and self._open):
            super().leave(reason)
        else:
            self._leaving = reason
            self.worker.wake_loop()

    def _look_at_end(self, now: float) -> None:
        """End, if the node is to leave and nobody asks any more, or the time for it is over."""
        if self._leaves_at is None:
            self._leaves_at = now + self.drain
            self.supervisor.leaving(self.drain)
            asked = f"{self._open.total()} request(s) have {self.drain:g} s to end"
            self.note(f"{self._leaving}: {asked}", now)
        if not self._open and not self._is_drained:
            self._is_drained, self._leaves_at = True, now + LAST_S
        if now >= self._leaves_at:
            over = "" if self._is_drained else f", and the {self.drain:g} s of --drain are over"
            super().leave(self._leaving + over)

    def to_ring(self, event: Event, now: float) -> list[Effect]:
        return self._membership.handle(event, now)

    def _heard(self, event: Event, now: float) -> list[Effect]:
        return self.guarded(self.to_ring, event, now)

    def _tell(self, event: Event, now: float) -> list[Effect]:
        """Hand an event to the coordinator machine."""
        try:
            return self._machine.handle(event, now)
        except Exception:
            self.note_bug(event, now)
            return self._fail_all()

    def _fail_all(self) -> list[Effect]:
        """The coordinator machine has a bug, and what it holds may be wrong: it begins anew, and
        every request that has no end yet fails."""
        ends = [SendPeer(peer, Failed(tag, _FAILED)) for peer, tag in self._open.elements()]
        return [*self._machine.reset(), *ends]

    def not_carried_out(self, effect: Effect) -> list[Effect]:
        # Replace an end that cannot be sent; without another message no request is sure to go on.
        match effect:
            case SendPeer(peer, Finished(tag=tag)):
                return [SendPeer(peer, Failed(tag, _FAILED))]
            case SendPeer(peer, Failed(tag, reason)):
                return [SendPeer(peer, Failed(tag, _FAILED))] if reason != _FAILED else []
            case SendRing() | SendPeer(_, Echoed() | Tokens() | Retain() | CloseRequest()):
                return self._fail_all()
        return [Renew(BUG)]

    def carry_out(self, effect: Effect, now: float) -> None:
        match effect:
            case EncodePrompt():
                worker = self._grammars if effect.asked.grammar else self._prompts
                worker.submit(effect, self.happened_at)
            case SendRing(segment):
                self.transport.send_ring(segment)
            case SendStages(message):
                stages = self._membership.stage_peers
                self.perform_all([SendPeer(peer, message) for peer in stages], now)
            case SendPeer(peer, message):
                self._send_peer(peer, message)
            case OpenRing(key):
                self.open_ring(key)
            case ConnectRing(host, port, key):
                self.transport.connect_ring(ring_address(host, port, "127.0.0.1"), key)
            case KeepHolders(keys):
                self.keep_holders(keys)
            case Forward(PeerGone(peer)):
                self._unreachable.add(peer)
            case Forward(event):
                self.perform_all(self._tell(event, now), now)
            case _:
                raise TypeError(f"a coordinator carries out no {type(effect).__name__}")

    def _send_peer(self, peer: bytes, message: object) -> None:
        about_one = Echoed | Tokens | Progress | Finished | Failed
        if isinstance(message, about_one) and not self._open[peer, message.tag]:
            return  # it has its end: there was a bug meanwhile
        if self._leaving and isinstance(message, Status):
            message = replace(message, leaving=_ENDING)
        if self.requests is not None and isinstance(message, Finished | Failed):
            self.requests.answered(peer, message)
        if isinstance(message, Finished):
            self.answered(message)
        try:
            self.transport.send_control(peer, message)  # type: ignore[arg-type]
        except PeerLost:
            # Later: first carry out the other effects of this event.
            self._unreachable.add(peer)
            raise
        if isinstance(message, Finished | Failed):
            self._open -= Counter([(peer, message.tag)])

    def _gone(self, peer: bytes, now: float) -> None:
        """A client can no longer be reached, or was removed."""
        self._open = Counter({one: n for one, n in self._open.items() if one[0] != peer})
        if self.requests is not None:
            self.requests.left(peer)
        self.perform_all(self._heard(PeerGone(peer), now), now)
        self.perform_all(self._tell(PeerGone(peer), now), now)

    def farewell(self, reason: str, now: float) -> None:
        self.perform_all(self._tell(RingEnded(f"the ring ended: {reason}"), now), now)
        goodbyes = [
            SendPeer(p, Goodbye(reason, self.unloads)) for p in self._membership.daemon_peers
        ]
        self.perform_all(goodbyes, now)


def asker_of(key: str, scope: str) -> str:
    """The name of a client's user, which no other key can have with any scope."""
    return hashlib.sha256(f"{key} {scope}".encode()).hexdigest()[:32]
