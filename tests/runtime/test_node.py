"""Nodes over real sockets: answers, several at once, everybody's end, strangers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
from support import nodes
from support.nodes import HOST, PATIENCE_S, QUICK, NodeRing, NodeThread, aging, heard, until
from support.rings import assert_one_end, submit
from support.tiers import thorough

from edgespec.backends.compute import StageCompute
from edgespec.errors import CapacityError, EdgespecError, ModelError, PeerLost, RequestFailed
from edgespec.ring import assembly
from edgespec.ring.effects import Stop
from edgespec.runtime import coordinator_node
from edgespec.runtime import node as node_module
from edgespec.runtime.client import Client
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.runtime.stage_node import StageNode
from edgespec.sim.toy_model import FakeBlock
from edgespec.wire.client_messages import Finished, Progress, Submit, Tokens
from edgespec.wire.messages import Assign, Message


@pytest.mark.parametrize(
    ("stages", "policy"),
    [
        *((1, "autoregressive"), (3, "flowspec"), thorough(3, "autoregressive")),
        *(thorough(stages, "naive_tree") for stages in (1, 3)),
        thorough(1, "flowspec"),
    ],
)
def test_a_ring_answers_as_one_machine_would(stages: int, policy: str) -> None:
    with NodeRing(stages) as ring:
        for seed in range(3):
            ask = submit(prompt="what is " * 5, max_new_tokens=40, policy=policy, seed=seed)
            ring.assert_right(ask, ring.ask(ask))
        ring.assert_free()


def test_nodes_wait_for_what_happens_and_look_at_nothing_in_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With beats of a minute an idle ring sleeps; a request, and the end, wake it."""
    for module in (node_module, nodes):
        monkeypatch.setattr(module, "LOOK_S", 600.0)
    monkeypatch.setattr(node_module, "LONGEST_POLL", 600.0)
    with NodeRing(2, timing=replace(QUICK, beat=60.0, silence=400.0)) as ring:
        ring.await_up()
        for _ in range(2):
            ask = submit(max_new_tokens=10)
            ring.assert_right(ask, ring.ask(ask))
        ring.assert_free()
        polls: list[float] = []

        def counted(timeout: float, poll: Callable[[float], object]) -> object:
            polls.append(timeout)
            return poll(timeout)

        for thread in ring.threads.values():
            transport = thread.node.transport
            monkeypatch.setattr(transport, "poll", partial(counted, poll=transport.poll))
        time.sleep(0.5)
        assert len(polls) <= 2 * len(ring.threads)
    for thread in ring.threads.values():
        thread.ended()


