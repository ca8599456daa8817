"""Several users of one ring of real processes, through its HTTP API: losses, turns and readers.

Every text must be the one that transformers gives, whom nobody disturbs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support.nodes import until
from support.served import Served, bearer, choices, events, path_of, served
from support.torch_rings import generated, tokenizer

SOAK = Path(__file__).parent.parent / "benchmarks" / "soak.py"
NEW_TOKENS = 100
PROMPTS = ("Once upon a time", "def mean(values):\n", "What is 17 + 26?", "tar\n\n> Archiving")
PATIENCE_S = 120.0
"""Within which all answers must have ended, whatever was lost meanwhile."""

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]


def right(prompt: str, new_tokens: int = NEW_TOKENS) -> str:
    """What plain decoding answers."""
    return str(tokenizer().decode(list(generated(prompt, new_tokens))))


class Reader:
    """A user that streams one answer in a thread of its own. Use as a context manager."""

    def __init__(
        self, ring: Served, prompt: str, new_tokens: int = NEW_TOKENS, user: str = ""
    ) -> None:
        self._prompt, self._new_tokens = prompt, new_tokens
        self._client = httpx.Client(
            base_url=ring.url, headers=bearer(ring.keys.get(user, "")), timeout=PATIENCE_S
        )
        self.text = self.problem = ""
        self.ended: float | None = None
        self._leaves = False
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE_S)
        self._client.close()
        assert not self._thread.is_alive()

    def _read(self) -> None:
        body = {"prompt": self._prompt, "max_tokens": self._new_tokens, "temperature": 0}
        try:
            with self._client.stream("POST", path_of(body), json={**body, "stream": True}) as said:
                for event in events(said):
                    self.problem = str(event.get("error") or self.problem)
                    self.text += "".join(text for _, text in choices(event))
                    if self._leaves:
                        break
        except httpx.HTTPError as problem:
            self.problem = repr(problem)
        self.ended = time.monotonic()

    def leave(self) -> None:
        """With the next piece."""
        self._leaves = True

    def assert_right(self) -> None:
        """Wait for its end: the whole text, and no error."""
        self._thread.join(PATIENCE_S)
        assert (self.problem, self.text) == ("", right(self._prompt, self._new_tokens))


@contextmanager
def reading(ring: Served) -> Iterator[list[Reader]]:
    """Four live answers of which a part is there, and much is not."""
    with ExitStack() as stack:
        readers = [stack.enter_context(Reader(ring, prompt)) for prompt in PROMPTS]
        until(lambda: all(len(one.text) > 8 for one in readers), PATIENCE_S)
        assert ring.figure("edgespec_requests_running") == len(PROMPTS)
        yield readers
        for one in readers:
            one.assert_right()


def test_four_live_answers_survive_every_stage() -> None:
    """One is killed, one hangs, and the coordinator's own is killed."""
    init = ("--dtype", "float64", "--with-stage", "2")
    with served(3, init=init) as ring:
        ups = ring.coordinator.err.count("the ring is up")
        with reading(ring):
            ring.stages[3].signal(signal.SIGKILL)
            ring.stages[3].process.wait()
            ring.join(3)
        with reading(ring):
            ring.stages[1].signal(signal.SIGSTOP)
            until(lambda: not ring.is_up(), PATIENCE_S)
            ring.stages[1].signal(signal.SIGCONT)
        with reading(ring):
            own = ring.own_pid
            os.kill(own, signal.SIGKILL)
        assert ring.own_pid != own
        assert ring.coordinator.err.count("the ring is up") >= ups + 3
        until(ring.is_quiet)
        assert ring.figure("edgespec_cache_rows_live") == 0
        assert ring.end() == []


def test_a_short_soak_leaves_nothing_behind() -> None:
    """See the benchmark, which takes longer and has more kinds of requests."""
    command = [sys.executable, str(SOAK), "--minutes", "0.4", "--users", "6", "--kinds", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads(done.stdout)["seen"]
    assert sum(seen.values()) >= 6, seen


# --- turns and readers ----------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_many_requests_of_one_user_keep_no_other_waiting(stack: ExitStack) -> None:
    """A user is an API key. One is answered at a time: they end in the order of their starts."""
    ring = stack.enter_context(served(1, serve=("--live", "1"), users=("anna", "bert")))

    def ask(user: str) -> Reader:
        return stack.enter_context(Reader(ring, PROMPTS[0], 24, user))

    annas = [ask("anna") for _ in range(10)]
    until(lambda: sum(ring.load()) + ended(annas) == 10, PATIENCE_S)
    bert = ask("bert")
    until(lambda: sum(ring.load()) + ended(annas) == 11, PATIENCE_S)
    before = ended(annas)
    for one in (*annas, bert):
        one.assert_right()
    assert before <= 6, "Anna's requests were through before the test had begun"
    first = sum(one.ended < bert.ended for one in annas)
    assert first <= before + 2, "the one that ran, and one that had its turn before Bert came"


def ended(readers: Sequence[Reader]) -> int:
    return sum(one.ended is not None for one in readers)


def test_the_place_and_the_rows_of_an_answer_that_is_left_are_free_at_once(
    stack: ExitStack,
) -> None:
    ring = stack.enter_context(served(1, serve=("--live", "2")))
    first, second = (stack.enter_context(Reader(ring, prompt, 400)) for prompt in PROMPTS[:2])
    until(lambda: first.text and second.text, PATIENCE_S)
    third = stack.enter_context(Reader(ring, PROMPTS[2]))
    until(lambda: ring.load() == (2, 1), PATIENCE_S)
    first.leave()
    until(lambda: third.text, PATIENCE_S)
    assert second.ended is None, "the third began before any answer had ended"
    until(lambda: ring.load() == (2, 0), PATIENCE_S)  # the figures are told a little later
    third.assert_right()
    second.assert_right()
    until(ring.is_quiet)
    assert ring.figure("edgespec_cache_rows_live") == 0
    assert ring.stage_figure(1, "edgespec_kv_rows") == ring.figure("edgespec_cache_rows_kept") > 0


def test_a_reader_that_reads_nothing_costs_the_others_nothing(stack: ExitStack) -> None:
    """Its answer is made and waits for it, or is given up; no other waits."""
    ring = stack.enter_context(served(1))
    body = {"prompt": PROMPTS[0], "max_tokens": 400, "stream": True, "seed": 1, "logprobs": 20}
    said = json.dumps(body)
    host, _, port = ring.url.removeprefix("http://").partition(":")
    lazy = stack.enter_context(socket.socket())
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lazy.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(said)}\r\n"
    lazy.sendall((head + "content-type: application/json\r\n\r\n" + said).encode())
    until(lambda: ring.load() == (1, 0), PATIENCE_S)
    for one in [stack.enter_context(Reader(ring, prompt)) for prompt in PROMPTS]:
        one.assert_right()
    until(lambda: ring.load() == (0, 0), PATIENCE_S)  # nothing on the ring waits for it, either
