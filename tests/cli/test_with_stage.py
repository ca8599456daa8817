"""A coordinator whose machine carries layers: real processes, and the loss of either of its two.

Every answer must have the very tokens of transformers, whom nobody disturbs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.boards import boards
from support.commands import Command, Done, run
from support.tiers import tiered
from support.torch_rings import BASE, DRAFT, generated, tokenizer

from edgespec.config import HEADS
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings

PROMPT, NEW_TOKENS = "Once upon a time", 120
PATIENCE_S = 120.0
PLACES = (pytest.mark.slow, pytest.mark.thorough, pytest.mark.slow)


def right(new_tokens: int = NEW_TOKENS) -> str:
    """What `edgespec prompt` shows."""
    return str(tokenizer().decode(list(generated(PROMPT, new_tokens)))) + "\n"


def until(condition: Callable[[], object], what: str) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit, f"never: {what}"
        time.sleep(0.01)


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Here:
    """A cluster on loopback, of which a stage runs on the coordinator's machine."""

    def __init__(
        self, stack: ExitStack, folder: Path, stages: int, with_stage: int, head: str = HEADS[0]
    ) -> None:
        self._stack, self._cache = stack, ("--cache", str(folder / "cache"))
        self.folder = folder / "cluster"
        settings = ClusterSettings(
            *(BASE, DRAFT, stages, "float64"),
            host="127.0.0.1",
            port=0,
            with_stage=with_stage,
            head=head,
        )
        self.cluster = ClusterFolder.create(self.folder, settings)
        self.own = with_stage
        self._port = ""
        self.coordinator: Command

    def serve(self, *options: str) -> None:
        """Start the coordinator, at the port that it had before."""
        port = ("--port", self._port) if self._port else ()
        self.coordinator = self._command("serve", *self._cache, *port, *options)
        self.coordinator.until_out("\n")
        self._port = self.coordinator.out.split()[-1].rpartition(":")[2]

    def join(self, stage: int, *options: str) -> Command:
        """Start another stage."""
        return self._command("join", *self._cache, "--stage", str(stage), *self.address, *options)

    def ask(self, *options: str, new_tokens: int = NEW_TOKENS) -> Command:
        """A prompt on its way."""
        words = ("--raw", "--max-new-tokens", str(new_tokens), "--wait", "60", *options)
        return self._command("prompt", PROMPT, *words, *self.address)

    def asked(self) -> Command:
        """An answer of which a part is there."""
        running = self.ask("--policy", "autoregressive")
        until(lambda: len(running.out) > 8, "the answer has begun")
        assert running.process.poll() is None, "it was over before anything happened"
        return running

    def run(self, *words: str) -> Done:
        return run(*words, "--cluster", str(self.folder))

    def _command(self, *words: str) -> Command:
        return self._stack.enter_context(Command(*words, "--cluster", str(self.folder)))

    @property
    def address(self) -> tuple[str, str]:
        return "--coordinator", f"127.0.0.1:{self._port}"

    @property
    def own_pids(self) -> list[int]:
        """The processes that have been the coordinator's own stage, since it was started."""
        joined = rf"stage {self.own} \(\S+, process (\d+)\) joined"
        return [int(pid) for pid in re.findall(joined, self.coordinator.err)]

    def until_up(self, times: int = 1) -> None:
        until(lambda: self.coordinator.err.count("the ring is up") >= times, "the ring is up")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def assert_right(running: Command, new_tokens: int = NEW_TOKENS) -> None:
    done = running.done()
    assert (done.code, done.out) == (0, right(new_tokens)), done


@pytest.mark.parametrize("head", tiered(HEADS, [HEADS[0]]))
def test_one_board_alone_answers_exactly_and_its_stage_ends_with_it(
    stack: ExitStack, tmp_path: Path, head: str
) -> None:
    here = Here(stack, tmp_path, 1, with_stage=1, head=head)
    here.serve()
    done = here.ask("--json", new_tokens=24).done()
    assert done.code == 0, done
    assert json.loads(done.out)["token_ids"] == list(generated(PROMPT, 24))
    (pid,) = here.own_pids
    (entry,) = AccessStore(here.cluster).devices()
    assert entry.role == "stage"
    assert "the ring is up" in (here.folder / "stage" / "stage.log").read_text()
    assert "layers loaded" not in here.coordinator.err, "its log is its own"
    here.coordinator.signal(signal.SIGKILL)
    here.coordinator.process.wait()
    until(lambda: not is_there(pid), "its stage has ended")


