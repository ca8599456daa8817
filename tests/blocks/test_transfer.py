"""The receiver of a block in virtual time: whatever is lost, the file ends whole and verified."""

from __future__ import annotations

import tracemalloc
from collections import Counter, deque

import pytest
from support.transfers import CHUNK, PIECE, Receiver, block, fetch, offer_of, opened, piece_of

from edgespec.blocks.receiver import ASK_S, BLOCKS, RETRY_S, SILENCE_S, TRIES, WINDOW
from edgespec.errors import ConfigError, PeerLost, RemoteProtocolError
from edgespec.wire.block_messages import BlockPreparing, BlockRefused, BlockRequest, PieceRequest
from edgespec.wire.messages import Heartbeat

# --- the receiver ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0.001, 0.25, 0.9, 1, 1.1, 2, 3.4])
def test_a_block_arrives_whole_and_nothing_twice(chunks: float) -> None:
    data = block(chunks)
    receiver = opened(data)
    served = fetch(receiver, data)
    assert receiver.complete
    assert receiver.part == data
    assert sum(request.length for request in served) == len(data)


def test_at_most_one_chunk_is_asked_for_beyond_what_is_there() -> None:
    data = block(4)
    receiver = opened(data, bytearray(data[:100]))
    on_its_way = deque(receiver.take_asked())
    while on_its_way:
        assert len(on_its_way) <= WINDOW
        assert sum(request.length for request in on_its_way) <= CHUNK
        receiver.hear(piece_of(data, on_its_way.popleft()))
        on_its_way += receiver.take_asked()
    assert receiver.complete


def test_every_answer_to_a_piece_says_what_is_there() -> None:
    data = block(2)
    receiver = opened(data)
    for expected in range(PIECE, len(data) + 1, PIECE):
        request = PieceRequest(offer_of(data).sha256, expected - PIECE, PIECE, 0)
        receiver.asked.clear()
        receiver.hear(piece_of(data, request))
        assert {m.have for m in receiver.asked if isinstance(m, PieceRequest)} == {expected}


@pytest.mark.parametrize("there", [0, 1, PIECE, CHUNK - 1, CHUNK, CHUNK + 5, 2 * CHUNK + PIECE])
def test_it_goes_on_where_a_part_file_ends(there: int) -> None:
    data = block()
    receiver = opened(data, bytearray(data[:there]))
    served = fetch(receiver, data)
    assert receiver.complete
    assert receiver.part == data
    assert sum(request.length for request in served) == len(data) - there


def test_a_whole_part_file_needs_no_piece() -> None:
    data = block()
    receiver = opened(data, bytearray(data))
    assert receiver.complete
    assert receiver.take_asked() == []


@pytest.mark.parametrize("at", [0, CHUNK, 2 * CHUNK + 7])
def test_a_part_file_is_believed_up_to_its_first_wrong_chunk(at: int) -> None:
    data = block()
    part = bytearray(data)
    part[at] ^= 1
    receiver = opened(data, part)
    served = fetch(receiver, data)
    assert receiver.complete
    assert receiver.part == data
    assert served[0].offset == at // CHUNK * CHUNK


def test_a_part_file_that_is_too_long_or_of_another_block_is_no_harm() -> None:
    data = block()
    for part in (data + b"more", block(5, seed=1), block(0.5, seed=1)):
        receiver = opened(data, bytearray(part))
        fetch(receiver, data)
        assert receiver.complete
        assert receiver.part == data


def test_a_cut_costs_what_was_on_its_way() -> None:
    data = block(4)
    receiver = opened(data)
    first = receiver.take_asked()
    receiver.hear(piece_of(data, first[0]))
    receiver.link(False)
    receiver.hear(piece_of(data, first[1]))  # it was there before the cut
    assert receiver.take_asked()[-1].have == PIECE
    receiver.wait(1.5)
    receiver.link(True)
    assert receiver.asked == [BlockRequest(1)]
    assert receiver.take_asked() == []
    receiver.hear(offer_of(data))
    served = fetch(receiver, data)
    assert receiver.complete
    assert served[0].offset == 2 * PIECE
    assert sum(request.length for request in served) == len(data) - 2 * PIECE


