"""A ring of real nodes that heals: stages and coordinators come, go and stall; streams go on."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from msgspec import structs
from support.asking import Asking
from support.nodes import HOST, PATIENCE_S, QUICK, NodeRing, age, until
from support.rings import submit
from support.tiers import tiered

from edgespec.config import Address, Timing
from edgespec.errors import RequestFailed
from edgespec.runtime import node
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.wire.client_messages import Finished, Progress, Submit

LONG = submit(max_new_tokens=150, policy="flowspec")


@contextmanager
def answering(stages: int = 3, ask: Submit = LONG) -> Iterator[tuple[NodeRing, Asking]]:
    """A ring in the middle of an answer."""
    with NodeRing(stages) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.003
        asking = Asking(ring, ask)
        try:
            until(lambda: asking.tokens > 5)
            yield ring, asking
        finally:
            asking.end()


@pytest.mark.parametrize("lost", tiered([1, 2, 3], [1]))
@pytest.mark.parametrize("way", tiered(["vanished", "left"], ["vanished"]))
def test_a_stage_that_is_replaced_costs_no_token(lost: int, way: str) -> None:
    with answering() as (ring, asking):
        thread = ring.threads[lost]
        {"vanished": thread.vanish, "left": thread.leave}[way]()
        if way == "vanished":
            ring.outwait(lost)
        until(lambda: any(f"stage {lost} (toybox" in note for note in asking.notes))
        ring.start_stage(lost)
        end = asking.right()
        assert end.recoveries == 1
        assert sorted(ring.loaded) == sorted([1, 2, 3, lost]), "the others kept their blocks"
        ring.assert_free()


@pytest.mark.thorough
def test_a_stage_that_was_killed_and_comes_at_once_takes_its_place() -> None:
    """Before its predecessor's silence was noticed."""
    with answering() as (ring, asking):
        ring.threads[2].vanish()
        ring.start_stage(2)
        assert asking.right().recoveries == 1
        assert any("was replaced by process 1004" in note for note in asking.notes)


def test_a_dead_stage_is_noticed() -> None:
    """With the silence that daemons have: within two seconds where nothing else runs. (Where much
    does, another stage may be taken for lost before it.)"""
    with NodeRing(2, timing=replace(QUICK, silence=Timing().silence)) as ring:
        ring.await_up()
        with ring.client() as client:
            ring.threads[2].vanish()
            note = next(m for m in client.ask(submit()) if isinstance(m, Progress))
            while "stage 2" not in note.text:
                note = next(m for m in client.ask(submit()) if isinstance(m, Progress))
            assert re.search(r"stage 2 .* has been silent for \d+\.\d s", note.text)
            client.cancel()


def test_a_stage_that_stalls_and_goes_on_comes_back_with_its_block() -> None:
    with answering() as (ring, asking):
        ring.threads[2].freeze()
        ring.outwait(2)
        until(lambda: any("stage 2" in n and "silent" in n for n in asking.notes))
        ring.threads[2].thaw()
        assert asking.right().recoveries == 1
        assert ring.loaded.count(2) == 1
        ring.assert_free()


@pytest.mark.thorough
def test_losses_one_after_the_other() -> None:
    with answering(ask=structs.replace(LONG, max_new_tokens=300)) as (ring, asking):
        for number, lost in enumerate((3, 1, 2, 1), 1):
            before = asking.tokens
            ring.threads[lost].leave()
            until(lambda count=number: len(asking.notes) >= count)
            ring.start_stage(lost)
            until(lambda count=before: asking.tokens > count + 3 or asking.problem)
        assert asking.right().recoveries == 4


@pytest.mark.thorough
def test_a_queued_request_and_one_that_comes_meanwhile_are_answered_too() -> None:
    with answering() as (ring, asking):
        queued = Asking(ring, submit(max_new_tokens=20, seed=1))
        until(lambda: queued.notes)
        ring.threads[2].leave()
        until(lambda: asking.notes)
        late = Asking(ring, submit(max_new_tokens=20, seed=2))
        until(lambda: late.notes)
        assert "stage 2" in late.notes[0]
        assert "waiting for it" in late.notes[0]
        ring.start_stage(2)
        assert [a.right().recoveries for a in (asking, queued, late)] == [1, 0, 0]


def test_without_a_new_stage_it_is_one_clear_error_and_the_ring_can_still_be_helped() -> None:
    with NodeRing(2, recovery=1.0) as ring:
        ring.await_up()
        ring.blocks[0].delay = 0.01
        asking = Asking(ring, LONG)
        until(lambda: asking.tokens > 3)
        ring.threads[2].leave()
        asking.end()
        assert isinstance(asking.problem, RequestFailed)
        assert str(asking.problem) == (
            "stage 2 (toybox, process 1002) left: stopped by SIGTERM; it did not come back within "
            "1 s"
        )
        ring.start_stage(2)
        ring.await_up()
        ring.assert_right(submit(), ring.ask(submit()))
        ring.assert_free()


