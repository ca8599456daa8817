"""A ring that shrank: it is shared out over more devices again when there are spares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations

import pytest
from msgspec.structs import replace
from support.memberships import HOME, address, asks, goes_up, to
from support.tiers import tiered

from edgespec.config import Timing
from edgespec.machines.effects import (
    Effect,
    Forward,
    SendCoordinator,
    SendPeer,
)
from edgespec.machines.events import (
    Event,
    Hold,
    MessageArrived,
    RingDown,
    Tick,
)
from edgespec.planning.partition import split_layers
from edgespec.ring.effects import ConnectRing, FetchBlock, KeepHolders, LoadBlock, Log, Stop
from edgespec.ring.events import (
    BlockFetched,
    BlockLoaded,
    BlockLoading,
    ControlEnded,
    KeyRemoved,
    RingBroke,
    RingReached,
)
from edgespec.ring.member import MemberMachine
from edgespec.ring.membership import MembershipMachine
from edgespec.ring.repartition import SETTLED_BEATS
from edgespec.wire.messages import (
    ALL_REQUESTS,
    Assign,
    Fault,
    Goodbye,
    Join,
)

LAYERS = 12
RECOVERY = 20.0
TIMING = Timing(beat=1.0, silence=4.0, client_silence=10.0, recovery=RECOVERY)
LOST_S = RECOVERY / 2 + 8.0
"""Until a stage that says nothing is lost, and the model shared out anew."""
SETTLED_S = SETTLED_BEATS * TIMING.beat + 3.0


@dataclass
class Board:
    """A device: a member machine, and how it is with it."""

    machine: MemberMachine
    join: Join
    is_on: bool = True
    loads: int = 0  # blocks that it has loaded
    holds: object = None
    on_disk: set[object] | None = None
    takes: float = 0.0
    """Seconds to load a block."""
    sent: float = 0.0
    """Further ones for one that is not on its disk."""


class Cluster:
    """A coordinator's membership and real member machines, second by second."""

    def __init__(self, stages: int, timing: Timing = TIMING, holders: Sequence[str] = ()) -> None:
        self.timing = timing
        self.now = 100.0
        self.load = (0, 0)
        self.boards: dict[bytes, Board] = {}
        self.done: list[Effect] = []
        self.replanned: list[tuple[str, ...]] = []
        self.places = self._shared(stages)
        self.machine = MembershipMachine(
            *(self.places, HOME, timing, lambda: self.load),
            replan=self._replan,
            holders=holders,
        )
        self._later: list[tuple[float, bytes, Event]] = []

    def _shared(self, stages: int) -> list[Assign]:
        return [
            Assign(s, stages, first, end, "model", "mark", "float32", "none", 100, 7, "key")
            for s, (first, end) in enumerate(split_layers(LAYERS, stages), 1)
        ]

    def _replan(self, joins: Sequence[Join]) -> list[Assign] | None:
        self.replanned.append(tuple(join.name for join in joins))
        return self._shared(len(joins)) if all(join.memory != 1 for join in joins) else None

    # --- devices ------------------------------------------------------------------------------

    def start(self, number: int, stage: int = 0, process: int = 0, **changes: object) -> bytes:
        """Board `number` begins to ask for a place; returns its address."""
        join = asks(number, **{"pid": 70 + number + 100 * process, **changes})
        join = replace(join, stage=stage)
        peer = b"%s process %d" % (address(number), process)
        self.boards[peer] = Board(MemberMachine(join, "D0", 1e9, self.timing), join, on_disk=set())
        return peer

    def vanish(self, peer: bytes) -> None:
        """It is gone, and so are its connections."""
        self.boards[peer].is_on = False
        self._later = [one for one in self._later if one[1] != peer]
        self.tell(ControlEnded())

    def tell(self, event: Event) -> list[Effect]:
        """The coordinator's."""
        before = len(self.done)
        self._carry_out(self.machine.handle(event, self.now))
        return self.done[before:]

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self.done.append(effect)
            if isinstance(effect, SendPeer):
                self.say(effect.peer, MessageArrived(b"", effect.message))
            elif isinstance(effect, ConnectRing):
                self.tell(RingReached())

    def say(self, peer: bytes, event: Event) -> None:
        board = self.boards.get(peer)
        if board is None or not board.is_on:
            return
        for effect in board.machine.handle(event, self.now):
            if isinstance(effect, SendCoordinator):
                self.tell(MessageArrived(peer, effect.message))
            elif isinstance(effect, LoadBlock):
                board.holds = effect.assign.block
                assert board.on_disk is not None
                sent = 0.0 if effect.assign.block in board.on_disk else board.sent
                board.on_disk.add(effect.assign.block)
                board.loads += 1
                self._later.append((self.now + board.takes + sent, peer, BlockLoaded(board.takes)))
            elif isinstance(effect, FetchBlock) and effect.assign is not None:
                assert board.on_disk is not None
                board.on_disk.add(effect.assign.block)
                fetched = BlockFetched(effect.assign, board.takes)
                self._later.append((self.now + board.takes + board.sent, peer, fetched))
            elif isinstance(effect, ConnectRing):
                self.say(peer, RingReached())
            elif isinstance(effect, Stop):
                board.is_on = False

    def wait(self, seconds: float) -> list[Effect]:
        """So long everybody does what it does; what the coordinator did meanwhile."""
        before, until = len(self.done), self.now + seconds
        while self.now < until:
            self.step()
        return self.done[before:]

    def step(self) -> None:
        """A second."""
        self.now += 1.0
        due = [one for one in self._later if one[0] <= self.now]
        self._later = [one for one in self._later if one[0] > self.now]
        for _, peer, event in due:
            self.say(peer, event)
        for peer, board in self.boards.items():
            if board.is_on and self.now >= (board.machine.deadline() or 0.0):
                self.say(peer, Tick())
        deadline = self.machine.deadline()
        if deadline is not None and self.now >= deadline:
            self.tell(Tick())

    # --- what is to be seen -------------------------------------------------------------------

    @property
    def stages(self) -> int:
        """Of the ring that is up; 0 if none is."""
        status = self.machine.status()
        return status.stages if status.ready else 0

    def place(self, peer: bytes) -> int:
        """Which stage a board is."""
        member = self.machine.stage_at(peer)
        return member.stage if member else 0

    def assert_sound(self) -> None:
        """The ring that is up has each layer once, in order, in boards that are on and hold it."""
        shared = [(n.stage, n.first, n.end) for n in self.machine.status().nodes if n.stage]
        assert [first for _, first, _ in shared] == [0, *(end for *_, end in shared[:-1])]
        assert shared[-1][2] == LAYERS
        for peer in self.machine.stage_peers:
            stage, first, end = shared[self.place(peer) - 1]
            assert self.boards[peer].is_on
            assert self.boards[peer].holds == ("mark", first, end, "none", "float32", "", ""), stage