@pytest.mark.parametrize(
    "own", [pytest.param(stage, marks=mark) for stage, mark in zip((1, 2, 3), PLACES, strict=True)]
)
def test_an_answer_survives_the_loss_of_the_own_stage_and_of_another(
    stack: ExitStack, tmp_path: Path, own: int
) -> None:
    here = Here(stack, tmp_path, 3, with_stage=own)
    here.serve()
    others = {stage: here.join(stage) for stage in (1, 2, 3) if stage != own}
    here.until_up()
    status = json.loads(here.run("status", "--json", *here.address).out)
    marked = [node["stage"] for node in status["nodes"] if node["with_coordinator"]]
    assert own in marked

    running = here.asked()
    (pid,) = here.own_pids
    os.kill(pid, signal.SIGKILL)
    assert_right(running)
    assert here.own_pids[-1] != pid
    assert f"stage {own} beside the coordinator was killed by SIGKILL" in here.coordinator.err

    running = here.asked()
    stage, lost = next(iter(others.items()))
    lost.signal(signal.SIGKILL)
    lost.process.wait()
    here.join(stage)
    assert_right(running)

    running = here.asked()
    os.kill(here.own_pids[-1], signal.SIGTERM)  # it never ends by itself: it comes again
    assert_right(running)

    here.coordinator.signal(signal.SIGTERM)
    assert here.coordinator.done().code == 0
    assert not is_there(here.own_pids[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_coordinator_that_is_lost_with_its_stage_comes_back_with_it(
    stack: ExitStack, tmp_path: Path, number: signal.Signals
) -> None:
    here = Here(stack, tmp_path, 2, with_stage=2)
    here.serve()
    other = here.join(1)
    here.until_up()
    running = here.asked()
    pid = here.own_pids[-1]
    os.kill(pid, signal.SIGSTOP)  # not even a stage that hangs is left behind
    here.coordinator.signal(number)
    begun = time.monotonic()
    done = running.done()
    assert time.monotonic() - begun < 15.0
    assert done.code == 1, done
    assert right().startswith(done.out.rstrip("\n")), "what was there stays"
    (error,) = [line for line in done.err.splitlines() if "error" in line]
    assert "broke" in error or "the ring ended" in error
    here.coordinator.process.wait()
    until(lambda: not is_there(pid), "its stage has ended")

    here.serve()
    assert_right(here.ask())
    assert other.process.poll() is None
    assert len(AccessStore(here.cluster).devices()) == 1, "it has the key that it had"


@pytest.mark.thorough
def test_a_stage_that_was_removed_is_not_started_again(stack: ExitStack, tmp_path: Path) -> None:
    here = Here(stack, tmp_path, 1, with_stage=1)
    here.serve()
    here.until_up()
    (entry,) = AccessStore(here.cluster).devices()
    assert here.run("device", "remove", entry.name).code == 0
    here.coordinator.until_err("stage 1 beside the coordinator cannot run: ")
    assert "removed" in here.coordinator.err
    assert not is_there(here.own_pids[-1])
    here.coordinator.signal(signal.SIGTERM)
    here.coordinator.process.wait()
    here.serve()
    here.until_up()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_on_a_lan_the_boards_before_and_behind_reach_it(tmp_path: Path) -> None:
    with boards(tmp_path, "v1", "v3") as ring:
        ring.init("--stages", "3", "--with-stage", "2")
        ring.serve()
        for name in ("v1", "v3"):
            ring.join(name, ring.token, "--stage", name[1:])
        ring.until(lambda: ring.is_up, "the ring is up")
        with ring.asking("d0", PROMPT, NEW_TOKENS) as running:
            ring.until(lambda: len(running.out) > 8, "the answer has begun")
            joined = re.findall(r"stage 2 \(\S+, process (\d+)\) joined", ring.coordinator.err)
            os.kill(int(joined[-1]), signal.SIGKILL)
            assert_right(running)
        ring.cut_power("d0")
        ring.serve()
        with ring.asking("d0", PROMPT, NEW_TOKENS) as running:
            assert_right(running)