def test_a_sender_that_restarts_with_another_block_starts_a_new_one() -> None:
    old, new = block(3), block(2, seed=1)
    receiver = opened(old)
    receiver.hear(piece_of(old, receiver.take_asked()[0]))
    receiver.link(False)
    receiver.link(True)
    receiver.take_asked()
    receiver.hear(offer_of(new))
    fetch(receiver, new)
    assert receiver.complete
    assert receiver.part == new


def test_a_sender_that_never_makes_up_its_mind_is_refused() -> None:
    receiver = opened(block(1, seed=0))
    for seed in range(1, BLOCKS + 1):
        assert receiver.error is None
        receiver.hear(offer_of(block(1, seed=seed)))
    assert isinstance(receiver.error, RemoteProtocolError)
    assert "different blocks" in str(receiver.error)


def test_pieces_that_nobody_asked_for_are_ignored() -> None:
    data = block()
    sha256 = offer_of(data).sha256
    receiver = opened(data)
    for request in (
        PieceRequest(sha256, CHUNK, PIECE, 0),  # beyond the window
        PieceRequest(sha256, 1, PIECE, 0),
        PieceRequest(sha256, 0, PIECE - 1, 0),
        PieceRequest(sha256, PIECE, PIECE + 1, 0),
        PieceRequest("0" * 64, 0, PIECE, 0),
    ):
        receiver.hear(piece_of(data, request))
    assert not receiver.part
    fetch(receiver, data)
    assert receiver.part == data


def test_pieces_out_of_order_wait_for_those_before_them() -> None:
    data = block(1)
    receiver = opened(data)
    asked = receiver.take_asked()
    for request in reversed(asked[1:]):
        receiver.hear(piece_of(data, request))
        assert not receiver.part
    receiver.hear(piece_of(data, asked[0]))
    assert receiver.complete


def test_a_wrong_chunk_is_fetched_again() -> None:
    data = block()
    wrong = bytearray(data)
    wrong[CHUNK + 9] ^= 1
    receiver = opened(data)
    served = 0
    while asked := receiver.take_asked():
        for request in asked:
            served += request.length
            source = bytes(wrong) if served <= 2 * CHUNK else data
            receiver.hear(piece_of(source, request))
    assert receiver.complete
    assert receiver.part == data
    assert len(data) < served <= len(data) + 2 * CHUNK


def test_a_chunk_that_stays_wrong_ends_it_and_is_named() -> None:
    data = block()
    wrong = bytearray(data)
    wrong[CHUNK + 9] ^= 1
    receiver = opened(data)
    served = fetch(receiver, bytes(wrong))
    assert isinstance(receiver.error, RemoteProtocolError)
    assert "chunk 1 of block 1 from coordinator:7430" in str(receiver.error)
    assert receiver.part == data[:CHUNK]
    assert sum(r.length for r in served if CHUNK <= r.offset < 2 * CHUNK) == TRIES * CHUNK


def test_chunks_that_are_each_wrong_once_or_twice_are_no_reason_to_give_up() -> None:
    data = block(6)
    wrong = bytes(byte ^ 1 for byte in data)
    receiver = opened(data)
    seen: Counter[int] = Counter()
    while asked := receiver.take_asked():
        for request in asked:
            seen[request.offset] += 1
            receiver.hear(piece_of(data if seen[request.offset] >= TRIES else wrong, request))
    assert receiver.complete
    assert receiver.part == data


def test_what_follows_a_wrong_chunk_is_kept() -> None:
    data = block(2)
    receiver = opened(data)
    first, second, third, fourth = receiver.take_asked()
    receiver.hear(piece_of(data, first))
    (next_one,) = receiver.take_asked()
    receiver.hear(piece_of(data, next_one))
    for request in (second, third, fourth):
        receiver.hear(piece_of(bytes(len(data)), request))
    assert not receiver.part
    served = fetch(receiver, data)
    assert receiver.complete
    assert receiver.part == data
    assert next_one.offset not in {request.offset for request in served}


@pytest.mark.thorough
def test_a_sender_cannot_make_it_hoard_pieces() -> None:
    data = block(4)
    receiver = opened(data)
    pieces = []
    for offset in range(1, 2 * CHUNK, 37):
        request = PieceRequest(offer_of(data).sha256, offset, PIECE - offset % PIECE, 0)
        pieces.append(request)
    tracemalloc.start()
    for request in pieces:
        receiver.hear(piece_of(data, request))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 2 * CHUNK
    fetch(receiver, data)
    assert receiver.part == data


