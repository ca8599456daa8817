"""Rings of real nodes over ZeroMQ with fake stages: every node a thread, every wait a short one."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial

from msgspec import structs
from support.fake_draft import FakeDraft
from support.keys import OWN, OWNER_IDENTITY, ListedKeys
from support.toy_answers import Expected, plain_answer

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.config import Address, Timing
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.machines.effects import (
    RunBlock,
)
from edgespec.net.keys import Identity
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.ring.assignment import Member
from edgespec.ring.effects import Stop
from edgespec.ring.member import MemberMachine
from edgespec.ring.membership import MembershipMachine
from edgespec.runtime.access_policy import CLIENT, admits
from edgespec.runtime.async_client import AsyncClient
from edgespec.runtime.client import Client
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.runtime.node import RingNode
from edgespec.runtime.stage_node import StageNode
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.sim.toy_model import FakeBlock, FakeHead
from edgespec.types.tensor import Tensor
from edgespec.wire.client_messages import Finished, Submit
from edgespec.wire.messages import Assign, Connect, Join

HOST = "127.0.0.1"
CONTEXT = 400
QUICK = Timing(beat=0.05, silence=60.0, answer_silence=60.0, client_silence=60.0, retry=0.1)
"""Its silences are what a node of a test may stand still for, on a machine that does other things
too, without being lost. A test that loses one does not wait for them: see `age` and `aging`."""

LOOK_S = 0.05  # after so long at most a node sees that it is to end
AGE_S = 1200.0  # longer than any silence of a test

PATIENCE_S = 60.0


class SlowBlock(FakeBlock):
    """A toy block that takes its time, or fails when it is told to."""

    def __init__(self, stage: int) -> None:
        super().__init__(stage)
        self.delay = 0.0
        self.passes: threading.Semaphore | None = None
        """So many passes it may run, if set."""
        self.failure: Exception | None = None
        self.runs = 0

    def run(self, job: RunBlock, stop: Callable[[], bool]) -> Tensor | None:
        """One layer, later."""
        self.runs += 1
        if self.passes is not None:
            self.passes.acquire()
        time.sleep(self.delay)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().run(job, stop)


class NodeThread:
    """One node running in its own thread; `stop` is why it ended."""

    def __init__(self, node: RingNode) -> None:
        self.node = node
        self.stop: Stop | None = None
        self.crash: BaseException | None = None
        self._going_on, self._stands = threading.Event(), threading.Event()
        self._going_on.set()
        self._poll = node.transport.poll
        node.transport.poll = self._gated_poll  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.stop = self.node.run()
        except BaseException as problem:
            self.crash = problem

    def _gated_poll(self, timeout: float) -> object:
        while not self._going_on.is_set():
            self._stands.set()
            self._going_on.wait()
        return self._poll(min(timeout, LOOK_S))

    def freeze(self) -> None:
        """As SIGSTOP would."""
        self._going_on.clear()
        assert self._stands.wait(PATIENCE_S)

    def thaw(self) -> None:
        """As SIGCONT would."""
        self._stands.clear()
        self._going_on.set()

    def vanish(self) -> None:
        """As SIGKILL would: no farewell."""
        self.node.farewell = lambda reason, now: None  # type: ignore[method-assign]
        self.node.end("vanished", failed=True)
        self.thaw()
        self._thread.join(PATIENCE_S)

    def leave(self, reason: str = "stopped by SIGTERM") -> None:
        """As SIGTERM would."""
        self.node.end(reason, failed=False)

    def ended(self) -> Stop:
        """Wait for its end."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a node did not end"
        if self.crash is not None:
            raise self.crash
        assert self.stop is not None
        return self.stop

    def close(self) -> None:
        """Let it end in any case."""
        self.thaw()
        self.node.end("the test is over", failed=False)

    def join(self) -> None:
        """Wait for its end."""
        self._thread.join(PATIENCE_S)


