"""A LAN of one coordinator, three stages and a spare, on which things go wrong in mid-answer.

Every answer must have exactly the tokens of the undisturbed one, which transformers gives, too.
"""

from __future__ import annotations

import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from support.commands import Command
from support.namespaces import Host, lan
from support.torch_rings import generated, tokenizer

NEW_TOKENS = 400
STOPPED_S = 10.0
UNPLUGGED_S = 5.0
PATIENCE_S = 90.0
PROMPT = "Once upon a time"


class Cluster:
    """The processes by host, and what is done to them."""

    def __init__(self, stack: ExitStack, hosts: tuple[Host, ...]) -> None:
        self.stack = stack
        self.d0, *self.boards = hosts
        options = ["--stages", "3", "--dtype", "float64", "--host", "0.0.0.0"]
        self.coordinator = stack.enter_context(self.d0.command("serve", *options))
        self.daemons: dict[str, Command] = {}
        for number, host in enumerate(self.boards, start=1):
            self.start(host, *(["--stage", str(number)] if number <= 3 else []))
        self.coordinator.until_err("the ring is up")

    def start(self, host: Host, *options: str) -> None:
        """Start the board's daemon."""
        joining = host.command("join", "--coordinator", self.d0.address, *options)
        self.daemons[host.name] = self.stack.enter_context(joining)

    @contextmanager
    def asking(self, policy: str) -> Iterator[Command]:
        """A prompt on its way."""
        options = ["--policy", policy, "--max-new-tokens", str(NEW_TOKENS)]
        with self.d0.command("prompt", PROMPT, *options, "--wait", "60") as asking:
            yield asking

    def holder(self, stage: int) -> Host:
        """The board that holds a stage now, by what the coordinator said last."""
        said = re.findall(rf"stage {stage} \(\S+, process (\d+)\) loaded", self.coordinator.err)
        pid = int(said[-1])
        return next(h for h in self.boards if self.daemons[h.name].process.pid == pid)

    def ups(self) -> int:
        """How often the ring has come up."""
        return self.coordinator.err.count("the ring is up")

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait for it; when that was."""
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit, self.coordinator.err
            time.sleep(0.01)
        return time.monotonic()

    # --- what goes wrong ----------------------------------------------------------------------

    def kill(self, host: Host) -> None:
        """Power cut; somebody switches the board on again, and it is the spare."""
        self.daemons[host.name].signal(signal.SIGKILL)
        self.daemons[host.name].process.wait()
        self.start(host)

    def stop(self, host: Host) -> None:
        """It hangs for a while, and then goes on."""
        self.daemons[host.name].signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        self.daemons[host.name].signal(signal.SIGCONT)

    def unplug(self, host: Host) -> None:
        """The cable is out for a while."""
        host.link_down()
        time.sleep(UNPLUGGED_S)
        host.link_up()

    def restart(self, host: Host) -> None:
        """As `systemctl restart` does."""
        self.daemons[host.name].signal(signal.SIGTERM)
        self.daemons[host.name].process.wait()
        self.start(host)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with lan("d0", "v1", "v2", "v3", "spare") as hosts, ExitStack() as stack:
        yield Cluster(stack, hosts)


def disturbed(cluster: Cluster, what: str, policy: str, rng: random.Random) -> float:
    """One answer with one disturbance; seconds until the ring was up again (with the spare)."""
    stage, part = rng.randint(1, 3), rng.uniform(0.0, 0.8)
    host, before = cluster.holder(stage), cluster.ups()
    right = tokenizer().decode(generated(PROMPT, NEW_TOKENS)) + "\n"
    with cluster.asking(policy) as asking:
        cluster.until(lambda: len(asking.out) > part * len(right))
        assert asking.process.poll() is None, "it was over before anything happened"
        begun = time.monotonic()
        with ThreadPoolExecutor() as pool:
            recovered = pool.submit(cluster.until, lambda: cluster.ups() > before)
            getattr(cluster, what)(host)
            seconds = recovered.result() - begun
        done = asking.done()
    case = f"{what} of stage {stage} ({host.name}) behind {part:.0%} of a {policy} answer"
    assert done.code == 0, f"{case}: {done.err}"
    assert done.out == right, case
    print(f"{case}: up again {seconds:.2f} s after it began")
    return seconds


def play(cluster: Cluster, what: str, policy: str, times: int) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    took = [disturbed(cluster, what, policy, rng) for _ in range(times)]
    print(
        f"{what}, {policy}, {times} times: up again after {statistics.median(took):.2f} s in the "
        f"median, {max(took):.2f} s at most"
    )


WHAT = ["kill", "stop", "unplug", "restart"]


def test_a_killed_stage_is_replaced_in_mid_answer(cluster: Cluster) -> None:
    play(cluster, "kill", "adaptive", 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", ["flowspec", "adaptive"])
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("times", [4, 20])
def test_whatever_happens_the_answer_is_the_undisturbed_one(
    cluster: Cluster, what: str, policy: str, times: int
) -> None:
    play(cluster, what, policy, times)