def ups(effects: Sequence[Effect]) -> int:
    """How often a ring came up."""
    return sum(goes_up([effect]) for effect in effects)


def downs(effects: Sequence[Effect]) -> list[RingDown]:
    """How often there was none."""
    told = [e.event for e in effects if isinstance(e, Forward)]
    return [event for event in told if isinstance(event, RingDown)]


def up(stages: int = 3, **changes: object) -> tuple[Cluster, list[bytes]]:
    """A ring of boards that nobody numbered."""
    cluster = Cluster(stages)
    peers = [cluster.start(number, **changes) for number in range(1, stages + 1)]
    cluster.wait(3)
    assert cluster.stages == stages
    return cluster, peers


def shrunk(stages: int = 3, lost: int = 2) -> tuple[Cluster, list[bytes]]:
    """One whose board of that stage was away for so long that the others do without it."""
    cluster, peers = up(stages)
    cluster.vanish(peers[lost - 1])
    cluster.wait(LOST_S)
    assert cluster.stages == stages - 1
    return cluster, peers


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_who_comes_back_to_a_ring_that_shrank_has_its_place_again(lost: int) -> None:
    cluster, peers = shrunk(lost=lost)
    peers[lost - 1] = cluster.start(lost, process=1)
    done = cluster.wait(SETTLED_S)
    assert cluster.stages == 3
    assert [cluster.place(peer) for peer in peers] == [1, 2, 3]
    assert list(cluster.machine.status().nodes)[1].first == 4, "the shares are those of before"
    assert [down.lost for down in downs(done)] == [False], "nobody's patience runs out over it"
    cluster.assert_sound()


