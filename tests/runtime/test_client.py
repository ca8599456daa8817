"""The client: waits that end, cancelling, a coordinator that is not there or forgot it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from msgspec import structs
from support.keys import OWNER_IDENTITY, everybody
from support.rings import submit

from edgespec.config import Address, Timing
from edgespec.errors import ConfigError, PeerLost, RequestFailed
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.runtime import client as client_module
from edgespec.runtime.client import Client
from edgespec.wire.client_messages import (
    Cancel,
    Failed,
    Finished,
    Progress,
    Status,
    StatusRequest,
    Tokens,
)
from edgespec.wire.messages import Heartbeat, Message

HOST = "127.0.0.1"
TIMING = Timing(beat=0.05, answer_silence=60.0)
IMPATIENT = Timing(beat=0.05, answer_silence=0.5)
"""For those that are to give up a coordinator that says nothing more."""
WAIT_S = 60.0
END = Finished(1, "ab", (1, 2), "length", "p", "d", 1, 1, 2, 1.0, 0.5, 1.0, (1,), 2, 0, 0, 0.1)


class Scripted:
    """A coordinator that says what a test tells it to."""

    def __init__(self) -> None:
        self.transport = ZmqTransport.coordinator(Address(HOST, 0), OWNER_IDENTITY, everybody)
        self.address = Address(HOST, self.transport.control_port)
        self.peer = b""
        self.heard: list[Message] = []

    def listen(self, timeout: float = 0.0) -> None:
        """Take what came."""
        for incoming in self.transport.poll(timeout):
            self.peer = incoming.peer
            self.heard.append(incoming.message)

    def await_heard(self, last: Message) -> None:
        """Take what comes until that came; what the client said before it has come then, too."""
        limit = time.monotonic() + WAIT_S
        while last not in self.heard:
            assert time.monotonic() < limit, f"no {last}, but {self.heard}"
            self.listen(0.1)

    def say(self, *messages: Message) -> None:
        """Speak to the client."""
        while not self.peer:
            self.listen(0.1)
        for message in messages:
            self.transport.send_control(self.peer, message)


@pytest.fixture
def coordinator() -> Iterator[Scripted]:
    """A scripted coordinator."""
    scripted = Scripted()
    with closing(scripted.transport):
        yield scripted


def test_an_answer_is_what_came_for_this_request(coordinator: Scripted) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
        answer = client.ask(submit(tag=1))
        client.send(Heartbeat())
        coordinator.say(
            Progress(1, "waiting"),
            Tokens(2, (9,), "of another request"),
            Failed(2, "of another request"),
            Tokens(1, (1, 2), "ab"),
            Heartbeat(),
            END,
            Tokens(1, (3,), "behind the end"),
        )
        assert list(answer) == [Progress(1, "waiting"), Tokens(1, (1, 2), "ab"), END]


def test_several_are_asked_at_once_and_the_next_one_as_soon_as_one_ends(
    coordinator: Scripted,
) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
        answers = client.ask_at_once([submit(tag=tag) for tag in (1, 2, 3)], live=2)
        client.send(Heartbeat())
        coordinator.say(Tokens(2, (5,), "b"), Tokens(9, (5,), "of another"), Failed(2, "no"))
        assert [next(answers), next(answers)] == [Tokens(2, (5,), "b"), Failed(2, "no")]
        coordinator.await_heard(submit(tag=2))
        assert submit(tag=3) not in coordinator.heard
        coordinator.say(END)
        assert next(answers) == END
        coordinator.await_heard(submit(tag=3))
        coordinator.say(Tokens(1, (3,), "behind the end"), structs.replace(END, tag=3))
        assert list(answers) == [structs.replace(END, tag=3)]
    assert not any(isinstance(message, Cancel) for message in coordinator.heard)


def test_those_that_are_left_before_their_ends_are_cancelled(coordinator: Scripted) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
        answers = client.ask_at_once([submit(tag=tag) for tag in (1, 2, 3)], live=2)
        client.send(Heartbeat())
        coordinator.say(END)
        assert next(answers) == END
        answers.close()
        coordinator.await_heard(Cancel(2))
    assert Cancel(1) not in coordinator.heard
    assert submit(tag=3) not in coordinator.heard


def test_a_failure_is_raised_with_the_coordinators_words(coordinator: Scripted) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
        client.send(Heartbeat())
        coordinator.say(Failed(1, "stage 2 has been silent"))
        with pytest.raises(RequestFailed, match=r"^stage 2 has been silent$"):
            list(client.ask(submit(tag=1)))


def test_nobody_there_is_said_while_it_waits_and_then_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "NOTE_S", 0.05)
    with Client(Address(HOST, 9), OWNER_IDENTITY, 1.0, TIMING) as client:
        said: list[object] = []
        started = time.monotonic()
        answer = map(said.append, client.ask(submit()))
        with pytest.raises(PeerLost, match=r"no coordinator answered at 127.0.0.1:9 within 1 s"):
            list(answer)
        assert time.monotonic() - started >= 1.0
        assert len(said) >= 2
        assert all("waiting for the coordinator at 127.0.0.1:9" in m.text for m in said)  # type: ignore[attr-defined]


def test_a_coordinator_that_falls_silent_is_an_error(coordinator: Scripted) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, IMPATIENT) as client:
        client.send(Heartbeat())
        coordinator.say(Progress(1, "x"))
        with pytest.raises(PeerLost, match=r"has been silent for \d+\.\d s: it has ended"):
            list(client.ask(submit()))


def test_a_slow_coordinator_is_waited_for_as_long_as_it_says(coordinator: Scripted) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, IMPATIENT) as client:
        client.send(Heartbeat())
        told = 3 * IMPATIENT.answer_silence
        coordinator.say(Heartbeat(silence=told))
        with pytest.raises(PeerLost) as lost:
            list(client.ask(submit()))
        silent = re.search(r"has been silent for (\d+\.\d) s", str(lost.value))
        assert silent is not None
        assert float(silent[1]) >= told


def test_it_says_heartbeat_while_it_waits(coordinator: Scripted) -> None:
    often = replace(TIMING, beat=0.02)
    got: list[Message] = []
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, often) as client:
        waiting = threading.Thread(target=lambda: got.extend(client.ask(submit())))
        waiting.start()
        while coordinator.heard.count(Heartbeat()) < 5:  # or the test hangs
            coordinator.listen(0.1)
        coordinator.say(END)
        waiting.join(WAIT_S)
    assert coordinator.heard[0] == submit()
    assert got == [END]


def test_a_cancel_goes_out_once_and_its_end_is_the_coordinators(coordinator: Scripted) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
        client.send(Heartbeat())
        coordinator.say(Tokens(1, (1,), "a"))
        answer = client.ask(submit())
        assert next(answer) == Tokens(1, (1,), "a")
        client.cancel()
        coordinator.say(Tokens(1, (2,), "b"))
        assert next(answer) == Tokens(1, (2,), "b"), "what was on its way is not lost"
        coordinator.say(END)
        assert list(answer) == [END]
        client.send(StatusRequest())
        coordinator.await_heard(StatusRequest())
        assert coordinator.heard.count(Cancel(1)) == 1


def test_a_cancel_that_nobody_confirms_ends_too(
    coordinator: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "CANCEL_WAIT", 0.3 / TIMING.answer_silence)
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
        client.send(Heartbeat())
        coordinator.say(Progress(1, "waiting"))
        answer = client.ask(submit())
        assert next(answer) == Progress(1, "waiting")
        client.cancel()
        with pytest.raises(PeerLost, match="did not confirm the cancel"):
            next(answer)


def test_a_cancel_before_anybody_answered_ends_at_once() -> None:
    with Client(Address(HOST, 9), OWNER_IDENTITY, 60.0, TIMING) as client:
        client.cancel()
        with pytest.raises(KeyboardInterrupt):
            next(client.ask(submit()))


def test_status_waits_for_the_answer(coordinator: Scripted) -> None:
    with Client(coordinator.address, OWNER_IDENTITY, WAIT_S, TIMING) as client:
        client.send(StatusRequest())
        coordinator.say(Heartbeat(), Status(True, ("stage 1: ready",)))
        assert client.status() == Status(True, ("stage 1: ready",))


def test_who_started_the_ring_sees_its_end_first() -> None:
    def check() -> None:
        raise PeerLost("the stage 2 process was killed")

    with (
        Client(Address(HOST, 9), OWNER_IDENTITY, WAIT_S, TIMING, check) as client,
        pytest.raises(PeerLost, match="stage 2 process was killed"),
    ):
        list(client.ask(submit()))


@pytest.mark.parametrize("wait", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wait_that_is_none_is_refused(wait: float) -> None:
    with pytest.raises(ConfigError, match="wait is"):
        Client(Address(HOST, 9), OWNER_IDENTITY, wait)