@pytest.mark.thorough
def test_a_request_that_is_cancelled_meanwhile_is_freed() -> None:
    with answering() as (ring, asking):
        with ring.client() as client:
            ring.threads[2].leave()
            for message in client.ask(submit(seed=3)):
                if isinstance(message, Progress) and "stage 2" in message.text:
                    client.cancel()
            assert isinstance(message, Finished)
            assert (message.finish_reason, message.new_tokens) == ("cancelled", 0)
        ring.start_stage(2)
        asking.right()
        ring.assert_free()


@pytest.mark.parametrize("way", ["vanished", "left"])
def test_stages_join_a_coordinator_that_was_restarted(way: str) -> None:
    with answering(2) as (ring, asking):
        thread = ring.threads[0]
        {"vanished": thread.vanish, "left": thread.leave}[way]()
        thread.join()
        if way == "vanished":
            assert asking.client is not None
            for hearer in (asking.client, *(ring.threads[s].node.member for s in (1, 2))):  # type: ignore[attr-defined]
                age(hearer)
        asking.end()
        assert asking.problem is not None
        ring.restart_coordinator()
        ring.await_up()
        assert sorted(ring.loaded) == [1, 2], "they kept their blocks"
        ring.assert_right(submit(), ring.ask(submit()))
        ring.assert_free()


def test_stages_give_their_blocks_up_with_a_coordinator_that_says_so() -> None:
    with answering(2) as (ring, asking):
        coordinator = ring.threads[0].node
        assert isinstance(coordinator, CoordinatorNode)
        coordinator.unloads = True
        ring.threads[0].leave()
        ring.threads[0].join()
        asking.end()
        ring.restart_coordinator()
        ring.await_up()
        assert sorted(ring.loaded) == [1, 1, 2, 2]
        long = structs.replace(submit(), max_new_tokens=100)
        ring.assert_right(long, ring.ask(long))
        assert {number: thread.stop for number, thread in ring.threads.items() if number} == {
            1: None,
            2: None,
        }


@pytest.mark.thorough
@pytest.mark.parametrize("place", [0, 1])
def test_a_broken_data_connection_is_made_anew(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "BROKEN_S", 0.1)
    with answering() as (ring, asking):
        ring.threads[place].node.transport.ring_broke = time.monotonic()
        until(lambda: any("broke" in note for note in asking.notes))
        assert asking.right().recoveries == 1


@pytest.mark.parametrize("place", tiered([0, 1], [1]))
def test_nodes_that_cannot_reach_each_other_are_named_and_nobody_hangs(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "REACH_S", PATIENCE_S)
    with NodeRing(2) as ring:
        transport = ring.threads[place].node.transport
        connect = transport.connect_ring
        with socket.socket() as nobody:  # bound, and deaf: as behind a firewall
            nobody.bind((HOST, 0))
            deaf = Address(HOST, nobody.getsockname()[1])

            def in_vain(_: Address, key: str) -> None:
                connect(deaf, key)
                transport.ring_awaited = time.monotonic() - 2 * node.REACH_S

            monkeypatch.setattr(transport, "connect_ring", in_vain)
            asking = Asking(ring, LONG)
            until(lambda: any("cannot reach" in note for note in asking.notes))
            ring.machine._state._limit = 0.1
            asking.end()
            assert asking.problem is not None
            assert f"cannot reach the next node of the ring, at {deaf}" in str(asking.problem)
            assert ("stage 1 (toybox" in str(asking.problem)) == (place == 1)
            assert not ring.membership.status().ready
        monkeypatch.setattr(transport, "connect_ring", connect)
        ring.await_up()
        ring.assert_right(submit(), ring.ask(submit()))
        ring.assert_free()


# --- spares ---------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_spare_takes_the_place_of_a_lost_stage_which_then_is_the_spare() -> None:
    with answering() as (ring, asking):
        ring.start_spare()
        until(ring.has_spare)
        ring.threads[2].freeze()
        ring.outwait(2)
        assert asking.right().recoveries == 1
        assert asking.notes
        ring.threads[2].thaw()
        until(ring.has_spare)
        again = Asking(ring, structs.replace(LONG, max_new_tokens=300))
        until(lambda: again.tokens > 5)
        ring.threads[4].leave()
        assert again.right().recoveries == 1
        assert ring.loaded.count(2) == 2, "the first holder of the place still has its block"


def test_spares_alone_make_a_ring() -> None:
    ring = NodeRing(2)
    ring.start_coordinator()
    try:
        ring.start_spare()
        ring.start_spare()
        ring.await_up()
        ring.assert_right(submit(), ring.ask(submit()))
    finally:
        ring.__exit__()
