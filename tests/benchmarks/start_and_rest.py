"""What rings of this machine's processes take: to start, while nothing is asked, and for an answer.

    python tests/benchmarks/start_and_rest.py [--model NAME] [--stages 1 3] [--rest 20]
        [--users 1] [--answers 8] [--tokens 32] [--draft none] [--live 16] [--rounds 1] [--json]
        [--cache-dtype auto]

A ring is a coordinator with its API and so many stages, as people start them, each with one thread;
the block files of each are made before it counts. Of every ring, medians of the rounds:

ready         seconds from the first process to an API that answers, and CPU seconds by then
MiB           resident then, of all processes
wake-ups      a second, of all threads of all processes, 20 s after the last answer, when rings
              rest: context switches that threads chose (`voluntary_ctxt_switches`); and CPU
              milliseconds a second
CPU ms        a token of answers to so many users, of all processes, prompts included
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from api_users import Users, cpu_seconds
from support.served import Served

from edgespec.bench.workloads import Prompt

TO_REST_S = 20.0
TITLES = {
    "ready_s": ".1f",
    "ready_cpu_s": ".1f",
    "mib": ".0f",
    "wake_ups_a_second": ".1f",
    "resting_cpu_ms_a_second": ".1f",
    "cpu_ms_a_token": ".1f",
}


def started(stack: ExitStack, folder: Path, asked: argparse.Namespace, stages: int) -> Served:
    """A ring whose files are in that folder; it is up."""
    folder.mkdir(exist_ok=True)
    init = (*(("--model", asked.model) if asked.model else ()), "--draft", asked.draft)
    init += ("--cache-dtype", asked.cache_dtype)
    serve = ("--live", str(asked.live))
    return Served(stack, folder, stages, init, serve, lambda number: (), ())


def switches(processes: Iterable[psutil.Process]) -> int:
    """How often their threads have given up the processor by themselves so far."""
    total = 0
    for process in processes:
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            line = next(x for x in status.read_text().splitlines() if x.startswith("voluntary"))
            total += int(line.split()[1])
    return total


def figures(folder: Path, asked: argparse.Namespace, stages: int) -> dict[str, float]:
    """Of one ring, whose block files are in `folder`/cache."""
    with ExitStack() as stack:
        began = time.time()
        ring = started(stack, folder, asked, stages)
        processes = list(ring.processes().values())
        first = min(process.create_time() for process in processes)
        found = {
            "ready_s": time.time() - max(first, began),
            "ready_cpu_s": cpu_seconds(processes),
            "mib": sum(process.memory_info().rss for process in processes) / 2**20,
        }
        texts = [f"Write about the number {n}." for n in range(1 + asked.answers)]
        prompts = [Prompt(text, "", (text,)) for text in texts]
        Users(ring.url, 1, prompts[:1], {"max_tokens": 4}).play()  # before it counts
        before, users = (
            cpu_seconds(processes),
            Users(ring.url, asked.users, prompts[1:], {"max_tokens": asked.tokens}),
        )
        users.play()
        found["cpu_ms_a_token"] = 1e3 * (cpu_seconds(processes) - before) / users.tokens
        time.sleep(TO_REST_S)
        before, cpu = switches(processes), cpu_seconds(processes)
        time.sleep(asked.rest)
        found["wake_ups_a_second"] = (switches(processes) - before) / asked.rest
        found["resting_cpu_ms_a_second"] = 1e3 * (cpu_seconds(processes) - cpu) / asked.rest
        ring.end()
    return found


def measured(asked: argparse.Namespace) -> dict[str, dict[str, float]]:
    """The figures of each ring, by its number of stages."""
    every: dict[int, list[dict[str, float]]] = {stages: [] for stages in asked.stages}
    with tempfile.TemporaryDirectory() as root:
        for number in range(asked.rounds + 1):
            for stages in asked.stages:
                blocks = Path(root) / f"blocks-{stages}"
                folder = Path(root) / f"{stages}-{number}"
                blocks.mkdir(exist_ok=True)
                folder.mkdir()
                (folder / "cache").symlink_to(blocks)
                if number:
                    every[stages].append(figures(folder, asked, stages))
                else:
                    with ExitStack() as stack:
                        started(stack, folder, asked, stages).end()
    return {
        str(stages): {name: statistics.median(one[name] for one in found) for name in TITLES}
        for stages, found in every.items()
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the bundled toy model")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--rest", type=float, default=20.0)
    parser.add_argument("--users", type=int, default=1)
    parser.add_argument("--live", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--draft", default="none")
    parser.add_argument("--cache-dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = measured(asked)
    if asked.json:
        print(json.dumps(found))
        return
    print("| stages | " + " | ".join(name.replace("_", " ") for name in TITLES) + " |")
    print("| --- " * (1 + len(TITLES)) + "|")
    for stages, one in found.items():
        cells = [format(one[name], form) for name, form in TITLES.items()]
        print(f"| {stages} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    main()
