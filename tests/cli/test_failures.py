"""Boards of a LAN die, hang, lose their cable or restart in mid-answer, and the answer goes on.

Every answer must be, to the character, the one that transformers gives, whom nobody disturbs.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.boards import Boards, boards
from support.torch_rings import generated, prompts, tokenizer

BOARDS = ("v1", "v2", "v3", "spare")
POLICIES = ("flowspec", "adaptive")


@dataclass(frozen=True)
class Question:
    """A prompt, and how many tokens are wanted."""

    prompt: str
    new_tokens: int

    @property
    def right(self) -> str:
        """What transformers answers, as `edgespec prompt` shows it."""
        return str(tokenizer().decode(list(generated(self.prompt, self.new_tokens)))) + "\n"


LONG_ANSWER = Question("Once upon a time", 120)


def long_prompt(number: int) -> Question:
    """More than 400 tokens, which begin like no other: nothing of it is on the stages already."""
    return Question("\n".join([f"{number}.", *list(prompts().values())[:5]]), 24)


LENGTH = ("--max-new-tokens", str(LONG_ANSWER.new_tokens))


@dataclass(frozen=True)
class Recovery:
    """Seconds from a disturbance until it was noticed, and until the ring was up again."""

    noticed: float
    up: float


def start(ring: Boards) -> Boards:
    """Three stages and a spare that have joined by themselves, one after the other."""
    ring.init("--stages", "3")
    ring.start(*BOARDS)
    ring.until(lambda: ring.count("stands by") > 0, "a spare")
    return ring


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Boards]:
    with boards(tmp_path, *BOARDS) as ring:
        yield start(ring)


# --- one disturbance ----------------------------------------------------------------------------


Moment = Callable[[Boards], Callable[[str], bool]]
"""Looks at the ring before a question is asked; what it gives tells from the answer so far whether
it is time."""


def behind(part: float) -> Moment:
    """When that much of the long answer is there."""
    return lambda _: lambda out: len(out) > part * len(LONG_ANSWER.right)


def in_prefill(part: float, whole: int) -> Moment:
    """When stage 1 has sent that much of the long prompt on."""

    def moment(ring: Boards) -> Callable[[str], bool]:
        first = ring.holder(1)
        before = ring.bytes_sent(first)
        return lambda _: ring.bytes_sent(first) - before > part * whole

    return moment


def prefill_bytes(ring: Boards) -> int:
    """What stage 1 sends until a long prompt has its first token."""
    first, question = ring.holder(1), long_prompt(0)
    before = ring.bytes_sent(first)
    with ring.asking("d0", question.prompt, question.new_tokens) as asking:
        ring.until(lambda: asking.out != "", "a first token")
        whole = ring.bytes_sent(first) - before
        done = asking.done()
    assert (done.code, done.out) == (0, question.right), done
    return whole


def disturbed(
    ring: Boards, what: str, stage: int, policy: str, question: Question, moment: Moment
) -> Recovery:
    """One answer with one disturbance; then the spare is the stage, and the board the spare."""
    name, ups, standing = ring.holder(stage), ring.count("the ring is up"), ring.count("stands by")
    pid = ring.daemons[name].process.pid
    losses, is_time = ring.losses(pid), moment(ring)
    with ring.asking("d0", question.prompt, question.new_tokens, policy) as asking:
        begun = ring.until(lambda: is_time(asking.out), "the moment")
        assert asking.process.poll() is None, f"it was over before anything happened: {asking.err}"
        assert (asking.out == "") == (question != LONG_ANSWER), "it is not the moment any more"
        with ThreadPoolExecutor() as pool:
            noticed = pool.submit(ring.until, lambda: ring.losses(pid) > losses, f"{name} is lost")
            up = pool.submit(ring.until, lambda: ring.count("the ring is up") > ups, "it is up")
            getattr(ring, what)(name)
            times = Recovery(noticed.result() - begun, up.result() - begun)
        done = asking.done()
    assert done.code == 0, done.err
    assert done.out == question.right
    ring.until(lambda: ring.count("stands by") > standing, f"{name} stands by")
    return times


Case = tuple[str, str, str]
"""What, under which policy, in decoding or prefill."""


class Matrix:
    """Disturbances at moments that a seed chooses, and what they took."""

    def __init__(self, ring: Boards, seed: int) -> None:
        print(f"seed {seed}")
        self._ring = ring
        self._played = 0
        self._random = random.Random(seed)
        self._whole = prefill_bytes(ring)
        self.took: dict[Case, list[Recovery]] = defaultdict(list)

    def play(self, what: str, policy: str, phase: str) -> None:
        """One disturbance."""
        self._played += 1
        stage, part = self._random.randint(1, 3), self._random.uniform(0.01, 0.8)
        case = f"{what} of stage {stage} at {part:.0%} of {phase}, {policy}"
        print(f"{time.strftime('%H:%M:%S')} {case} ...", flush=True)
        if phase == "decoding":
            moment, question = behind(part), LONG_ANSWER
        else:
            moment, question = in_prefill(part, self._whole), long_prompt(self._played)
        times = disturbed(self._ring, what, stage, policy, question, moment)
        self.took[what, policy, phase].append(times)
        print(
            f"{case}: noticed after {times.noticed:.2f} s, up after {times.up:.2f} s (load "
            f"{os.getloadavg()[0]:.1f})",
            flush=True,
        )

    def summary(self) -> None:
        """Median and worst of each case."""
        for (what, policy, phase), took in self.took.items():
            noticed, up = [t.noticed for t in took], [t.up for t in took]
            print(
                f"{what}, {policy}, {phase}, {len(took)} times: noticed after "
                f"{statistics.median(noticed):.2f} s (worst {max(noticed):.2f}), up after "
                f"{statistics.median(up):.2f} s (worst {max(up):.2f})",
                flush=True,
            )


# --- the tests ----------------------------------------------------------------------------------


@pytest.mark.thorough
def test_boards_that_joined_by_themselves_give_plain_decodings_text(tmp_path: Path) -> None:
    with boards(tmp_path, *BOARDS) as ring:
        start(ring)
        token = ring.said("d0", "token new", "--client").strip()
        asked = ring.said("user", "prompt", LONG_ANSWER.prompt, "--raw", "--token", token, *LENGTH)
        assert asked == LONG_ANSWER.right
        with ring.asking("d0", LONG_ANSWER.prompt, LONG_ANSWER.new_tokens, "flowspec") as asking:
            done = asking.done()
        assert (done.code, done.out) == (0, LONG_ANSWER.right), done


@pytest.mark.slow
def test_an_answer_survives_a_dead_board_and_a_pulled_cable(ring: Boards) -> None:
    matrix = Matrix(ring, random.randrange(2**32))
    matrix.play("kill", "adaptive", "decoding")
    matrix.play("unplug", "flowspec", "prefill")
    matrix.summary()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("what", ["kill", "stop", "unplug", "restart"])
@pytest.mark.parametrize("times", [5, 20])
def test_whatever_happens_the_answer_is_the_undisturbed_one(
    ring: Boards, what: str, times: int
) -> None:
    matrix = Matrix(ring, random.randrange(2**32))
    try:
        for _ in range(times):
            for policy in POLICIES:
                for phase in ("decoding", "prefill"):
                    matrix.play(what, policy, phase)
    finally:
        matrix.summary()
