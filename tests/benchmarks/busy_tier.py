"""The quick tests on a machine that is busy, in a random order, under a clock that jumps; by hand.

    python tests/benchmarks/busy_tier.py [--loops 8] [--times 3] [--seed N] [PYTEST ARGUMENTS]

Beside so many endless loops the tests run with a time of day that jumps by hours in every process
(support/jumping_clock), each time in another order. Prints what failed, with the seed: `--seed N
--times 1` repeats that order. Ends with status 1 if anything failed. The loops end with it, however
it ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CLOCK = REPOSITORY / "tests" / "support" / "jumping_clock"
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
FAILED = ("FAILED ", "ERROR ")


def main() -> int:
    """Run the tests so many times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loops", type=int, default=8, help="endless loops beside the tests")
    parser.add_argument("--times", type=int, default=3, help="how often the tests run")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31), help="of the first")
    options, more = parser.parse_known_args()
    if importlib.util.find_spec("pytest_randomly") is None:
        parser.error("it takes pytest-randomly: pip install -c constraints.txt pytest-randomly")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seeds = range(options.seed, options.seed + options.times)
    with busy(options.loops):
        failed = [fails(seed, more) for seed in seeds]  # all of them, whatever fails
    return int(any(failed))


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Processes that compute, as long as this one lives."""
    started = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(loops)]
    try:
        yield
    finally:
        for loop in started:
            loop.kill()
            loop.wait()


def fails(seed: int, more: Sequence[str]) -> bool:
    """Whether a test fails; in the order of that seed."""
    path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH"))))
    command = [
        *(sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadfile", "-q"),
        *("-m", "not slow and not thorough", "-p", "randomly", f"--randomly-seed={seed}", *more),
    ]
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, "EDGESPEC_CLOCK_SEED": str(seed)},
        stdout=subprocess.PIPE,
        text=True,
    ) as tests:
        assert tests.stdout is not None
        failed = []
        try:
            for line in tests.stdout:
                print(line, end="", flush=True)
                failed += [line.rstrip()] if line.startswith(FAILED) else []
        except BaseException:
            tests.terminate()
            raise
    print(f"seed {seed}: {len(failed)} failed (status {tests.returncode})", *failed, sep="\n  ")
    return tests.returncode != 0


if __name__ == "__main__":
    sys.exit(main())