def test_all_fetch_their_layers_while_the_ring_goes_on() -> None:
    cluster, peers = shrunk()
    back = cluster.start(2, process=1)
    for board in cluster.boards.values():
        board.takes = 15.0
        board.loads = 0
    done = cluster.wait(SETTLED_S + 10)
    assert not downs(done)
    assert cluster.stages == 2
    assert [cluster.boards[peer].loads for peer in (peers[0], back)] == [0, 0]
    assert ("mark", 0, 4, "none", "float32", "", "") in (cluster.boards[peers[0]].on_disk or ())
    assert ("mark", 4, 8, "none", "float32", "", "") in (cluster.boards[back].on_disk or ())
    cluster.wait(5 + 20)
    assert cluster.stages == 3
    assert cluster.boards[back].loads == 1
    cluster.assert_sound()


def test_a_new_device_gets_the_place_of_one_that_stays_away() -> None:
    cluster, peers = shrunk()
    new = cluster.start(7)
    cluster.wait(SETTLED_S)
    assert [cluster.place(peer) for peer in (peers[0], new, peers[2])] == [1, 2, 3]
    assert cluster.replanned[-1] == ("board1", "board7", "board3")


def test_places_by_number_are_those_of_the_same_numbers_again() -> None:
    cluster = Cluster(3)
    peers = [cluster.start(number, stage=4 - number) for number in (1, 2, 3)]
    cluster.wait(3)
    cluster.vanish(peers[2])  # stage 1
    cluster.wait(LOST_S)
    assert [cluster.place(peer) for peer in peers[:2]] == [2, 1]
    peers[2] = cluster.start(8, stage=1)
    cluster.wait(SETTLED_S)
    assert [cluster.place(peer) for peer in peers] == [3, 2, 1]
    cluster.assert_sound()


def test_a_numbered_stage_that_asks_again_in_a_ring_that_shrank_is_not_refused() -> None:
    cluster = Cluster(3)
    peers = [cluster.start(number, stage=number) for number in (1, 2, 3)]
    cluster.wait(3)
    cluster.vanish(peers[0])
    cluster.wait(LOST_S)
    (told,) = to(cluster.tell(MessageArrived(peers[1], cluster.boards[peers[1]].join)), peers[1])
    assert isinstance(told, Assign)


def test_no_request_is_broken_off_for_it() -> None:
    cluster, _ = shrunk()
    cluster.load = (1, 0)
    cluster.start(2, process=1)
    done = cluster.wait(SETTLED_S + RECOVERY)
    assert not downs(done)
    cluster.load = (0, 0)
    cluster.wait(3)
    assert cluster.stages == 3


def test_with_a_queue_that_never_ends_it_is_done_between_two_requests() -> None:
    cluster, _ = shrunk()
    cluster.load = (1, 3)
    cluster.start(2, process=1)
    done = cluster.wait(SETTLED_S)
    assert not [e for e in done if isinstance(e, Forward)], "first it waits for a quiet moment"
    done = cluster.wait(RECOVERY / 2)
    (held,) = (e.event for e in done if isinstance(e, Forward))
    assert isinstance(held, Hold)
    assert "no further request begins before" in held.reason
    cluster.load = (0, 3)
    cluster.wait(3)
    assert cluster.stages == 3


