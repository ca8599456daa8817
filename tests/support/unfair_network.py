"""Membership and boards over a network that loses, repeats, delays and reorders messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from msgspec.structs import replace
from support.memberships import HOME, TIMING, asks

from edgespec.machines.effects import Effect, Forward, SendCoordinator, SendPeer
from edgespec.machines.events import Event, MessageArrived, RingDown, RingUp, Tick
from edgespec.ring.effects import CloseRing, ConnectRing, LoadBlock, OpenRing, Stop
from edgespec.ring.events import BlockLoaded, RingBroke, RingReached
from edgespec.ring.member import MemberMachine
from edgespec.ring.membership import MembershipMachine
from edgespec.wire.messages import Assign, Message

LONG_S = 400.0
"""Virtual seconds within which a ring is up once nothing is lost any more: a dead process that a
late message brought back is silent for long, several times."""


class WrongRing(AssertionError):
    """A ring is up without the layers of one of its stages, or does not come up."""


@dataclass
class Board:
    """A process: its machine, what it has in memory, and what it is at."""

    machine: MemberMachine
    number: int
    is_on: bool = True
    holds: object = None
    loading: list[Assign] = field(default_factory=list)
    connects: bool = False


class UnfairNetwork:
    """One history: `live_through` chance, then `recover`."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.stages = dice.choice((2, 2, 3, 4))
        self.places = [
            Assign(s, self.stages, s - 1, s, "model", "mark", "float32", "none", 100, 7, "key")
            for s in range(1, self.stages + 1)
        ]
        self.coordinator = MembershipMachine(self.places, HOME, TIMING)
        self.now = 100.0
        self.is_up = self.connects = False
        self.boards: dict[bytes, Board] = {}
        self.said: list[tuple[bytes, Message]] = []  # under way to the coordinator
        self.told: list[tuple[bytes, Message]] = []  # under way to boards
        self._processes = 0
        self._by_number = dice.random() < 0.3
        for number in range(1, self.stages + dice.choice((1, 1, 2))):
            self.start(number)

    def start(self, number: int) -> None:
        """A process begins on board `number`; one that was there is gone."""
        for board in self.boards.values():
            board.is_on = board.is_on and board.number != number
        self._processes += 1
        stage = number if self._by_number and number <= self.stages else 0
        join = replace(asks(number, pid=self._processes, port=5000 + self._processes), stage=stage)
        peer = b"process %d" % self._processes
        self.boards[peer] = Board(MemberMachine(join, "D0", 1e9, TIMING), number)

    # --- what may happen ----------------------------------------------------------------------

    def live_through(self, times: int) -> None:
        """So many times much happens by chance, and then little."""
        chance = (self._carry,) * 20 + (self._turn,) * 3 + (self._finish,) * 3
        chance += (self._lose, self._repeat)
        for _ in range(times):
            if self.dice.random() < 0.4:
                self._stall()
            for _ in range(self.dice.choice((5, 20, 60))):
                self.dice.choice(chance)()
            if self.dice.random() < 0.1:
                self.start(self.dice.choice([b.number for b in self.boards.values()]))
            for _ in range(self.dice.choice((0, 4, 12))):
                self._round()

    def _carry(self) -> None:
        """A message arrives, now and then before one that was sent earlier."""
        if self.said and (not self.told or self.dice.random() < 0.5):
            peer, message = self.said.pop(self._which(self.said))
            self._coordinate(MessageArrived(peer, message))
        elif self.told:
            peer, message = self.told.pop(self._which(self.told))
            self._board(peer, MessageArrived(b"", message))

    def _which(self, way: list[tuple[bytes, Message]]) -> int:
        return self.dice.randrange(len(way)) if self.dice.random() < 0.4 else 0

    def _lose(self) -> None:
        for way in (self.said, self.told):
            if way:
                way.pop(self.dice.randrange(len(way)))

    def _repeat(self) -> None:
        for way in (self.said, self.told):
            if way:
                way.append(self.dice.choice(way))

    def _turn(self) -> None:
        """Time goes on, for some of them: the others stand still."""
        self.now += self.dice.choice((0.1, 0.3, 1.0))
        for peer in self.boards:
            if self.dice.random() < 0.7:
                self._board(peer, Tick())
        if self.dice.random() < 0.6:
            self._coordinate(Tick())

    def _stall(self) -> None:
        """The coordinator stands still for longer than anybody may be silent."""
        for _ in range(3):
            self.now += 2.5
            for peer in self.dice.sample([*self.boards], len(self.boards)):
                self._board(peer, Tick())
        if self.dice.random() < 0.5:
            self._coordinate(Tick())

    def _finish(self) -> None:
        """One has loaded, or reached the next node, or lost it again."""
        peer, board = self.dice.choice([*self.boards.items()])
        if board.loading and not (board.connects and self.dice.random() < 0.7):
            board.holds = board.loading.pop(0).block
            self._board(peer, BlockLoaded(1.0))
        elif board.connects:
            board.connects = False
            broke = self.dice.random() < 0.1
            self._board(peer, RingBroke("its cable broke") if broke else RingReached())
        elif self.connects:
            self.connects = False
            self._coordinate(RingReached())

    def recover(self) -> None:
        """Nothing is lost any more, and all take turns: the ring comes up, and stays."""
        end = self.now + LONG_S
        while self.now < end:
            self._round()
            if self.is_up and end - self.now > 20.0:
                end = self.now + 20.0  # it must hold
        if not self.is_up:
            raise WrongRing(f"not up after {LONG_S:g} s: {self.coordinator.status().lines}")

    def _round(self) -> None:
        """Half a beat in which all is as it should be."""
        self.now += TIMING.beat / 2
        for number in {b.number for b in self.boards.values()}:
            if not any(b.is_on and b.number == number for b in self.boards.values()):
                self.start(number)
        for peer in [*self.boards]:
            self._board(peer, Tick())
        self._coordinate(Tick())
        while self.said or self.told:
            said, self.said = self.said, []
            for peer, message in said:
                self._coordinate(MessageArrived(peer, message))
            told, self.told = self.told, []
            for peer, message in told:
                self._board(peer, MessageArrived(b"", message))
        for peer, board in self.boards.items():
            while board.loading:
                board.holds = board.loading.pop(0).block
                self._board(peer, BlockLoaded(1.0))
            if board.connects:
                board.connects = False
                self._board(peer, RingReached())
        if self.connects:
            self.connects = False
            self._coordinate(RingReached())

    # --- machines -----------------------------------------------------------------------------

    def _coordinate(self, event: Event) -> None:
        self._carry_out(self.coordinator.handle(event, self.now))
        self.check()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendPeer(peer, message):
                    self.told.append((peer, message))
                case ConnectRing():
                    self.connects = True
                case OpenRing():
                    self.connects = False
                case Forward(RingUp()):
                    self.is_up = True
                case Forward(RingDown()):
                    self.is_up = False

    def _board(self, peer: bytes, event: Event) -> None:
        board = self.boards.get(peer)
        if board is None or not board.is_on:
            return
        for effect in board.machine.handle(event, self.now):
            match effect:
                case SendCoordinator(message):
                    self.said.append((peer, message))
                case LoadBlock(assign):
                    board.loading.append(assign)
                case ConnectRing():
                    board.connects = True
                case OpenRing() | CloseRing():
                    board.connects = False
                case Stop():
                    board.is_on = False
        self.check()

    def check(self) -> None:
        """A ring that is up has the layers of all its stages, and they know their places."""
        if not self.is_up:
            return
        for peer in self.coordinator.stage_peers:
            member, board = self.coordinator.stage_at(peer), self.boards[peer]
            assert member is not None
            place = board.machine.place
            if not board.is_on:
                continue  # that will be noticed
            holds = None if board.loading else board.holds
            if place is None or place.number != member.number or holds != place.block:
                raise WrongRing(f"{member} is in the ring with {board.holds}, for {place}")


def live(seed: int, times: int = 8) -> None:
    """One whole history, most of them of a ring that was up; raises WrongRing."""
    history = UnfairNetwork(seed)
    if history.dice.random() < 0.8:
        history.recover()
    history.live_through(times)
    history.recover()
