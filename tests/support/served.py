"""A ring of real processes that serves its HTTP API on this machine, as people start it.

with served(stages=3) as ring: httpx.post(f"{ring.url}/v1/completions", ...)
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from support.commands import Command, run

# Several processes with a pool of threads each would wait for one another on the few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

PATIENCE_S = 300.0
END_S = 30.0
Body = dict[str, Any]


class Served:
    """A coordinator with its API, and its stages, each a command as a person types it."""

    def __init__(
        self,
        stack: ExitStack,
        folder: Path,
        stages: int,
        init: Sequence[str],
        options: Sequence[str],
        join: Callable[[int], Sequence[str]],
        users: Sequence[str],
        added: Mapping[str, Sequence[str]],
    ) -> None:
        self._stack = stack
        self._join = join
        self.cluster = str(folder / "cluster")
        self._folders = ("--cluster", self.cluster, "--cache", str(folder / "cache"))
        made = run(
            *("init", "--stages", str(stages), "--host", "127.0.0.1", "--port", "0"),
            *(*init, *self._folders[:2]),
        )
        assert made.code == 0, made
        for name, form in added.items():
            more = ("--stages", str(stages), *form, *self._folders[:2])
            made = run("init", "--add", name, *more)
            assert made.code == 0, made
        with_stage = "--with-stage" in init
        self.own = int(init[init.index("--with-stage") + 1]) if with_stage else 0
        self.keys: dict[str, str] = {}
        for user in users:
            made = run("key", "new", user, *self._folders[:2])
            assert made.code == 0, made
            self.keys[user] = made.out.strip()
        self.stages: dict[int, Command] = {}
        # Another loopback address is one that needs keys.
        http = "127.0.0.2:0" if users else "127.0.0.1:0"
        self.coordinator = self._start("serve", "--http", http, *options)
        self.coordinator.until_err(" at http://")
        self.coordinator.until_out("\n")
        self.address = self.coordinator.out.split()[-1]
        self.url = "http://" + _word_behind(" at http://", self.coordinator.err)
        for number in range(1, stages + 1):
            if number != self.own:
                self.join(number)
        self.until_up()

    def until_up(self) -> None:
        """Wait until the API says that requests are answered."""
        limit = time.monotonic() + PATIENCE_S
        while not self.is_up():
            assert time.monotonic() < limit, self.coordinator.err
            for command in (self.coordinator, *self.stages.values()):
                assert command.process.poll() is None, command.err
            time.sleep(0.1)

    def _start(self, *arguments: str) -> Command:
        return self._stack.enter_context(Command(*arguments, *self._folders))

    def join(self, number: int) -> Command:
        """Start the daemon of a stage."""
        known = ("--coordinator", self.address, "--metrics", f"127.0.0.1:{free_port()}")
        joining = self._start("join", "--stage", str(number), *known, *self._join(number))
        self.stages[number] = joining
        return joining

    # --- what is to be seen -------------------------------------------------------------------

    def is_up(self) -> bool:
        """Whether the API says that requests are answered."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False

    def figure(self, name: str) -> float:
        """One of the coordinator's metrics."""
        return _figure(self.url, name, next(iter(self.keys.values()), ""))

    def stage_figure(self, number: int, name: str) -> float:
        """One of the metrics of a stage that was joined."""
        return _figure(
            "http://" + _word_behind("metrics at http://", self.stages[number].err), name
        )

    def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        names = ("edgespec_requests_running", "edgespec_requests_waiting")
        running, waiting = (int(self.figure(name)) for name in names)
        return running, waiting

    def is_quiet(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.load() == (0, 0) and not self.figure("edgespec_http_answers")

    @property
    def own_pid(self) -> int:
        """The process that is the coordinator's own stage now."""
        joined = rf"stage {self.own} \(\S+, process (\d+)\) joined"
        return int(re.findall(joined, self.coordinator.err)[-1])

    def processes(self) -> dict[str, psutil.Process]:
        """All that runs, by name."""
        found = {"coordinator": psutil.Process(self.coordinator.process.pid)}
        found |= {f"stage {n}": psutil.Process(c.process.pid) for n, c in self.stages.items()}
        for child in found["coordinator"].children(recursive=True):
            found[f"child {' '.join(child.cmdline()[1:4])}"] = child
        return found

    def end(self) -> list[str]:
        """End the ring in good order; returns the names of processes that are left after that, or
        had to be killed."""
        there = self.processes()
        commands = {"coordinator": self.coordinator}
        commands |= {f"stage {number}": command for number, command in self.stages.items()}
        for command in commands.values():
            command.signal(signal.SIGCONT)
            command.signal(signal.SIGTERM)
        for command in commands.values():
            command.process.wait(END_S)
        gone, _ = psutil.wait_procs(there.values(), END_S)
        return [name for name, process in there.items() if process not in gone]


def _figure(url: str, name: str, key: str = "") -> float:
    told = httpx.get(f"{url.removesuffix('/metrics')}/metrics", headers=bearer(key), timeout=60.0)
    lines = told.text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"{name} ")))


def _word_behind(mark: str, text: str) -> str:
    return text.split(mark, 1)[1].split()[0].rstrip(",;")


@contextmanager
def served(
    stages: int = 3,
    *,
    init: Sequence[str] = ("--dtype", "float64"),
    serve: Sequence[str] = (),
    join: Callable[[int], Sequence[str]] = lambda number: (),
    users: Sequence[str] = (),
    added: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Served]:
    """All processes, which end with this. `init`, `serve`, `join`: further options of these, of
    `join` for each stage. `users`: those that get an API key each; () if none is needed. `added`:
    further models by name, with what `init` is told of each."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Served(stack, Path(folder), stages, init, serve, join, users, added or {})


def free_port() -> int:
    """One of this machine's at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def bearer(key: str) -> dict[str, str]:
    """The header of a request with that API key."""
    return {"authorization": f"Bearer {key}"} if key else {}


# --- what users do ------------------------------------------------------------------------------


def path_of(body: Body) -> str:
    """Where such a request is sent."""
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def choices(answer: Body) -> Iterator[tuple[int, str]]:
    """The texts of an answer, or of an event of it, by the indexes of its choices; of a call of a
    tool its name and its arguments."""
    for choice in answer.get("choices") or ():
        said = choice.get("message") or choice.get("delta") or choice
        calls = [call["function"] for call in said.get("tool_calls") or ()]
        called = "".join(call.get("name", "") + call.get("arguments", "") for call in calls)
        yield choice["index"], (said.get("text") or said.get("content") or "") + called


def events(answered: httpx.Response) -> Iterator[Body]:
    """The events of a stream, without the last one."""
    for line in answered.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])
