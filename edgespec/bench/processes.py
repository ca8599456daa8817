"""Processes: work on several items at once, each in a process of its own; results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from edgespec.errors import ConfigError, EdgespecError

Item = TypeVar("Item")
Result = TypeVar("Result")
News = Callable[[int], None]
"""Says how many parts of an item are done."""


def process_count(jobs: int) -> int:
    """How many may work at once; 0: one a processor. Raises ConfigError for less."""
    if jobs < 0:
        raise ConfigError(f"jobs is {jobs}; it must be at least 1, or 0 for one a processor")
    return jobs or os.cpu_count() or 1


def map_in_processes(
    work: Callable[[Item, News], Result],
    items: Sequence[Item],
    jobs: int,
    news: Callable[[int, int], None] = lambda index, done: None,
) -> list[Result]:
    """`work(item, news)` of every item, up to `jobs` (0: one a processor) at a time.

    `news(index, done)`: how many parts of items[index] are done. With one job everything
    happens in this process. `work` must be a function of a module, as each process imports it
    anew. The first error ends all processes and is raised here.
    """
    count = min(process_count(jobs), len(items))
    if count <= 1:
        return [
            work(item, lambda done, index=index: news(index, done))  # type: ignore[misc]
            for index, item in enumerate(items)
        ]
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads half-way
    processes: list[Any] = []
    workers: list[Connection] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, work), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            workers.append(ours)
        return _deal_out(items, workers, news)
    finally:
        for worker in workers:
            worker.close()
        for process in processes:
            process.terminate()
            process.join()


def _deal_out(
    items: Sequence[Item], workers: Sequence[Connection], news: Callable[[int, int], None]
) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = list(enumerate(items))[::-1]
    doing: dict[Connection, int] = {}
    begun: set[Connection] = set()
    for worker in workers:
        index, item = waiting.pop()
        doing[worker] = index
        worker.send(item)
    while doing:
        ready = wait(list(doing))
        for worker in [worker for worker in doing if worker in ready]:
            index = doing[worker]
            try:
                kind, value = worker.recv()
            except (EOFError, OSError):
                raise EdgespecError(
                    "a worker process was ended from outside, perhaps for lack of memory; use "
                    "fewer jobs"
                    if worker in begun
                    else "a worker process ended before it began: a script that asks for jobs "
                    'must do so below `if __name__ == "__main__":`, as each worker imports it; or '
                    "use 1 job"
                ) from None
            begun.add(worker)
            if kind == "failed":
                raise value
            if kind == "began":
                continue
            if kind == "news":
                news(index, value)
                continue
            results[index] = value
            del doing[worker]
            if waiting:
                index, item = waiting.pop()
                doing[worker] = index
                worker.send(item)
    return [results[index] for index in range(len(items))]


def _serve(connection: Connection, work: Callable[[Any, News], Any]) -> None:
    """A worker process: items one after the other, until its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, which ends us
    with suppress(EOFError, OSError):
        connection.send(("began", None))
        while True:
            item = connection.recv()
            try:
                result = work(item, lambda done: connection.send(("news", done)))
            except EdgespecError as problem:
                connection.send(("failed", problem))
            else:
                connection.send(("done", result))
