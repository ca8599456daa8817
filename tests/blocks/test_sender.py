"""The sender of blocks in virtual time: receivers take turns, and a busy ring goes first."""

from __future__ import annotations

import pytest

from edgespec.blocks.receiver import WINDOW
from edgespec.blocks.sender import LONGEST_TURN_S, MOST_PEERS, SHARE, PieceSender, SendPiece
from edgespec.wire.block_messages import PieceRequest

PIECE = 1 << 18


def request(number: int, have: int = 0, length: int = PIECE) -> PieceRequest:
    """For the piece of that number."""
    return PieceRequest("0" * 64, number * PIECE, length, have * PIECE)


def numbers(leaving: list[SendPiece]) -> list[int]:
    """The numbers of the pieces that leave."""
    return [each.request.offset // PIECE for each in leaving]


def test_an_idle_ring_leaves_all_to_the_transfer() -> None:
    sender = PieceSender()
    for number in range(4):
        assert numbers(sender.asked(b"a", request(number), 0.0)) == [number]
    assert sender.deadline() is None


def test_a_busy_ring_has_one_piece_on_its_way_at_a_time() -> None:
    sender = PieceSender()
    sender.set_busy(True, 0.0)
    assert numbers(sender.asked(b"a", request(0), 0.0)) == [0]
    assert numbers(sender.asked(b"a", request(1), 0.0)) == []
    assert numbers(sender.asked(b"a", request(2, have=1), 0.1)) == []
    rest = 0.1 + 0.1 * (1 - SHARE) / SHARE
    assert sender.deadline() == pytest.approx(rest)
    assert numbers(sender.set_busy(True, rest - 0.01)) == []
    assert numbers(sender.set_busy(True, rest + 0.01)) == [1]
    assert numbers(sender.set_busy(True, rest + 1.0)) == []
    assert numbers(sender.set_busy(False, rest + 1.0)) == [2]


def test_a_piece_that_never_arrives_is_not_waited_for_for_ever() -> None:
    sender = PieceSender()
    sender.set_busy(True, 0.0)
    sender.asked(b"dead", request(0), 0.0)
    assert numbers(sender.asked(b"a", request(5), 0.0)) == []
    assert sender.deadline() == LONGEST_TURN_S
    assert numbers(sender.set_busy(True, LONGEST_TURN_S)) == [5]


def test_a_receiver_that_left_holds_up_nobody() -> None:
    sender = PieceSender()
    sender.set_busy(True, 0.0)
    sender.asked(b"dead", request(0), 0.0)
    sender.asked(b"dead", request(1), 0.0)
    sender.asked(b"a", request(5), 0.0)
    sender.left(b"dead")
    assert numbers(sender.set_busy(True, 0.1)) == [5]


def test_receivers_take_turns() -> None:
    sender = PieceSender()
    sender.set_busy(True, 0.0)
    sender.asked(b"x", request(0), 0.0)
    for peer, count in ((b"greedy", 8), (b"a", 2), (b"b", 2)):
        for number in range(count):
            sender.asked(peer, request(number), 0.0)
    leaving = sender.set_busy(False, 0.0)
    assert [each.peer for each in leaving[:6]] == [b"greedy", b"a", b"b"] * 2
    assert len(leaving) == 12


def test_what_waits_for_a_peer_is_bounded_and_repeats_take_no_place() -> None:
    sender = PieceSender()
    sender.set_busy(True, 0.0)
    sender.asked(b"x", request(0), 0.0)
    for peer in range(MOST_PEERS + 10):
        for number in [0, 0, *range(100)]:
            sender.asked(b"%d" % peer, request(number), 0.0)
    leaving = sender.set_busy(False, 0.0)
    assert len({each.peer for each in leaving}) == MOST_PEERS
    assert len(leaving) == MOST_PEERS * 2 * WINDOW
    assert len(set(leaving)) == len(leaving)


class Link:
    """A link that carries one thing at a time, shared by a transfer and the ring's messages."""

    def __init__(self, rate: float, receivers: int, busy: bool) -> None:
        """`rate`: bytes a second; each receiver always asks for WINDOW pieces more."""
        self.rate = rate
        self.busy = busy
        self.sender = PieceSender()
        self.free_at = 0.0
        self.occupied = 0.0
        self.sent = {b"%d" % number: 0 for number in range(receivers)}
        self.landings: list[tuple[float, bytes, int]] = []
        self.carry(self.sender.set_busy(busy, 0.0), 0.0)
        for peer in self.sent:
            for number in range(WINDOW):
                self.carry(self.sender.asked(peer, request(number), 0.0), 0.0)

    def carry(self, pieces: list[SendPiece], now: float) -> None:
        """What leaves now occupies the link."""
        for leaving in pieces:
            takes = leaving.request.length / self.rate
            self.free_at = max(self.free_at, now) + takes
            self.occupied += takes
            number = leaving.request.offset // PIECE
            self.landings.append((self.free_at, leaving.peer, number))

    def run(self, seconds: float, control_every: float) -> list[float]:
        """Play; returns how long each of the ring's messages waits for a piece before it."""
        waits, now, control = [], 0.0, 0.0
        while now < seconds:
            woken = self.sender.deadline()
            landing = min((at for at, _, _ in self.landings), default=seconds)
            now = min(landing, control, seconds, woken if woken and woken > now else seconds)
            if now == control:
                waits.append(max(self.free_at - now, 0.0))
                control += control_every
            for landed in [each for each in self.landings if each[0] <= now]:
                self.landings.remove(landed)
                _, peer, number = landed
                self.sent[peer] += PIECE
                asked = request(number + WINDOW, have=number + 1)
                self.carry(self.sender.asked(peer, asked, now), now)
            self.carry(self.sender.set_busy(self.busy, now), now)
        return waits


@pytest.mark.parametrize("rate", [1e6, 12e6, 118e6, 1e9])
@pytest.mark.parametrize("receivers", [1, 3])
def test_a_busy_ring_keeps_most_of_any_link(rate: float, receivers: int) -> None:
    seconds = 400 * PIECE / rate
    link = Link(rate, receivers, busy=True)
    waits = link.run(seconds, control_every=seconds / 1009)
    one_piece = PIECE / rate
    assert 0.9 * SHARE < link.occupied / seconds < SHARE + 0.01
    assert max(waits) <= one_piece * 1.0001
    assert sum(wait == 0.0 for wait in waits) > 0.7 * len(waits)
    assert max(link.sent.values()) - min(link.sent.values()) <= 2 * PIECE


def test_an_idle_ring_leaves_the_whole_link() -> None:
    seconds = 400 * PIECE / 12e6
    link = Link(12e6, 2, busy=False)
    link.run(seconds, control_every=seconds)
    assert sum(link.sent.values()) >= 0.99 * seconds * 12e6
