"""Membership machine: who is in the ring; gives places to stages, watches that everybody lives.

Join → Assign → (Loading …) → Ready; when all are ready, Connect to each; when all are Connected,
the ring is up. A stage that leaves, fails or falls silent takes the ring down with one reason that
names it. The others keep their blocks and are assigned the same places in the next ring; its own is
given to a spare, or to itself when it comes back. A stage too many stands by as a spare.

If nobody takes the place, the model is shared out over fewer devices; and over more again once
there are spares, which prepare while the ring of now goes on: it ends when no request runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from ipaddress import ip_address
from itertools import pairwise
from pathlib import PurePath

from edgespec.config import Timing
from edgespec.errors import LocalProtocolError
from edgespec.machines.effects import (
    Effect,
    Forward,
    SendPeer,
)
from edgespec.machines.events import (
    Event,
    Hold,
    MessageArrived,
    PeerGone,
    RingDown,
    RingUp,
    Tick,
)
from edgespec.ring.assignment import (
    MOST_SHOWN,
    SPARE,
    Member,
    Places,
    in_no_ring,
    line_of,
    node_of,
)
from edgespec.ring.effects import ConnectRing, Log, OpenRing
from edgespec.ring.events import KeyRemoved, RingBroke, RingReached
from edgespec.ring.growth import (
    CALM_BEATS,
    MOST_WARY,
    SETTLED_BEATS,
    Growth,
    Homes,
    Retreat,
)
from edgespec.ring.health import REASON_CHARS, DeviceWatch, printable
from edgespec.wire.client_messages import Cancel, NodeStatus, Status, StatusRequest, Submit
from edgespec.wire.messages import (
    NO_RING,
    Assign,
    Connect,
    Connected,
    Fault,
    Goodbye,
    Health,
    Heartbeat,
    Join,
    Loading,
    Ready,
    Refuse,
    Removed,
    StandBy,
)
from edgespec.wire.snapshots import Subscribe

ALL_REQUESTS = -1
"""The request number of a Fault that means the whole stage."""

LEAST_PATIENCE_S = 6.0
"""A device that has only hung for a moment shall not cost all others their blocks."""

Replan = Callable[[Sequence[Join]], Sequence[Assign] | None]
"""Places for these devices alone, in this order (those behind the last place are not needed), or
None if they cannot hold the model."""


class MembershipMachine:
    """The coordinator's list of stages and clients, without I/O."""

    def __init__(
        self,
        places: Sequence[Assign],
        home: Connect,
        timing: Timing,
        requests: Callable[[], tuple[int, int]] = lambda: (0, 0),
        names: Sequence[str] = (),
        replan: Replan | None = None,
    ) -> None:
        """`places`, `names`: see Places; `home` is where the last stage pushes. `requests()`: how
        many run and how many wait. `replan`: other places, for those alone who are left when one
        does not come back, or for as many more as have come since."""
        self._places = Places(places, names)
        self._requests = requests
        self._replan = replan
        self._missing_since: float | None = None  # a place was held once, and is not
        self._why = ""  # the ring was lost last
        self._homes = Homes()
        self._growth: Growth | None = None  # what is planned
        self._retreat: Retreat | None = None  # until the ring that grew is up
        self._changing_since: float | None = None  # until it, or that of before, is up
        self._declined: set[bytes] = set()  # spares that the model cannot be shared out over, too
        self._has_grown = False
        self._wary = 1
        self._home = home
        self._timing = timing
        self._members: dict[int, Member] = {}
        self._spares: dict[bytes, Member] = {}
        self._rivals: dict[int, tuple[bytes, float]] = {}  # who asks for a taken place since when
        self._clients: dict[bytes, float] = {}
        self._is_linked = False  # all were told to connect, in the ring of now
        self._reached = False  # by the coordinator: stage 1
        self._is_up = False
        self._was_up = False
        self._up_since = self._now = 0.0
        self._next_beat: float | None = None
        self._watch = DeviceWatch()

    @property
    def stage_peers(self) -> list[bytes]:
        """Addresses of the stages that have a place."""
        return [m.peer for m in self._members.values()]

    @property
    def daemon_peers(self) -> list[bytes]:
        """Addresses of the stages and spares."""
        return [m.peer for m in self._everybody]

    @property
    def keys(self) -> list[str]:
        """Public keys of the stages and spares."""
        return [m.join.key for m in self._everybody]

    @property
    def _everybody(self) -> list[Member]:
        return [*self._members.values(), *self._spares.values()]

    def stage_of(self, peer: bytes) -> str | None:
        """The stage that has a place, at that address, in words; None for spares and all others."""
        return next((str(m) for m in self._members.values() if m.peer == peer), None)

    def place_of(self, peer: bytes) -> int:
        """Which stage is at that address; 0 for spares and all others."""
        return next((m.place for m in self._members.values() if m.peer == peer), 0)

    def deadline(self) -> float | None:
        """When to call with Tick next; None while nobody is there."""
        return self._next_beat if self._everybody or self._clients else None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to one event; any message of a peer shows that it lives."""
        self._now = now
        match event:
            case MessageArrived(peer, message):
                self._heard(peer, now)
                return self._on_message(peer, message, now)
            case KeyRemoved(key):
                return self._on_removed(key)
            case PeerGone(peer):
                self._clients.pop(peer, None)
                return []
            case RingReached():
                self._reached = True
                return self._rise()
            case RingBroke(why):
                return self._give_up(f"the coordinator cannot go on: {why}")
            case Tick():
                return self._on_tick(now)
            case _:
                raise LocalProtocolError(f"membership cannot handle {type(event).__name__}")

    def _heard(self, peer: bytes, now: float) -> None:
        if self._next_beat is None:
            self._next_beat = now + self._timing.beat
        member = self._member_of(peer)
        if member is not None:
            member.heard = now
        elif peer in self._clients:
            self._clients[peer] = now

    def _member_of(self, peer: bytes) -> Member | None:
        return next((m for m in self._everybody if m.peer == peer), None)

    def _on_message(self, peer: bytes, message: object, now: float) -> list[Effect]:
        member = self._member_of(peer)
        match message:
            case Join():
                return self._on_join(peer, message, now)
            case StatusRequest():
                return [SendPeer(peer, self.status())]
            case Submit() | Cancel() | Subscribe():
                self._clients[peer] = now
                return []
            case Heartbeat(number) if member is not None:
                self._watch.trips.back(peer, number, now)
                return []
            case Heartbeat():
                # Only who is known here is answered: a stage or client of an earlier coordinator,
                # or one that was given up, shall notice that nobody works for it.
                return [SendPeer(peer, Heartbeat())] if peer in self._clients else []
        if member is None:
            return []  # a stranger, or a stage that was refused
        match message:
            case Loading(text):
                member.state = printable(text)
                return []
            case Health():
                layers = self._places.layers(member.place)
                return self._watch.health.heard(peer, str(member), layers, message, now)
            case Ready(seconds, ring):
                return self._on_ready(member, seconds, ring)
            case Connected(ring):
                member.connected = ring
                return self._rise()
            case Goodbye(reason):
                return self._lose(member, f"left: {printable(reason, REASON_CHARS)}")
            case Fault(request, reason) if request == ALL_REQUESTS:
                return self._lose(member, f"cannot go on: {printable(reason, REASON_CHARS)}")
        return []

    # --- stages come --------------------------------------------------------------------------

    def _on_join(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        stages = self._places.most
        if not 0 <= join.stage <= stages:
            return _refuse(
                peer,
                f"there is no stage {join.stage}: this ring has {stages} stage(s), numbered from "
                "1; choose another --stage, or start the coordinator with more --stages",
            )
        if not _is_address(join.host, join.port):
            return _refuse(peer, f"{join.host!r} port {join.port} is no address for others to use")
        join = replace(join, name=printable(join.name))
        known = self._member_of(peer)
        if known is not None:
            return self._on_join_again(known, join)
        old = next((m for m in self._everybody if m.is_process_of(join)), None)
        if old is None:
            return self._give_place(peer, join, now)
        if now - old.heard <= 2 * self._timing.beat:
            return []  # not before its old connection is silent: this may be an impostor
        cause = "lost its connection"
        if (
            old.place != SPARE and self._retreat is None
        ):  # it has its block still, which no spare may have
            return self._replace(old, cause, peer, join, now)
        return self._lose(old, cause) + self._give_place(peer, join, now)

    def _on_join_again(self, known: Member, join: Join) -> list[Effect]:
        """It asked twice, or it had missed the coordinator for a while."""
        if known.join.stage != join.stage:
            return _refuse(known.peer, f"this daemon is {known} already")
        answer = self._stand_by(known) if known.place == SPARE else self._assign(known)
        planned = self._growth.place_for(known) if self._growth else None
        return [answer, *([SendPeer(known.peer, in_no_ring(planned))] if planned else [])]

    def _give_place(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        """A free place; that of a predecessor which is silent; or else that of a spare."""
        free = self._free
        holder = self._members.get(join.stage)
        if holder is None and free:
            place = join.stage if join.stage in free else self._places.planned(join.name, free)
            return self._enter(peer, join, place, now)
        if holder is None:
            return self._add_spare(peer, join, now)
        if holder.join.stage == join.stage:
            return self._on_rival(peer, join, holder, now)
        if not self._was_up:  # nobody has been missed yet: a spare that came first makes room
            del self._members[join.stage]
            entered = self._enter(peer, join, join.stage, now)
            return entered + self._give_place(holder.peer, holder.join, now)
        return self._enter(peer, join, free[0], now) if free else self._add_spare(peer, join, now)

    @property
    def _free(self) -> list[int]:
        return [s for s in range(1, len(self._places) + 1) if s not in self._members]

    def _on_rival(self, peer: bytes, join: Join, holder: Member, now: float) -> list[Effect]:
        """Another process asks for the same place by its number: the old one dead, or both live."""
        rival, asked = self._rivals.get(join.stage, (b"", now))
        if now - holder.heard > 2 * self._timing.beat:
            cause = f"was replaced by process {join.pid} on {join.name}"
            if self._retreat is not None:
                return self._lose(holder, cause) + self._give_place(peer, join, now)
            return self._replace(holder, cause, peer, join, now)
        if rival != peer:
            self._rivals[join.stage] = peer, now
            return []  # the holder may be dead, which a beat will tell; the newcomer asks again
        if holder.heard <= asked + self._timing.beat:
            return []
        return _refuse(
            peer,
            f"stage {join.stage} is taken by process {holder.join.pid} on {holder.join.name}; "
            "stop that daemon, or choose another --stage",
        )

    def _replace(
        self, old: Member, cause: str, peer: bytes, join: Join, now: float
    ) -> list[Effect]:
        """Another one, or the same by another connection, in the very place of one that is gone."""
        self._watch.lost(old.peer, old.place, cause, now)
        effects = self._call_off(old)
        del self._members[old.place]
        effects += self._take_down(f"{old} {cause}")
        return effects + self._enter(peer, join, old.place, now)

    def _enter(self, peer: bytes, join: Join, place: int, now: float) -> list[Effect]:
        self._rivals.pop(place, None)
        self._watch.health.forget(peer)
        member = self._members[place] = Member(peer, join, now, place)
        if len(self._members) == len(self._places):
            self._missing_since = None
        text = f"{member} joined, {len(self._members)} of {len(self._places)}"
        return [self._assign(member), Log(text)]

    def _assign(self, member: Member) -> Effect:
        return SendPeer(member.peer, self._places.assign(member.place))

    def _add_spare(self, peer: bytes, join: Join, now: float) -> list[Effect]:
        self._watch.health.forget(peer)
        member = self._spares[peer] = Member(peer, join, now, SPARE, "standing by")
        member.since = self._now
        return [self._stand_by(member), Log(f"{member} stands by")]

    def _stand_by(self, spare: Member) -> Effect:
        wish, why = spare.join.stage, ""
        if len(self._places) < self._places.most:
            why = "; it gets layers again when no request runs"
        elif wish:
            why = f"; stage {wish} was given to another while it was away"
        return SendPeer(spare.peer, StandBy(f"standing by as a spare{why}"))

    def _on_ready(self, member: Member, seconds: float, ring: int) -> list[Effect]:
        if ring == NO_RING:
            return self._on_prepared(member)
        if ring != self._places.ring or member.ready or member.place == SPARE:
            return []  # of a ring before this one, or said twice
        effects: list[Effect] = []
        if not member.loaded:
            effects.append(Log(f"{member} loaded its layers in {seconds:.1f} s"))
        member.ready = member.loaded = True
        member.state = "ready"
        if not self._all_ready():
            return effects
        self._is_linked, self._reached = True, False
        return [*effects, *self._connect_ring()]

    def _rise(self) -> list[Effect]:
        """Up it is once every node has reached the next one."""
        ring = self._places.ring
        if self._is_up or not self._is_linked or not self._reached:
            return []
        if any(member.connected != ring for member in self._members.values()):
            return []
        self._is_up = self._was_up = True
        self._up_since = self._now
        self._retreat = self._changing_since = None
        if self._places.are_first:
            self._homes.note(self._members)
        return [Forward(RingUp(len(self._places))), Log("the ring is up")]

    def _all_ready(self) -> bool:
        return len(self._members) == len(self._places) and all(
            m.ready for m in self._members.values()
        )

    def _connect_ring(self) -> list[Effect]:
        """Every node pushes to the next; the last stage to the coordinator."""
        ring = [self._members[stage] for stage in sorted(self._members)]
        first = ring[0].join
        effects: list[Effect] = [
            OpenRing(self._places.assign(1).ring_key),
            ConnectRing(first.host, first.port, first.key),
        ]
        for member, following in pairwise(ring):
            join = following.join
            effects.append(SendPeer(member.peer, Connect(join.host, join.port, join.key)))
        effects.append(SendPeer(ring[-1].peer, self._home))
        return effects

    # --- stages go ----------------------------------------------------------------------------

    def _on_removed(self, key: str) -> list[Effect]:
        """A device that is no longer part of the cluster is told so, and is nobody at once."""
        effects: list[Effect] = []
        while member := next((m for m in self._everybody if m.join.key == key), None):
            effects.append(SendPeer(member.peer, Removed("this device was removed")))
            effects += self._lose(member, "was removed from the cluster")
        return effects

    def _lose(self, lost: Member, cause: str) -> list[Effect]:
        """A ring without one of its stages cannot go on: all the others begin the next one."""
        self._watch.lost(lost.peer, lost.place, cause, self._now)
        effects = self._call_off(lost)
        if lost.place == SPARE:
            gone = self._spares.pop(lost.peer, None)
            return [*effects, Log(f"{lost} {cause}")] if gone else []
        del self._members[lost.place]
        effects += self._give_up(f"{lost} {cause}")
        free = self._free
        if not free:
            return effects  # it had none of the places that there are now again
        if self._spares:
            spare = self._spares.pop(max(self._spares, key=lambda p: self._spares[p].heard))
            place = lost.place if lost.place in free else free[0]
            effects += self._enter(spare.peer, spare.join, place, spare.heard)
        elif self._was_up and self._missing_since is None:
            self._missing_since = self._now
        return effects

    def _give_up(self, reason: str) -> list[Effect]:
        """This ring: another one follows, of the same places or, if it had only just got them, of
        those before."""
        return self._take_down(reason) if self._retreat is None else self._go_back(reason)

    def _take_down(self, reason: str) -> list[Effect]:
        self._why = reason
        if self._growth is not None and self._growth.since is not None:
            self._growth.since, self._growth.held = self._now, False
        effects: list[Effect] = [Forward(RingDown(reason)), Log(reason)]
        if not self._is_linked:
            return effects  # nothing was sent in this ring yet
        self._is_up = self._is_linked = False
        self._places.ring += 1
        for member in self._members.values():
            member.ready, member.state = False, "waiting"
            effects.append(self._assign(member))
        return effects

    def _on_missing(self, now: float) -> list[Effect]:
        """Nobody came in half the time that requests wait: let those who are left do it alone."""
        if self._replan is None or self._missing_since is None or not self._members:
            return []
        if not self._timing.recovery or now - self._missing_since < self._patience:
            return []
        missing_since, self._missing_since = (
            self._missing_since,
            now,
        )  # it is tried again as late, with whoever is there then
        here = [self._members[place] for place in sorted(self._members)]
        places = self._replan([member.join for member in here])
        if places is None:
            return [Log("the devices that are left have no memory for the whole model")]
        self._be_wary(missing_since)
        text = f"the model is shared out anew, over {len(places)} device(s)"
        lost = Forward(RingDown(f"{self._why}; {text}"))
        return [lost, Log(text), *self._share_out(places, here)]

    @property
    def _patience(self) -> float:
        return max(self._timing.recovery / 2, LEAST_PATIENCE_S)

    def _share_out(self, places: Sequence[Assign], here: Sequence[Member]) -> list[Effect]:
        """Those who are here get other places, in order; who gets none stands by."""
        others = [m for m in self._members.values() if m not in here]
        self._places.replace(places)
        self._is_up = self._is_linked = False
        self._missing_since = self._changing_since = None
        self._declined = set()
        self._members.clear()
        effects: list[Effect] = []
        for place, member in enumerate(here, start=1):
            if place > len(places):
                others.append(member)
                continue
            self._spares.pop(member.peer, None)
            effects += self._enter(member.peer, member.join, place, member.heard)
        for member in others:
            effects += self._add_spare(member.peer, member.join, member.heard)
        return effects

    # --- a ring that shrank grows again -------------------------------------------------------

    def _on_spares(self, now: float) -> list[Effect]:
        """Plan places for them if the ring has fewer than at first, let all devices prepare, and
        share the model out when no request runs."""
        if not self._is_up or len(self._places) >= self._places.most:
            return []
        growth = self._growth
        if growth is None:
            return self._plan_growth(now)
        # Who says nothing may be dead: the ring shall not end for it.
        if growth.since is None or not all(self._is_heard(d, now) for d in growth.devices):
            return []
        running, waiting = self._requests()
        if not running and (growth.held or not waiting):
            return self._grow(growth)
        if growth.held or now - growth.since < self._patience:
            return []
        growth.held = True
        text = (
            f"the model will be shared out again, over {len(growth.places)} device(s): no further "
            "request begins before"
        )
        return [Forward(Hold(text)), Log(text)]

    def _is_heard(self, member: Member, now: float) -> bool:
        return now - member.heard <= 2 * self._timing.beat

    def _plan_growth(self, now: float) -> list[Effect]:
        settled = SETTLED_BEATS * self._wary * self._timing.beat
        fresh = [
            spare
            for spare in self._spares.values()
            if now - spare.since >= settled and self._is_heard(spare, now)
        ]
        if self._replan is None or now - self._up_since < settled:
            return []
        if all(spare.peer in self._declined for spare in fresh):
            return []
        homes = self._homes.settle([*self._members.values(), *fresh], self._places.most)
        devices = [homes[place] for place in sorted(homes)]
        is_as_first = len(homes) == self._places.most and all(
            self._homes.is_home(place, member) for place, member in homes.items()
        )
        places: Sequence[Assign] | None = self._places.first
        if not is_as_first:
            places = self._replan([member.join for member in devices])
        if places is None or len(places) <= len(self._places):
            self._declined = {spare.peer for spare in fresh}
            return [Log("the spares have no memory for a part of the model")]
        self._growth = Growth(places, devices[: len(places)])
        text = (
            f"the model will be shared out again, over {len(places)} device(s), when they have "
            "prepared for it and no request runs"
        )
        prepare = (
            SendPeer(member.peer, in_no_ring(place))
            for place, member in zip(places, devices, strict=False)
        )
        return [Log(text), *prepare]

    def _on_prepared(self, member: Member) -> list[Effect]:
        member.state = "ready" if member.ready else "prepared; waits until no request runs"
        if self._growth is not None and self._growth.is_prepared(member, self._now):
            return [Log("all are prepared for the places that they will have")]
        return []

    def _grow(self, growth: Growth) -> list[Effect]:
        before = [self._members[place].peer for place in sorted(self._members)]
        self._retreat = Retreat(tuple(self._places), before)
        self._growth, self._has_grown = None, True
        text = f"the model is shared out again, over {len(growth.places)} device(s)"
        down = Forward(RingDown(text, lost=False))
        effects = [down, Log(text), *self._share_out(growth.places, growth.devices)]
        self._changing_since = self._now
        return effects

    def _on_slow_change(self, now: float) -> list[Effect]:
        """Who waits for no loss waits no longer than for one."""
        limit = self._timing.recovery
        if self._changing_since is None or now - self._changing_since < limit:
            return []
        self._changing_since = None
        slow = next((str(m) for m in self._members.values() if not m.ready), "the ring")
        reason = f"{slow} was not ready within {limit:g} s"
        if self._retreat is not None:
            return self._go_back(reason)
        return [Forward(RingDown(reason)), Log(reason)]

    def _call_off(self, lost: Member) -> list[Effect]:
        """What was planned with a device that is lost."""
        growth = self._growth
        if growth is None or (lost.place == SPARE and growth.place_for(lost) is None):
            return []
        self._growth = None
        others = [d for d in growth.devices if d.place == SPARE and d is not lost]
        effects: list[Effect] = [self._stand_by(spare) for spare in others]
        if growth.held and lost.place == SPARE:
            effects.append(Forward(Hold("")))
        return effects

    def _go_back(self, reason: str) -> list[Effect]:
        """The ring that grew does not come up: those who had places before have them again."""
        retreat = self._retreat
        assert retreat is not None, "it goes back once"
        self._retreat = None
        self._be_wary(self._now)
        here = {member.peer: member for member in self._everybody}
        text = f"{reason}; the model is shared out as before, over {len(retreat.places)} device(s)"
        self._why = reason
        is_lost = any(peer not in here for peer in retreat.peers)
        effects: list[Effect] = [Forward(RingDown(text, lost=is_lost)), Log(text)]
        if not is_lost:
            effects += self._share_out(retreat.places, [here[p] for p in retreat.peers])
            self._changing_since = self._now
            return effects
        effects += self._share_out(retreat.places, [])
        for place, peer in enumerate(retreat.peers, start=1):
            if peer in here:
                del self._spares[peer]
                effects += self._enter(peer, here[peer].join, place, here[peer].heard)
        return effects

    def _be_wary(self, until: float) -> None:
        """A device that comes and goes shall not move everybody's layers all the time."""
        calm = until - self._up_since >= CALM_BEATS * self._timing.beat
        self._wary = 1 if calm or not self._has_grown else min(2 * self._wary, MOST_WARY)

    # --- time ---------------------------------------------------------------------------------

    def _on_tick(self, now: float) -> list[Effect]:
        if self._next_beat is None or now < self._next_beat:
            return []
        self._next_beat = now + self._timing.beat
        effects: list[Effect] = []
        for member in self._everybody:
            if self._member_of(member.peer) is not member:
                continue  # it has got another place just now, as one before it was lost
            silent = now - member.heard
            limit = self._timing.silence if member.loaded else self._timing.loading_silence
            if silent > limit:
                cause = f"has been silent for {silent:.1f} s"
                # Should it live, it reads this first and comes back at once.
                effects.append(SendPeer(member.peer, Goodbye(f"{member} {cause}")))
                effects += self._lose(member, cause)
        effects += self._on_missing(now)
        effects += self._on_slow_change(now) + self._on_spares(now)
        effects += [SendPeer(m.peer, self._watch.trips.beat(m.peer, now)) for m in self._everybody]
        for peer, heard in list(self._clients.items()):
            if now - heard > self._timing.client_silence:
                del self._clients[peer]
                effects.append(Forward(PeerGone(peer)))
            elif now - heard > 2 * self._timing.beat:
                # If nobody is connected there any more, sending this fails, and tells so.
                effects.append(SendPeer(peer, Heartbeat()))
        return effects

    def status(self) -> Status:
        """Every place, and every spare: in one line of text, and in figures."""
        shown: list[tuple[Assign | None, Member | None]] = [
            (place, self._members.get(place.stage)) for place in self._places
        ]
        shown += [(None, spare) for spare in self._spares.values()]
        running, waiting = self._requests()
        of = next(iter(self._places))
        return Status(
            self._is_up,
            tuple(line_of(place, member) for place, member in shown[:MOST_SHOWN]),
            tuple(self._node(place, member) for place, member in shown[:MOST_SHOWN]),
            len(self._places),
            self._places.ring,
            self._now - self._up_since if self._is_up else 0.0,
            running,
            waiting,
            PurePath(of.model).name,
            of.context_length,
        )

    def _node(self, place: Assign | None, member: Member | None) -> NodeStatus:
        return self._watch.described(node_of(place, member, self._now), member, self._now)


def _is_address(host: str, port: int) -> bool:
    """Whether others can connect to it without asking a name server, which would take its time."""
    # A zone is the name of an interface of the one who told it: it means nothing to others.
    try:
        return str(ip_address(host)) == host and "%" not in host and 1 <= port <= 65535
    except ValueError:
        return False


def _refuse(peer: bytes, reason: str) -> list[Effect]:
    return [SendPeer(peer, Refuse(reason))]
