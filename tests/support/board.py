"""Board: jobs for the two processes of a device whose time they share, emulated and simulated.

As a program it is the stage: it is given the descriptor of their file and, on a line, its jobs. It
prints the time of every wait, and goes on after each with the next line; in the end it prints when
each job ended. So the order of what both do is that of their times, however late either really is.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from support.segments import run_block

from edgespec.backends.emulated import Emulated
from edgespec.decoding.effects import Draft, RunHead
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import BlockDone, Event
from edgespec.policy.base import Grow
from edgespec.runtime.shared_device import STAGE, SharedDevice
from edgespec.runtime.worker import Worker
from edgespec.sim.clock import Clock
from edgespec.sim.worker import Turns, VirtualWorker
from edgespec.tree.ledger import Rows
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

ONE = np.zeros(1, np.int64)
ROWS = Rows(ONE, ONE, ONE, ONE)
HIDDEN = Tensor("float32", (1, 1), bytes(4))
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Job:
    """Asked for at `at`, of so many parts and seconds; `stop_at`: a block is aborted then."""

    number: int
    kind: str  # head, block or draft
    at: float
    parts: int
    seconds: float
    stop_at: float | None = None

    @property
    def effect(self) -> Effect:
        """What a worker is asked for."""
        if self.kind == "block":
            return run_block(self.number, 1, ROWS, None, 0, np.ones((1, 1), np.bool_))
        if self.kind == "head":
            return RunHead(self.number, 1, HIDDEN, ROWS, Sampling())
        return Draft(self.number, 1, Grow(1, 1, 1), ())


class Prices:
    """Of jobs, by their numbers."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = {job.number: job for job in jobs}

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """Charged."""
        return self._jobs[getattr(effect, "job", -1)].seconds

    def parts(self, effect: Effect) -> Sequence[float]:
        """Alike."""
        return (1.0,) * self._jobs[getattr(effect, "job", -1)].parts


def perform(effect: Effect, stop: StopCheck) -> Event | None:
    """Takes no real time."""
    job = getattr(effect, "job", -1)
    return BlockDone(job, None if isinstance(effect, RunBlock) and stop() else HIDDEN)


class EmulatedNode(Worker):
    """One of the two processes: its worker, without a thread, on a clock that moves as it waits."""

    def __init__(
        self, device: SharedDevice, jobs: Sequence[Job], wait: Callable[[float], None]
    ) -> None:
        """`wait`: returns when the time has come that it is told; others may run until then."""
        self.now = 0.0
        self._emulated = Emulated(perform, Prices(jobs), self, self._clock, self._sleep, device)
        self._emulated._usual[1] = 0.0  # it knows how long a block really takes
        super().__init__(self._emulated.perform)
        self.await_turn = self._emulated.await_turn
        self.ended_at = lambda: self._emulated.free_at
        asked = [(job.at, job, False) for job in jobs]
        aborted = [(job.stop_at, job, True) for job in jobs if job.stop_at is not None]
        self._coming = deque(sorted(asked + aborted, key=lambda entry: entry[0]))
        self._wait = wait

    def play(self) -> dict[int, float]:
        """When each job ended."""
        self._sleep(0.0)
        self._run()
        self.waker.close()
        return {getattr(event, "job", -1): at for at, event in self.timed_events()}

    def head_asked(self, timeout: float) -> float | None:
        """See emulated.Asked."""
        until = self.now + max(timeout, 0.0)
        while not self._head_waits and self.now < until:
            self._sleep(min(until, self._coming[0][0] if self._coming else until) - self.now)
        return self._waiting.head_at

    def _clock(self) -> float:
        return self.now

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self._wait(self.now)
        while self._coming and self._coming[0][0] <= self.now:
            at, job, aborted = self._coming.popleft()
            if aborted:
                self.abort(job.number, at=at)
            else:
                self.submit(job.effect, at)

    def _await_work(self) -> bool:
        while not self._waiting and self._coming:
            self._sleep(self._coming[0][0] - self.now)
        return bool(self._waiting)


def simulated(own: Sequence[Job], stage: Sequence[Job]) -> dict[int, float]:
    """When each job ends in virtual time."""
    clock, turns, ends = Clock(), Turns(), dict[int, float]()

    def done(node: int, effect: Effect, event: Event | None) -> None:
        ends[getattr(effect, "job", -1)] = clock.now

    for node, jobs in enumerate((own, stage)):
        prices = Prices(jobs)
        worker = VirtualWorker(
            *(node, clock, perform, prices.seconds, prices.parts, done, turns),
            at_start=node == 0,
        )
        for job in jobs:
            clock.book(job.at, worker.add, job.effect)
            if job.stop_at is not None:
                clock.book(job.stop_at, worker.abort, job.number)
    while clock.step():
        pass
    return ends


class StageProcess:
    """The stage, as a process that ends with the block. It goes on, to its next wait, when it is
    told to; `wakes_at`: the time it waits for, infinite when all its jobs have ended."""

    def __init__(self, descriptor: int, jobs: Sequence[Job]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={"PYTHONPATH": str(TESTS)},
            text=True,
        )
        self.wakes_at, self.ends = 0.0, dict[int, float]()
        self._say(json.dumps([asdict(job) for job in jobs]))

    def __enter__(self) -> StageProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def go_on(self, until: float = math.inf) -> None:
        """Have it do what comes before a time."""
        while self.wakes_at < until:
            self._say("")

    def step(self) -> None:
        """Have it go on to its next wait."""
        self._say("")

    def _say(self, line: str) -> None:
        """A line, and hear what it waits for next."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        heard = json.loads(self.process.stdout.readline())
        if isinstance(heard, dict):
            self.wakes_at, self.ends = math.inf, {int(job): at for job, at in heard.items()}
        else:
            self.wakes_at = heard


def main() -> None:
    """Be the stage."""
    device = SharedDevice(int(sys.argv[1]), STAGE)
    jobs = [Job(**one) for one in json.loads(sys.stdin.readline())]

    def wait(until: float) -> None:
        print(until, flush=True)
        sys.stdin.readline()

    print(json.dumps(EmulatedNode(device, jobs, wait).play()), flush=True)


if __name__ == "__main__":
    main()