def test_a_hold_is_over_when_the_spare_is_gone() -> None:
    cluster, _ = shrunk()
    cluster.load = (1, 3)
    back = cluster.start(2, process=1)
    cluster.wait(SETTLED_S + RECOVERY / 2)
    cluster.vanish(back)
    done = cluster.wait(30)
    assert [e.event for e in done if isinstance(e, Forward)] == [Hold("")]
    cluster.load = (0, 3)
    cluster.wait(3)
    assert cluster.stages == 2


def test_a_device_that_does_not_stay_moves_no_layers() -> None:
    cluster, peers = shrunk()
    before = [cluster.boards[peer].loads for peer in (peers[0], peers[2])]
    for process in range(1, 6):
        back = cluster.start(2, process=process)
        done = cluster.wait(SETTLED_BEATS / 2)
        cluster.vanish(back)
        done += cluster.wait(SETTLED_BEATS)
        assert not downs(done)
    assert before == [cluster.boards[peer].loads for peer in (peers[0], peers[2])]
    assert cluster.stages == 2


def test_a_device_that_comes_and_goes_is_waited_for_longer_each_time() -> None:
    cluster, _ = shrunk()
    waited = []
    for process in range(1, 5):
        back = cluster.start(2, process=process)
        begun = cluster.now
        while cluster.stages != 3:
            cluster.step()
        waited.append(cluster.now - begun)
        cluster.vanish(back)
        cluster.wait(LOST_S)
    for before, after in pairwise(waited):
        assert after > 1.7 * before


@pytest.mark.parametrize("way", ["vanishes", "leaves", "fails", "is removed", "is not reached"])
def test_a_device_that_is_lost_while_the_ring_grows_costs_only_the_growth(way: str) -> None:
    cluster, peers = shrunk()
    back = cluster.start(2, process=1)
    while not downs(cluster.wait(1)):
        for peer in peers:
            cluster.boards[peer].takes = 15.0  # from now on: the others load
    cluster.wait(1)
    assert cluster.stages == 0
    before = len(cluster.done)
    if way == "vanishes":
        cluster.vanish(back)
    elif way == "leaves":
        cluster.tell(MessageArrived(back, Goodbye("stopped")))
        cluster.vanish(back)
    elif way == "fails":
        cluster.tell(MessageArrived(back, Fault(ALL_REQUESTS, "no memory")))
        cluster.vanish(back)
    elif way == "is removed":
        cluster.tell(KeyRemoved("key of V2"))
        cluster.vanish(back)
    else:
        cluster.tell(RingBroke("it cannot reach the next node"))
    cluster.wait(40)
    assert cluster.stages == 2
    assert not any(down.lost for down in downs(cluster.done[before:])), "requests wait on"
    assert "is shared out as before, over 2 device(s)" in downs(cluster.done[before:])[-1].reason
    cluster.assert_sound()


def test_a_ring_that_does_not_come_up_in_time_is_what_it_was_again() -> None:
    cluster, peers = shrunk()
    cluster.start(2, process=1)
    cluster.load = (1, 0)
    cluster.wait(SETTLED_S)
    cluster.load = (0, 0)
    cluster.boards[peers[0]].takes = 1e6  # its disk hangs, which its heartbeats do not
    growing, down = downs(cluster.wait(RECOVERY + 5))
    assert not growing.lost
    assert "stage 1 (board1, process 71) was not ready within 21 s" in down.reason
    assert not down.lost
    assert cluster.stages == 0, "it hangs still"
    (down,) = downs(cluster.wait(RECOVERY))
    assert down.lost, "there is an end to waiting"