@pytest.mark.parametrize("lost", [0, 2])
def test_a_connection_that_ends_wakes_a_ring_that_rests(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator when it is a stage's, and the stages when it is the coordinator's: silences
    are short again, so that who has died is noticed as ever."""
    monkeypatch.setattr(assembly, "CALM_S", 0.0)
    monkeypatch.setattr(node_module, "BROKEN_S", 600.0)  # the stage before says so later
    with NodeRing(2) as ring:
        ring.await_up()
        stage = ring.threads[1].node
        assert isinstance(stage, StageNode)
        until(lambda: stage.member.rests)
        monkeypatch.setattr(assembly, "CALM_S", 600.0)
        assert ring.membership.timing == QUICK.resting
        ring.threads[lost].vanish()
        until(lambda: ring.membership.timing == QUICK if lost else not stage.member.rests)


def test_an_answer_streams_and_its_pieces_are_the_whole() -> None:
    with NodeRing(2) as ring, ring.client() as client:
        ask = submit(max_new_tokens=60)
        replies: list[Message] = list(client.ask(ask))
        assert len([r for r in replies if isinstance(r, Tokens)]) > 5
        end = assert_one_end(replies, ask.tag)
        assert isinstance(end, Finished)
        ring.assert_right(ask, end)


def test_several_at_once_are_queued_and_each_is_answered() -> None:
    asks = [submit(prompt=f"prompt {n}", max_new_tokens=30, seed=n) for n in range(6)]
    with NodeRing(2) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.002
        answers: dict[int, list[Message]] = {}

        def one(number: int) -> None:
            with ring.client() as client:
                answers[number] = list(client.ask(asks[number]))

        threads = [threading.Thread(target=one, args=(n,)) for n in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, ask in enumerate(asks):
            end = assert_one_end(answers[number], ask.tag)
            assert isinstance(end, Finished)
            ring.assert_right(ask, end)
        told = [r.text for a in answers.values() for r in a if isinstance(r, Progress)]
        assert any("waiting behind" in text for text in told)


@pytest.mark.parametrize("ends_by", ["length 1", "stop string", "end token"])
def test_an_answer_ends_where_it_should(ends_by: str) -> None:
    plain = submit(max_new_tokens=30)
    with NodeRing(2) as ring:
        token = ring.expected(plain).token_ids[11]
        text = ring.expected(plain).text
    ask, eos = plain, set()
    if ends_by == "length 1":
        ask = submit(max_new_tokens=1)
    elif ends_by == "stop string":
        ask = submit(max_new_tokens=30, stop=(text[9:12], "never"))
    else:
        eos = {token}
    with NodeRing(2, eos_ids=eos) as ring:
        answer = ring.ask(ask)
        ring.assert_right(ask, answer)
        assert answer.finish_reason == ("length" if ends_by == "length 1" else "stop")
        ring.assert_free()


def test_stages_may_start_before_the_coordinator() -> None:
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
    ring = NodeRing(2, port=port)
    ring.transport.close()
    first, second = (ring.stage_node(stage) for stage in (1, 2))
    for number, stage in ((1, first), (2, second)):
        ring.threads[number] = NodeThread(stage)
    time.sleep(0.3)
    ring.transport = ring.open(port)
    ring.start_coordinator()
    try:
        ask = submit()
        ring.assert_right(ask, ring.ask(ask))
    finally:
        ring.__exit__()


# --- one of them is gone --------------------------------------------------------------------------


def ask_in_vain(ring: NodeRing, lose: Callable[[Client], object]) -> object:
    """A long request in a thread of its own, which what `lose` does ends; returns its error."""
    got: list[Message] = []
    clients: list[Client] = []
    problem: list[BaseException] = []

    def run() -> None:
        try:
            with ring.client() as client:
                clients.append(client)
                for message in client.ask(submit(max_new_tokens=300)):
                    got.append(message)
        except EdgespecError as error:
            problem.append(error)

    for block in ring.blocks:
        block.delay = 0.01
    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: any(isinstance(m, Tokens) for m in got))
    lose(clients[0])
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the client hangs"
    assert len(problem) == 1
    return problem[0]


@pytest.mark.parametrize("way", ["silent", "vanished", "left"])
def test_a_lost_coordinator_ends_its_clients_and_nobody_else(way: str) -> None:
    with NodeRing(2) as ring:
        ring.await_up()
        thread = ring.threads[0]
        members = [ring.threads[stage].node.member for stage in (1, 2)]  # type: ignore[attr-defined]

        def lose(client: Client) -> None:
            {"silent": thread.freeze, "vanished": thread.vanish, "left": thread.leave}[way]()
            if way != "left":
                stack.enter_context(aging(client, *members))

        with ExitStack() as stack:
            problem = ask_in_vain(ring, lose)
            until(lambda: all(member.asking_since is not None for member in members))
        if way == "left":
            assert isinstance(problem, RequestFailed)
            assert str(problem) == "the ring ended: stopped by SIGTERM"
        else:
            assert isinstance(problem, PeerLost)
            silent = f"the coordinator at {ring.address} has been silent"
            broke = f"the connection to the coordinator at {ring.address} broke"
            assert silent in str(problem) or (way == "vanished" and str(problem) == broke)
        assert all(ring.threads[stage].stop is None for stage in (1, 2))


def test_a_coordinator_that_drains_lets_requests_end_and_takes_no_more() -> None:
    with NodeRing(2) as ring, ExitStack() as stack:
        ring.await_up()
        node, gate = ring.threads[0].node, threading.Semaphore(4)
        assert isinstance(node, CoordinatorNode)
        node.drain, ring.blocks[0].passes = 600.0, gate
        ask = submit(max_new_tokens=20)
        running, late = (stack.enter_context(ring.client()) for _ in range(2))
        answer = running.ask(ask)
        until(lambda: isinstance(next(answer), Tokens))
        node.leave("stopped by SIGTERM")
        with pytest.raises(RequestFailed, match="takes no more requests") as refused:
            list(late.ask(ask))
        assert refused.value.kind == "lost"
        gate.release(1000)
        *_, end = answer
        assert isinstance(end, Finished)
        ring.assert_right(ask, end)
        assert ring.threads[0].ended() == Stop("stopped by SIGTERM", failed=False)


def test_a_coordinator_that_has_drained_stays_until_its_last_words_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coordinator_node, "LAST_S", 600.0)
    with NodeRing(2) as ring, ExitStack() as stack:
        ring.await_up()
        node, gate = ring.threads[0].node, threading.Semaphore(4)
        assert isinstance(node, CoordinatorNode)
        node.drain, ring.blocks[0].passes = 300.0, gate
        running, late = (stack.enter_context(ring.client()) for _ in range(2))
        answer = running.ask(submit(max_new_tokens=20))
        until(lambda: isinstance(next(answer), Tokens))
        node.leave("stopped by SIGTERM")
        gate.release(1000)
        assert isinstance([*answer][-1], Finished)
        with pytest.raises(RequestFailed, match="takes no more requests"):
            list(late.ask(submit()))
        node.leave("stopped by SIGINT")
        assert ring.threads[0].ended() == Stop("stopped by SIGINT", failed=False)


@pytest.mark.parametrize("way", ["in time", "told again"])
def test_what_does_not_end_while_it_drains_is_told_so(way: str) -> None:
    with NodeRing(2) as ring, ring.client() as client:
        ring.await_up()
        node, gate = ring.threads[0].node, threading.Semaphore(4)
        assert isinstance(node, CoordinatorNode)
        node.drain, ring.blocks[0].passes = 0.3 if way == "in time" else 600.0, gate
        answer = client.ask(submit(max_new_tokens=20))
        until(lambda: isinstance(next(answer), Tokens))
        node.leave("stopped by SIGTERM")
        if way == "told again":
            node.leave("stopped by SIGINT")
        why = "SIGTERM, and the 0.3 s of --drain are over" if way == "in time" else "SIGINT"
        with pytest.raises(RequestFailed, match=f"the ring ended: stopped by {why}"):
            list(answer)
        gate.release(1000)


def test_a_stage_that_cannot_load_ends_alone_with_its_reason() -> None:
    gate = threading.Event()

    def refuse() -> None:
        gate.wait(PATIENCE_S)
        raise ModelError("the model in /x is not the one that the coordinator runs")

    with NodeRing(2, loads={2: refuse}) as ring, ring.client() as client:
        until(lambda: len(ring.membership.stage_peers) == 2)
        answer = client.ask(submit())
        next(answer)
        gate.set()
        stop = ring.threads[2].ended()
        assert stop.failed
        assert stop.reason.startswith("the model in /x is not the one")
        until(lambda: ring.machine._state._lost)
        ring.machine._state._limit = 0.1
        with pytest.raises(RequestFailed) as failed:
            list(answer)
        assert "stage 2 (toybox, process 1002) cannot go on: the model in /x" in str(failed.value)
        assert all(ring.threads[number].stop is None for number in (0, 1))


def test_nobody_is_lost_while_a_worker_computes_or_loads_for_long() -> None:
    """All go on to hear of each other."""
    busy, free = threading.Event(), threading.Event()

    def work() -> None:
        busy.set()
        assert free.wait(PATIENCE_S)

    def assert_all_beat(*clients: Client) -> None:
        assert busy.wait(PATIENCE_S)
        stages = [ring.threads[place].node.member for place in (1, 2)]  # type: ignore[attr-defined]
        for hearer in (*ring.members.values(), *stages, *clients):
            for _ in range(3):
                last = heard(hearer)
                until(lambda hearer=hearer, last=last: heard(hearer) > last)
        busy.clear()
        free.set()

    with NodeRing(2, loads={1: work}) as ring:
        until(lambda: len(ring.membership.stage_peers) == 2)
        assert_all_beat()
        ring.await_up()
        free.clear()
        block, ask = ring.blocks[1], submit(max_new_tokens=1)
        run = block.run
        block.run = lambda job, stop: (work(), run(job, stop))[1]  # type: ignore[method-assign, func-returns-value]
        with ring.client() as client:
            watching = threading.Thread(target=assert_all_beat, args=[client])
            watching.start()
            *_, end = client.ask(ask)
            watching.join()
        assert isinstance(end, Finished)
        ring.assert_right(ask, end)


def test_without_a_coordinator_a_stage_gives_up() -> None:
    ring = NodeRing(1)
    ring.transport.close()
    stop = ring.start_stage(1, wait=0.5).ended()
    assert stop.failed
    assert f"no coordinator answered at {ring.address}" in stop.reason


def test_two_daemons_for_one_stage_and_the_first_goes_on() -> None:
    with NodeRing(1) as ring:
        ring.await_up()
        second = NodeThread(ring.stage_node(1))
        stop = second.ended()
        assert stop == Stop(
            "the coordinator refused: stage 1 is taken by process 1001 on toybox; stop that "
            "daemon, or choose another --stage",
            failed=True,
        )
        ask = submit()
        ring.assert_right(ask, ring.ask(ask))


# --- requests that do not end well ----------------------------------------------------------------


def test_a_cancelled_request_is_freed_everywhere_and_the_next_is_answered() -> None:
    with NodeRing(2) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.005
        with ring.client() as client:
            got: list[Message] = []
            for message in client.ask(submit(max_new_tokens=300)):
                got.append(message)
                if len(got) == 5:
                    client.cancel()
        end = assert_one_end(got, 1)
        assert isinstance(end, Finished)
        assert end.finish_reason == "cancelled"
        assert 0 < end.new_tokens < 300
        ring.assert_free()
        ask = submit()
        ring.assert_right(ask, ring.ask(ask))


@pytest.mark.parametrize("where", ["running", "waiting"])
def test_a_client_that_is_gone_is_freed(where: str) -> None:
    """Tokens that cannot be delivered show it at once; for one that waits, a closed connection."""
    with NodeRing(2) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = 0.1
        with ring.client() as first:
            running = first.ask(submit(max_new_tokens=300))
            next(m for m in running if isinstance(m, Tokens))
            if where == "waiting":
                with ring.client() as second:
                    waiting = second.ask(submit(max_new_tokens=300))
                    next(m for m in waiting if isinstance(m, Progress))
                # Its place in the queue is found to be nobody's while the first goes on.
                requests = ring.machine._requests
                for _ in running:
                    if len(requests) == 1:
                        break
                assert len(requests) == 1
        for block in ring.blocks:
            block.delay = 0.5  # the whole answer would take minutes: nobody computes it
        ring.assert_free()
        for block in ring.blocks:
            block.delay = 0.0
        ask = submit()
        ring.assert_right(ask, ring.ask(ask))


def test_a_failure_of_a_stage_ends_its_request_with_the_stages_name_and_nothing_else() -> None:
    with NodeRing(3) as ring:
        ring.blocks[1].failure = CapacityError("no memory for 9 rows")
        with pytest.raises(RequestFailed) as failed:
            ring.ask(submit())
        assert str(failed.value) == "stage 2 (toybox, process 1002): no memory for 9 rows"
        ask = submit()
        ring.assert_right(ask, ring.ask(ask))
        ring.assert_free()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (submit(policy="magic"), "unknown policy 'magic'"),
        (submit(prompt="x" * 400), "400 tokens and the model's context is 400"),
        (submit(prompt=""), "the prompt is empty"),
        (submit(max_new_tokens=-1), "must be at least 0"),
        (submit(stop=("",)), "stop"),
        (Submit(1, "x", 5, -1.0, 0, 1.0, 0.0, 0, (), ""), "temperature is -1.0"),
        (Submit(1, "x", 5, 0.0, 0, 2.0, 0.0, 0, (), ""), "top_p is 2.0"),
        (Submit(1, "x", 5, 0.0, 0, 1.0, 1e308, 0, (), ""), "min_p is 1e"),
        (Submit(1, "x", 5, 0.0, -1, 1.0, 0.0, 0, (), ""), "top_k is -1"),
        (Submit(1, "x", 5, 0.0, 0, 1.0, 0.0, -1, (), ""), "seed is -1"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_with_the_reason(
    bad_asks: NodeRing, ask: Submit, message: str
) -> None:
    """By the coordinator itself, whatever the client checked."""
    with pytest.raises(RequestFailed, match=message):
        bad_asks.ask(ask)
    good = submit()
    bad_asks.assert_right(good, bad_asks.ask(good))


@pytest.fixture(scope="module")
def bad_asks() -> object:
    """One ring for all requests that are refused."""
    with NodeRing(1) as ring:
        yield ring


def test_without_a_draft_a_policy_that_needs_one_is_refused() -> None:
    with NodeRing(1, draft=False) as ring:
        with pytest.raises(RequestFailed, match=r"flowspec needs a draft model .*autoregressive"):
            ring.ask(submit(policy="flowspec"))
        ask = submit(policy="")
        answer = ring.ask(ask)
        ring.assert_right(ask, answer)
        assert (answer.policy, answer.draft) == ("autoregressive", "none")


# --- ending ---------------------------------------------------------------------------------------


def test_a_stage_that_ends_while_loading_gives_up_loading() -> None:
    ring = NodeRing(1)
    ring.start_coordinator()
    loading = threading.Event()

    def load(
        assign: Assign, progress: Callable[[str], None], stop: Callable[[], bool]
    ) -> StageCompute:
        for done in range(100_000):
            progress(f"loading {done} of 100000 layers")
            loading.set()
            time.sleep(0.005)
        return StageCompute(FakeBlock(0))

    stage = ring.stage_node(1)
    stage._load = load
    ring.threads[1] = NodeThread(stage)
    assert loading.wait(PATIENCE_S)
    ring.threads[1].leave()
    assert ring.threads[1].ended().reason == "stopped by SIGTERM"
    assert not stage.worker.thread.is_alive()
    ring.__exit__()


def test_a_busy_node_ends_soon() -> None:
    with NodeRing(1) as ring:
        ring.await_up()
        ring.blocks[0].delay = 2 * PATIENCE_S
        with ring.client() as client:
            client.send(submit())
            until(lambda: ring.blocks[0].runs)
            ring.threads[1].leave()
            assert ring.threads[1].ended().reason == "stopped by SIGTERM"
