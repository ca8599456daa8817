"""A ring of real nodes that shrank: who comes back has layers again, and every answer is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from msgspec import structs
from support.nodes import HOST, PATIENCE_S, QUICK, NodeRing, NodeThread, until
from support.rings import submit

from edgespec.backends.compute import StageCompute
from edgespec.errors import CapacityError
from edgespec.machines.effects import (
    RunBlock,
)
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.planning.partition import split_layers
from edgespec.ring.member import MemberMachine
from edgespec.ring.membership import MembershipMachine
from edgespec.ring.repartition import Repartition
from edgespec.runtime import stage_node
from edgespec.runtime.client import Client
from edgespec.runtime.stage_node import StageNode
from edgespec.sim.toy_model import FakeBlock
from edgespec.tree.stems import Fork
from edgespec.types.record import IntArray
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Finished, Progress, Submit, Tokens
from edgespec.wire.messages import Assign, Join

STAGES = 3
RECOVERY = 40.0
SHORT = submit(max_new_tokens=20)
LONG = submit(max_new_tokens=200, policy="flowspec")


class Layers:
    """Some toy layers, one behind the other."""

    def __init__(self, first: int, end: int) -> None:
        self._layers = [FakeBlock(layer) for layer in range(first, end)]

    def open(self, request: int, reserve: int) -> None:
        for layer in self._layers:
            layer.open(request, reserve)

    def move(self, request: int, base: int) -> None:
        for layer in self._layers:
            layer.move(request, base)

    def fork(self, request: int, base: int, how: Fork) -> None:
        for layer in self._layers:
            layer.fork(request, base, how)

    def run(self, job: RunBlock, stop: Callable[[], bool]) -> Tensor | None:
        time.sleep(0.003)
        stopped = stop()  # once: all layers have the same rows
        out: Tensor | None = None
        for layer in self._layers:
            job = job if out is None else replace(job, hidden=out)
            out = layer.run(job, lambda: stopped)
            if out is None and layer is not self._layers[-1]:
                out = Tensor("uint64", (len(job.rows), 1), bytes(8 * len(job.rows)))
        return None if stopped else out

    def take_aux_hidden(self) -> Tensor | None:
        return None

    def gather(self, request: int, start: int, order: IntArray) -> None:
        for layer in self._layers:
            layer.gather(request, start, order)

    def close(self, request: int) -> None:
        for layer in self._layers:
            layer.close(request)


class SharedRing(NodeRing):
    """A NodeRing of three layers, which any number of stages can share."""

    def __init__(self) -> None:
        super().__init__(STAGES, timing=replace(QUICK, recovery=RECOVERY), recovery=RECOVERY)
        self.fetched: list[tuple[int, int]] = []
        self.refusals = 0  # of a disk that is full
        self.obstacle: Callable[[Assign], None] = lambda assign: None
        """Called before a block is there, on disk or in memory."""

    def start_coordinator(self) -> NodeThread:
        thread = super().start_coordinator()
        old = self.membership._ring
        places = old.assignment.first

        def shared(joins: Sequence[Join]) -> list[Assign]:
            return [
                structs.replace(places[0], stage=s, stages=len(joins), first=first, end=end)
                for s, (first, end) in enumerate(split_layers(STAGES, len(joins)), start=1)
            ]

        self.membership = MembershipMachine(
            places, old._home, self.timing, self.machine.load, replan=shared
        )
        thread.node._membership = self.membership  # type: ignore[attr-defined]
        return thread

    def stage_node(self, stage: int, wait: float = 10.0, who: object = None) -> StageNode:
        self._pid += 1
        key = self.keys.add(f"device {self._pid}")
        transport = ZmqTransport.stage(self.address, key, HOST)
        join = Join(stage, "toybox", self._pid, HOST, transport.data_port, key.own.public)

        def load(assign: Assign, say: object, stop: object) -> StageCompute:
            self.obstacle(assign)
            self.loaded.append(assign.stage)
            return StageCompute(Layers(assign.first, assign.end))

        def fetch(assign: Assign, say: object, stop: object) -> None:
            if self.refusals:
                self.refusals -= 1
                raise CapacityError("the disk is full")
            self.obstacle(assign)
            self.fetched.append((assign.first, assign.end))

        member = MemberMachine(join, str(self.address), wait, self.timing)
        return StageNode(transport, member, self.address, load, fetch=fetch)

    def await_stages(self, stages: int) -> None:
        """Until a ring of so many is up."""

        def are_there() -> bool:
            status = self.membership.status()
            return status.ready and status.stages == stages

        until(are_there, 60.0)

    def shrink(self, stage: int) -> None:
        """That stage dies, and is away for too long."""
        self.threads[stage].vanish()
        self.outwait(stage)
        self.await_stages(STAGES - 1)

    def assert_answers(self, ask: Submit = SHORT) -> None:
        """An answer is right."""
        self.assert_right(ask, self.ask(ask))


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedRing]:
    """Up, of all its stages."""
    monkeypatch.setattr(Repartition, "_patience", 1.0)
    with SharedRing() as ring:
        ring.await_stages(STAGES)
        yield ring


@contextmanager
def asking(ring: SharedRing, *asks: Submit) -> Iterator[list[object]]:
    """Requests one behind the other, of one client, while something happens; what it got."""
    got: list[object] = []

    def run() -> None:
        with Client(ring.address, client, PATIENCE_S, ring.timing) as connection:
            for ask in asks:
                got.extend(connection.ask(ask))

    client = ring.keys.add("client", "client")
    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: got)
        yield got
    finally:
        thread.join(2 * PATIENCE_S)
    assert not thread.is_alive(), "the client hangs"
    ends = [one for one in got if isinstance(one, Finished)]
    assert len(ends) == len(asks)
    for ask, end in zip(asks, ends, strict=True):
        ring.assert_right(ask, end)


@pytest.mark.thorough
def test_a_stage_that_is_started_again_has_its_place_again_twice(ring: SharedRing) -> None:
    for lost in (2, 1):
        with asking(ring, LONG) as got:
            until(lambda got=got: any(isinstance(one, Tokens) for one in got))
            ring.shrink(lost)
        assert any(isinstance(one, Progress) and "shared out anew" in one.text for one in got)
        ring.start_stage(lost)
        ring.await_stages(STAGES)
        assert ring.threads[lost].node.place.stage == lost  # type: ignore[attr-defined]
        ring.assert_answers()
    assert ring.fetched, "the others had theirs on disk before the ring ended"


@pytest.mark.thorough
def test_answers_go_on_while_it_comes_back_and_none_is_broken_off(
    ring: SharedRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring.shrink(3)
    monkeypatch.setattr(stage_node, "FETCH_AGAIN_S", 0.1)
    loading, go_on = threading.Event(), threading.Event()

    def hinder(assign: Assign) -> None:
        loading.set()
        assert go_on.wait(60.0)

    ring.obstacle, ring.refusals = hinder, 1
    ring.start_stage(3)
    assert loading.wait(60.0), "it prepares"
    ring.assert_answers()
    assert ring.membership.status().stages == STAGES - 1, "the ring of two answers meanwhile"
    asks = [structs.replace(LONG, tag=tag, seed=tag) for tag in range(1, 9)]
    with asking(ring, *asks) as got:
        ring.obstacle = lambda assign: None
        go_on.set()
        ring.await_stages(STAGES)
    ends = [one for one in got if isinstance(one, Finished)]
    assert ring.fetched, "though the first time failed"
    assert sum(end.recoveries for end in ends) == 0, "it grew between two answers"
    ring.assert_answers()


def test_a_stage_that_dies_while_the_ring_grows_leaves_it_as_it_was(ring: SharedRing) -> None:
    ring.shrink(2)
    back = ring.start_stage(2)
    loading, go_on = threading.Event(), threading.Event()

    def hinder(assign: Assign) -> None:
        if assign.ring > 0:  # the others, once the ring has ended
            loading.set()
            assert go_on.wait(60.0)

    ring.obstacle = hinder
    assert loading.wait(60.0), "the ring has grown, but is not up"
    with asking(ring, SHORT) as got:
        (note, *_) = got
        assert isinstance(note, Progress)
        assert note.text == (
            "the model is shared out again, over 3 device(s); waiting until they have loaded "
            "their layers"
        )
        back.vanish()
        ring.outwait(2)
        until(lambda: ring.membership.status().stages == STAGES - 1)
        ring.obstacle = lambda assign: None
        go_on.set()
    notes = [one.text for one in got if isinstance(one, Progress)]
    assert any("is shared out as before, over 2 device(s)" in note for note in notes)
    ring.start_stage(2)
    ring.await_stages(STAGES)
    ring.assert_answers()