def test_a_ring_that_changes_has_as_long_as_its_devices_come_on() -> None:
    cluster, peers = shrunk()
    cluster.start(2, process=1)
    cluster.load = (1, 0)
    cluster.wait(SETTLED_S)
    cluster.load = (0, 0)
    cluster.boards[peers[0]].takes = 3 * RECOVERY
    cluster.wait(RECOVERY / 2)
    for step in range(6):
        cluster.say(peers[0], BlockLoading(f"loading {step} of 6 layers"))
        cluster.wait(RECOVERY / 2)
    assert cluster.stages == 3, "it was as slow as that"


def test_a_stage_that_is_lost_while_the_ring_grows_is_replaced_by_who_came() -> None:
    cluster, peers = shrunk()
    back = cluster.start(2, process=1)
    while not downs(cluster.wait(1)):
        for peer in peers:
            cluster.boards[peer].takes = 15.0
    cluster.vanish(peers[0])
    done = cluster.wait(60)
    assert any(down.lost for down in downs(done))
    assert cluster.stages == 2
    assert cluster.place(back) == 1
    cluster.assert_sound()


def test_a_stage_that_is_lost_while_a_spare_prepares_is_replaced_by_it() -> None:
    cluster, peers = shrunk()
    back = cluster.start(2, process=1)
    cluster.boards[back].takes = 40.0
    cluster.wait(SETTLED_S)
    cluster.vanish(peers[2])
    cluster.wait(120)
    assert cluster.stages == 2
    assert cluster.place(back) == 2
    cluster.assert_sound()


def test_without_memory_the_spare_stays_one() -> None:
    cluster, _ = shrunk()
    cluster.start(7, memory=1)
    done = cluster.wait(3 * SETTLED_S)
    assert not downs(done)
    assert done.count(Log("the spares have no memory for a part of the model")) == 1


def test_a_ring_with_all_its_places_takes_nobody_in() -> None:
    cluster, _ = up()
    cluster.start(4)
    assert not downs(cluster.wait(3 * SETTLED_S))
    assert cluster.stages == 3


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_spare_that_has_stood_by_is_sent_nothing_when_it_is_needed(lost: int) -> None:
    cluster, peers = up()
    spare = cluster.start(7)
    cluster.boards[spare].sent = 15.0
    cluster.wait(3 * 15.0 + 5.0)
    assert cluster.boards[spare].loads == 0
    cluster.vanish(peers[lost - 1])
    cluster.wait(TIMING.silence + 3.0)
    assert cluster.stages == 3
    assert cluster.place(spare) == lost
    cluster.assert_sound()


def test_of_two_that_are_away_each_comes_back_by_itself() -> None:
    cluster, peers = up(4)
    for peer in peers[1:3]:
        cluster.vanish(peer)
    cluster.wait(LOST_S)
    assert cluster.stages == 2
    third = cluster.start(3, process=1)
    cluster.wait(3 * SETTLED_S)
    assert cluster.stages == 3
    assert [cluster.place(peer) for peer in (peers[0], third, peers[3])] == [1, 2, 3]
    second = cluster.start(2, process=1)
    cluster.wait(3 * SETTLED_S)
    assert [cluster.place(p) for p in (peers[0], second, third, peers[3])] == [1, 2, 3, 4]
    cluster.assert_sound()


# --- a coordinator that begins again --------------------------------------------------------------


def kept(cluster: Cluster) -> tuple[str, ...]:
    """What it remembers over a restart."""
    told = [effect.keys for effect in cluster.done if isinstance(effect, KeepHolders)]
    return told[-1] if told else ()


@pytest.mark.parametrize("order", [*permutations((1, 2, 3))])
def test_after_a_restart_each_board_has_the_place_of_before(order: tuple[int, ...]) -> None:
    cluster, peers = up()
    keys = kept(cluster)
    assert keys == tuple(cluster.boards[peer].join.key for peer in peers)
    again = Cluster(3, holders=keys)
    for number in order:
        again.start(number)
        again.wait(1)
    again.wait(3)
    assert again.stages == 3
    assert [again.place(peer) for peer in peers] == [1, 2, 3]
    assert [again.boards[peer].loads for peer in peers] == [1, 1, 1]
    assert not kept(again), "it is known"