class NodeRing:
    """A coordinator and its fake stages. Use as a context manager."""

    def __init__(
        self,
        stages: int = 2,
        *,
        timing: Timing = QUICK,
        eos_ids: Collection[int] = frozenset(),
        port: int = 0,
        draft: bool = True,
        recovery: float = PATIENCE_S,
        kept_rows: int = 0,
        live: int = 1,
        loads: dict[int, Callable[[], None]] | None = None,
    ) -> None:
        """`loads`: what a stage does before its block is there."""
        self.stages = stages
        self.timing = timing
        self.codec = ToyCodec(frozenset(eos_ids))
        self.blocks = [SlowBlock(stage) for stage in range(stages)]
        self.keys = ListedKeys()
        self.transport = self.open(port)
        self.address = Address(HOST, self.transport.control_port)
        self.draft = "fake" if draft else ""
        self._recovery = recovery
        self._kept_rows = kept_rows
        self._live = live
        self._pid = 1000
        self._loads = loads or {}
        self.threads: dict[int, NodeThread] = {}
        self.loaded: list[int] = []  # the stages whose blocks were loaded, in order

    def open(self, port: int) -> ZmqTransport:
        return ZmqTransport.coordinator(
            Address(HOST, port), OWNER_IDENTITY, partial(admits, self.keys)
        )

    def __enter__(self) -> NodeRing:
        self.start_coordinator()
        for stage in range(1, self.stages + 1):
            self.start_stage(stage)
        return self

    def __exit__(self, *_: object) -> None:
        # The stages first: nobody then has last words for one that has stopped listening.
        stages = [thread for number, thread in self.threads.items() if number]
        for threads in (stages, [t for number, t in self.threads.items() if not number]):
            for thread in threads:
                thread.close()
            for thread in threads:
                thread.join()

    def start_coordinator(self) -> NodeThread:
        """D0."""
        draft = FakeDraft(self.stages, VOCABULARY, 0.7) if self.draft else None
        key = secrets.token_hex(16)  # stages tell coordinators apart by it, too
        places = [
            Assign(s, self.stages, s - 1, s, "toy", "toy", "float64", "none", CONTEXT, 7, key)
            for s in range(1, self.stages + 1)
        ]
        ring = CoordinatorSettings(
            self.stages,
            CONTEXT,
            self.draft,
            prefill_chunk=8,
            recovery=self._recovery,
            kept_rows=self._kept_rows,
            live=self._live,
        )
        self.machine = CoordinatorMachine(ring, self.codec)
        self.membership = MembershipMachine(
            places,
            Connect("", self.transport.data_port, OWN.public),
            self.timing,
            self.machine.load,
            live=self.machine.live,
            plain=self.machine.learnt.plain_speed,
            about=lambda status: structs.replace(
                status, names=("toy", "org/Toy-1B", "toys"), draft=self.draft, size=1234
            ),
        )
        node = CoordinatorNode(
            self.transport,
            CoordinatorCompute(FakeHead(VOCABULARY), draft),
            self.machine,
            self.membership,
            self.keys,
        )
        self.threads[0] = NodeThread(node)
        return self.threads[0]

    def start_stage(self, stage: int, wait: float = PATIENCE_S) -> NodeThread:
        """V1 … VN."""
        self.threads[stage] = NodeThread(self.stage_node(stage, wait))
        return self.threads[stage]

    def restart_coordinator(self) -> NodeThread:
        """Another one at the same address, which knows nothing of the one before."""
        self.transport = self.open(self.address.port)
        return self.start_coordinator()

    @property
    def members(self) -> dict[int, Member]:
        """The stages that are in the ring, as the coordinator knows them."""
        found = map(self.membership.stage_at, self.membership.stage_peers)
        return {member.stage: member for member in found if member is not None}

    def outwait(self, stage: int) -> None:
        """To the coordinator that stage, which says nothing more, has been silent for too long."""
        if (lost := self.members.get(stage)) is not None:
            with aging(lost):
                until(lambda: self.members.get(stage) is not lost)

    def start_spare(self) -> NodeThread:
        """A stage that wants no place of its own."""
        number = max(self.threads) + 1
        self.threads[number] = NodeThread(self.stage_node(0))
        return self.threads[number]

    def has_spare(self) -> bool:
        """Whether one stands by."""
        return any(line.startswith("spare: toybox") for line in self.membership.status().lines)

    def stage_node(
        self, stage: int, wait: float = PATIENCE_S, who: Identity | None = None
    ) -> StageNode:
        """A stage that is not running yet; with a key of its own unless it is `who`."""
        self._pid += 1
        who = who or self.keys.add(f"device {self._pid}")
        transport = ZmqTransport.stage(self.address, who, HOST)
        join = Join(stage, "toybox", self._pid, HOST, transport.data_port, who.own.public)

        def load(
            assign: Assign, progress: Callable[[str], None], stop: Callable[[], bool]
        ) -> StageCompute:
            self.loaded.append(assign.stage)
            self._loads.get(stage, lambda: None)()
            progress("loading 1 of 1 layers")
            return StageCompute(self._fresh_block(assign.stage))

        member = MemberMachine(join, str(self.address), wait, self.timing)
        return StageNode(transport, member, self.address, load)

    def _fresh_block(self, stage: int) -> SlowBlock:
        """An empty one, as slow as the one that another daemon had."""
        if self.loaded.count(stage) > 1:
            fresh = SlowBlock(stage - 1)
            fresh.delay = self.blocks[stage - 1].delay
            self.blocks[stage - 1] = fresh
        return self.blocks[stage - 1]

    @contextmanager
    def client(self, wait: float = PATIENCE_S) -> Iterator[Client]:
        """Somebody who asks."""
        with Client(self.address, self.keys.add("client", CLIENT), wait, self.timing) as client:
            yield client

    def ask(self, ask: Submit) -> Finished:
        """The answer to one request."""
        with self.client() as client:
            *_, end = client.ask(ask)
        assert isinstance(end, Finished)
        return end

    def await_up(self) -> None:
        """Until all stages are ready."""
        until(lambda: self.membership.status().ready)

    def expected(self, ask: Submit) -> Expected:
        """Token ids, text and finish reason of plain decoding."""
        return plain_answer(self.codec, ask, self.stages, CONTEXT)

    def assert_right(self, ask: Submit, answer: Finished) -> None:
        """The answer is that of plain decoding."""
        right = self.expected(ask)
        assert (answer.token_ids, answer.text) == (right.token_ids, right.text)
        assert answer.finish_reason == right.finish_reason

    def assert_free(self) -> None:
        """No stage holds anything of any request, before long."""
        until(lambda: not any(block.open_requests for block in self.blocks))
        until(lambda: self.machine.idle)


Hearer = Member | MemberMachine | Client | AsyncClient


def heard(hearer: Hearer) -> float:
    """When it heard something last; 0 if it never did."""
    return float(getattr(hearer, "heard" if isinstance(hearer, Member) else "_heard") or 0.0)


def age(hearer: Hearer) -> None:
    """What it heard last is as old as any silence may be. (If something comes after all, it has
    heard that, and the silence takes its own time.)"""
    for name in ("heard", "_heard", "_known"):
        if (at := getattr(hearer, name, None)) is not None:
            setattr(hearer, name, at - AGE_S)


@contextmanager
def aging(*hearers: Hearer) -> Iterator[None]:
    """Whatever they have heard, and hear meanwhile, is at once as old as any silence may be."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(0.01):
            for hearer in hearers:
                age(hearer)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def until(condition: Callable[[], object], patience: float = PATIENCE_S) -> None:
    """Wait for a condition that other threads or processes bring about."""
    limit = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < limit, "it did not come about in time"
        time.sleep(0.01)