def test_a_file_that_is_not_what_was_offered_is_not_kept() -> None:
    data = block()
    receiver = Receiver()
    receiver.link(True)
    receiver.hear(offer_of(data, sha256="0" * 64))
    fetch(receiver, data)
    assert isinstance(receiver.error, RemoteProtocolError)
    assert "another hash" in str(receiver.error)
    assert not receiver.part


def test_a_refusal_carries_its_reason() -> None:
    receiver = Receiver()
    receiver.link(True)
    receiver.hear(BlockRefused("there is no stage 9"))
    assert isinstance(receiver.error, ConfigError)
    assert "coordinator:7430 has no block for us: there is no stage 9" in str(receiver.error)


def test_a_message_that_has_no_place_here_ends_it() -> None:
    receiver = Receiver()
    receiver.link(True)
    receiver.hear(Heartbeat())
    assert isinstance(receiver.error, RemoteProtocolError)


# --- waiting --------------------------------------------------------------------------------------


def test_a_sender_that_cannot_be_reached_is_lost() -> None:
    receiver = Receiver()
    receiver.wait(SILENCE_S - 0.1)
    assert receiver.error is None
    assert receiver.asked == []
    receiver.wait(0.2)
    assert isinstance(receiver.error, PeerLost)
    assert "coordinator:7430" in str(receiver.error)
    assert "port open" in str(receiver.error)


def test_a_silent_sender_is_asked_again_and_then_lost() -> None:
    receiver = Receiver()
    receiver.link(True)
    receiver.wait(SILENCE_S + 0.1)
    assert isinstance(receiver.error, PeerLost)
    assert len(receiver.asked) == SILENCE_S // ASK_S
    assert "belong to this ring" in str(receiver.error)


def test_a_sender_that_prepares_for_long_is_waited_for() -> None:
    receiver = Receiver()
    receiver.link(True)
    for layer in range(10):
        receiver.wait(0.9 * SILENCE_S)
        receiver.hear(BlockPreparing(f"quantising layer {layer} of 10"))
    assert receiver.error is None
    assert receiver.shown[-1].text == "quantising layer 9 of 10"


def test_a_lost_piece_is_asked_for_again() -> None:
    data = block(2)
    receiver = opened(data)
    lost, *others = receiver.take_asked()
    for request in others:
        receiver.hear(piece_of(data, request))
    receiver.wait(RETRY_S + 0.1)
    assert BlockRequest(1) in receiver.asked
    receiver.take_asked()
    receiver.hear(offer_of(data))
    assert receiver.take_asked() == [lost]  # the others wait for it already
    receiver.hear(piece_of(data, lost))
    fetch(receiver, data)
    assert receiver.complete


def test_it_asks_less_and_less_often() -> None:
    data = block(2)
    receiver = opened(data)
    for wait in (RETRY_S, 2 * RETRY_S):
        receiver.take_asked()
        receiver.wait(wait - 0.1)
        assert receiver.asked == []
        receiver.wait(0.2)
        assert receiver.asked == [BlockRequest(1)]
        receiver.hear(offer_of(data))


def test_offers_alone_are_no_progress() -> None:
    data = block()
    receiver = opened(data)
    for _ in range(100):
        receiver.wait(1.0)
        receiver.hear(offer_of(data))
    assert isinstance(receiver.error, PeerLost)


def test_progress_shows_rate_and_time_left() -> None:
    data = block(40)
    receiver = opened(data, bytearray(data[: 10 * CHUNK]))
    assert receiver.shown[1].done == 10 * CHUNK
    while not receiver.complete:
        for request in receiver.take_asked():
            receiver.now += 0.1
            receiver.hear(piece_of(data, request))
    # What was there already counts as done, but not as speed.
    rates = [shown.rate for shown in receiver.shown[2:]]
    assert all(rate == pytest.approx(PIECE / 0.1, rel=0.02) for rate in rates)
    dones = [shown.done for shown in receiver.shown]
    assert dones == sorted(dones)
    middle = receiver.shown[len(receiver.shown) // 2]
    assert middle.left == pytest.approx((middle.total - middle.done) / middle.rate)
    assert "MB/s" in middle.text
    assert "s left" in middle.text
    assert (receiver.shown[-1].done, receiver.shown[-1].left) == (len(data), 0.0)
    assert len(receiver.shown) < 12.0 / 0.25 + 3