@pytest.mark.parametrize("takes", [0.0, 60.0])
def test_a_board_that_had_no_place_gives_way_unless_it_has_its_layers(takes: float) -> None:
    cluster, peers = up()
    again = Cluster(3, holders=kept(cluster))
    new = again.start(7)
    again.boards[new].takes = takes
    again.wait(2)
    assert again.place(new) == 1
    for number in (1, 2, 3):
        again.start(number)
    again.wait(3)
    assert again.stages == 3
    if takes:
        assert [again.place(peer) for peer in (*peers, new)] == [1, 2, 3, 0]
    else:
        assert [again.place(peer) for peer in (*peers, new)] == [0, 2, 3, 1]
        assert kept(again)[0] == again.boards[new].join.key
    assert [again.boards[peer].loads for peer in peers[1:]] == [1, 1]


# --- whatever happens -----------------------------------------------------------------------------


@pytest.mark.parametrize("first", tiered(range(0, 120, 40), [0]))
def test_in_the_end_a_ring_has_all_its_places_again(first: int) -> None:
    """Devices die at any moment, come back at any other, and load for any time."""
    grown = 0
    for seed in range(first, first + 40):
        grown += play(random.Random(f"{seed} growing"))
    assert grown > 20, "it shrank and grew often enough to tell"


def play(rng: random.Random) -> int:
    """One ring's life; returns how often it grew."""
    stages = rng.choice((2, 3, 3, 4))
    cluster, peers = up(stages)
    processes = 0
    for _ in range(rng.randint(2, 8)):
        cluster.load = rng.choice(((0, 0), (0, 0), (1, 0), (1, 2)))
        number = rng.randrange(stages)
        match rng.choice(("lose", "lose", "stop", "both", "slow", "new", "break")):
            case "lose":
                cluster.vanish(peers[number])
            case "stop":
                cluster.tell(MessageArrived(peers[number], Goodbye("stopped")))
                cluster.vanish(peers[number])
            case "both":
                cluster.vanish(peers[number])
                cluster.vanish(peers[number - 1])
            case "slow":
                for board in cluster.boards.values():
                    board.takes = rng.choice((0.0, 2.0, 15.0, 25.0))
            case "new":
                cluster.start(stages + 1 + processes)
            case "break":
                cluster.tell(RingBroke("it cannot reach the next node"))
        for second in range(rng.choice((1, 5, 30, int(LOST_S), 60))):
            if not second % 10 and cluster.load[0]:
                cluster.load = (int(rng.random() < 0.7), cluster.load[1])
            look(cluster)
        if rng.random() < 0.7:
            processes += 1
            restart(cluster, peers, processes)
        for _ in range(rng.choice((1, 5, 25, 60))):
            look(cluster)
    cluster.load = (0, 0)
    for board in cluster.boards.values():
        board.takes = min(board.takes, 15.0)
    restart(cluster, peers, processes + 1)
    limit = cluster.now + 6000.0
    while cluster.stages < stages and cluster.now < limit:
        look(cluster)
    assert cluster.stages == stages
    look(cluster)
    cluster.assert_sound()
    return sum("shared out again" in down.reason for down in downs(cluster.done))


def restart(cluster: Cluster, peers: list[bytes], process: int) -> None:
    """Every board that is off is started again."""
    for number, peer in enumerate(peers, start=1):
        if not cluster.boards[peer].is_on:
            peers[number - 1] = cluster.start(number, process=process)


def look(cluster: Cluster) -> None:
    """A second, after which a ring that is up must be one."""
    cluster.step()
    if cluster.stages and all(cluster.boards[p].is_on for p in cluster.machine.stage_peers):
        cluster.assert_sound()
