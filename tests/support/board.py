"""Board: jobs for the two processes of a device whose time they share, emulated and simulated.

As a program it is the stage: it is given the descriptor of their file, prints a line when it has
its place, and plays the jobs of every line that it reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
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


class EmulatedNode:
    """One of the two processes: its worker."""

    def __init__(self, device: SharedDevice, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self.worker = Worker(perform)
        emulated = Emulated(perform, Prices(jobs), self.worker, device=device)
        emulated._usual[1] = 0.0  # it knows how long a block really takes
        self.worker.perform = emulated.perform
        self.worker.await_turn = emulated.await_turn
        self.worker.ended_at = lambda: emulated.free_at
        self.worker.start()

    def play(self, zero: float, patience: float = 20.0) -> dict[int, float]:
        """When each job ended; all times count from `zero`, a time.monotonic."""
        asked = [(job.at, job) for job in self._jobs]
        aborted = [(job.stop_at, job) for job in self._jobs if job.stop_at is not None]
        for at, job in sorted(asked + aborted, key=lambda entry: entry[0]):
            time.sleep(max(zero + at - time.monotonic(), 0.0))
            if at == job.stop_at:
                self.worker.abort(job.number)
            else:
                self.worker.submit(job.effect, zero + at)
        ends: dict[int, float] = {}
        limit = time.monotonic() + patience
        while len(ends) < len(self._jobs) and time.monotonic() < limit:
            time.sleep(0.005)
            for at, event in self.worker.timed_events():
                ends[getattr(event, "job", -1)] = at - zero
        self.worker.stop()
        return ends


def simulated(own: Sequence[Job], stage: Sequence[Job]) -> dict[int, float]:
    """When each job ends in virtual time."""
    clock, turns, ends = Clock(), Turns(), dict[int, float]()

    def done(node: int, effect: Effect, event: Event | None) -> None:
        ends[getattr(effect, "job", -1)] = clock.now

    for node, jobs in enumerate((own, stage)):
        prices = Prices(jobs)
        worker = VirtualWorker(
            *(node, clock, perform, prices.seconds, prices.parts, done, None, turns),
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
    """The stage, as a process that ends with the block."""

    def __init__(self, descriptor: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(descriptor,),
            env={"PYTHONPATH": str(TESTS)},
            text=True,
        )
        assert self._line() == "here"

    def __enter__(self) -> StageProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def begin(self, zero: float, jobs: Sequence[Job]) -> None:
        """Have it play jobs."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([zero, [asdict(job) for job in jobs]]) + "\n")
        self.process.stdin.flush()

    def ends(self) -> dict[int, float]:
        """When each ended."""
        return {int(job): end for job, end in json.loads(self._line()).items()}

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")


def main() -> None:
    """Be the stage."""
    device = SharedDevice(int(sys.argv[1]), STAGE)
    print("here", flush=True)
    for line in sys.stdin:
        zero, told = json.loads(line)
        jobs = [Job(**one) for one in told]
        print(json.dumps(EmulatedNode(device, jobs).play(zero)), flush=True)


if __name__ == "__main__":
    main()
