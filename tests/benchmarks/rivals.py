"""The same work over a network: edgespec beside llama-server and rpc-servers, by one command.

    python tests/benchmarks/rivals.py --model FILE.gguf [--peer PATH/llama-server]
        [--rpc PATH/rpc-server] [--second MODEL] [--stages 3] [--users 1 4 16]
        [--prompts 512 2048] [--tokens 32] [--rounds 3] [--links 1000:0.5 100:2] [--page FILE]

Root, and `ip` of iproute2. The peer's programs are here already; nothing is built or fetched, and
without them its cells stay empty. A coordinator and its stages, and a llama-server and as many
rpc-servers (`-c`, so that they keep what they were sent), each on a host of its own with a home and
a cache of its own, one thread each; between them cables of so many Mbit/s and milliseconds each
way (`support/switch.py`). Both sides are up at once and asked by turns, by a client on the first
host, at temperature 0, an end before `--tokens` ignored:

start         seconds and bytes until it answers; again with what a first start left behind
users         tokens a second of so many at once, prompts of 128 tokens included, and milliseconds
              from one token of an answer to its next
first token   of prompts of so many tokens
bytes         that all hosts sent for a token of one user, be it of the prompt or the answer
memory        of each host's processes (RSS), after that
kill -9       of the last node, in mid-answer: does the answer go on, with the same text, after how
              long a pause
node back     from its start again until a new answer's first token; of the peer its server too, if
              that has ended
two models    from the end of one model until another (`--second`) answers, on the same hosts

Writes docs/results/side-by-side.md, between its marks, after each link: medians of the rounds, and
ours over theirs. The code must not change meanwhile, as daemons start anew all the time.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shlex
import shutil
import signal
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from peer_llamacpp import PATIENCE_S, Side, play, prompts_of
from recordings import block_of
from support.board_hosts import board_hosts
from support.commands import Command
from support.namespaces import Cable, Host
from support.served import choices, events

from edgespec.daemon.bundled_models import bundled

PAGE = Path(__file__).parents[2] / "docs" / "results" / "side-by-side.md"
PORT, RPC_PORT = 8000, 50052
STORY = "Once upon a time there was"
LOST_AT = 12
"""Tokens of an answer after which a node is killed."""
CLONE_NEWNET = 0x40000000


@contextmanager
def within(host: Host) -> Iterator[None]:
    """Let this thread, and those that it starts, use that host's network."""
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(name: str) -> None:
        place = os.open(name, os.O_RDONLY)
        try:
            if libc.setns(place, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {name}")
        finally:
            os.close(place)

    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    enter(f"/run/netns/{host.namespace}")
    try:
        yield
    finally:
        enter(f"/proc/self/fd/{own}")
        os.close(own)


# --- the two sides ------------------------------------------------------------------------------


@dataclass
class Rival(ABC):
    """One side, on hosts of its own; the first has the model and answers at PORT."""

    asked: argparse.Namespace
    hosts: Sequence[Host]
    stack: ExitStack
    daemons: dict[int, Command] = field(default_factory=dict)
    """By host; 0 is what answers."""
    name = ""
    ready = "/health"

    @abstractmethod
    def begin(self, model: str, known: bool) -> None:
        """Start all daemons. `known`: not for the first time."""

    @abstractmethod
    def bring_back(self) -> None:
        """Start the last node again, and what ended with it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{PORT}"

    def start(self, number: int, *words: str) -> None:
        """A daemon on a host."""
        command = Command(command=self.hosts[number].inside(*words))
        self.daemons[number] = self.stack.enter_context(command)

    def is_ready(self) -> bool:
        """Whether it answers. Raises AssertionError if what should answer has ended."""
        first = self.daemons[0]
        assert first.process.poll() is None, f"{self.name} ended:\n{first.err}"
        try:
            with within(self.hosts[0]):
                return httpx.get(f"{self.url}{self.ready}", timeout=10.0).status_code == 200
        except httpx.HTTPError:
            return False

    def until_ready(self) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not self.is_ready():
            assert time.monotonic() < limit, f"{self.name} did not get ready"
            time.sleep(0.05)

    def end(self) -> None:
        """End all daemons."""
        for daemon in self.daemons.values():
            daemon.signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            daemon.done()
        self.daemons.clear()

    def sent(self) -> int:
        """Bytes that all hosts have sent so far."""
        return sum(host.sent_bytes() for host in self.hosts)

    def megabytes(self) -> list[float]:
        """Of each host's processes, resident."""
        found = []
        for _, daemon in sorted(self.daemons.items()):
            one = psutil.Process(daemon.process.pid)
            every = [one, *one.children(recursive=True)]
            found.append(sum(process.memory_info().rss for process in every) / 1e6)
        return found


class Ours(Rival):
    """A coordinator with its API, and stages that find it."""

    name, ready = "edgespec", "/readyz"
    token = ""

    def begin(self, model: str, known: bool) -> None:
        if not known:
            words = ("init", "--model", model, "--stages", str(self.asked.stages))
            with self.hosts[0].command(*words) as making:
                made = making.done()
            assert made.code == 0, made.err
            self.token = re.findall(r"edge-[\w-]{20,}", made.out + made.err)[-1]
        api = ("--http", f"127.0.0.1:{PORT}", "--live", str(max(self.asked.users)))
        self.start(0, *ours("serve", *api))
        for number in range(1, len(self.hosts)):
            self.start(number, *ours("join", *([] if known else [self.token])))

    def bring_back(self) -> None:
        self.start(len(self.hosts) - 1, *ours("join"))
        self.daemons[len(self.hosts) - 1].until_err("the ring is up")


class Theirs(Rival):
    """A llama-server, with all layers on rpc-servers."""

    name = "llama.cpp + RPC"

    def begin(self, model: str, known: bool) -> None:
        for number in range(1, len(self.hosts)):
            self.serve_rpc(number)
        self.serve(model)

    def serve_rpc(self, number: int) -> None:
        at = ("-H", self.hosts[number].address, "-p", str(RPC_PORT), "-t", "1", "-c")
        self.start(number, *self.asked.rpc, *at)

    def serve(self, model: str) -> None:
        users = max(self.asked.users)
        room = users * (max(self.asked.prompts) + self.asked.tokens + 64)
        workers = ",".join(f"{host.address}:{RPC_PORT}" for host in self.hosts[1:])
        options = ["-m", model, "--host", "127.0.0.1", "--port", str(PORT), "-t", "1"]
        options += ["-np", str(users), "-c", str(room), "-ngl", "99", "--rpc", workers]
        self.start(0, *self.asked.peer, *options)

    def bring_back(self) -> None:
        self.serve_rpc(len(self.hosts) - 1)
        if self.daemons[0].process.poll() is not None:
            self.serve(self.asked.model)


def ours(*words: str) -> tuple[str, ...]:
    """An edgespec command."""
    return (sys.executable, "-m", "edgespec.cli.main", *words)


# --- the work -----------------------------------------------------------------------------------


@dataclass
class Answer:
    """One that is streamed: its text, when its pieces came, and why it ended early."""

    text: str = ""
    came: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def pause(self) -> float:
        """The longest time between two pieces."""
        return max((b - a for a, b in zip(self.came, self.came[1:], strict=False)), default=0.0)


def stream(url: str, tokens: int, into: Answer) -> None:
    """Ask for so many tokens of the story."""
    body = {"prompt": STORY, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600.0) as answered:
            assert answered.status_code == 200, answered.read()
            for event in events(answered):
                if "error" in event:
                    into.error = str(event["error"])
                for _, piece in choices(event):
                    into.text += piece
                    into.came += [time.monotonic()] * bool(piece)
    except (httpx.HTTPError, AssertionError) as error:
        into.error = f"{type(error).__name__}: {error}"


Taken = dict[str, list[float | str]]
"""By figure, what each round gave."""


def take(taken: Taken, name: str, value: float | str) -> None:
    taken.setdefault(name, []).append(value)


def starts(rival: Rival, taken: Taken) -> None:
    """A first one, and one that finds what that left."""
    for known, name in ((False, "first start"), (True, "second start")):
        before, began = rival.sent(), time.monotonic()
        rival.begin(rival.asked.model, known)
        rival.until_ready()
        take(taken, f"{name}, s", time.monotonic() - began)
        take(taken, f"{name}, MB sent", (rival.sent() - before) / 1e6)
        if not known:
            rival.end()


def speeds(rivals: dict[str, Rival], taken: dict[str, Taken], asked: argparse.Namespace) -> None:
    """Rounds of users and of long prompts, by turns."""
    new = prompts_of(asked.model)
    for number in range(asked.rounds + 1):
        for length, users in [(128, n) for n in asked.users] + [(n, 1) for n in asked.prompts]:
            prompts = new(length, users)
            for name, rival in rivals.items():
                before = rival.sent()
                with within(rival.hosts[0]):
                    figures = play(Side(name, rival.url), prompts, asked.tokens)
                sent = (rival.sent() - before) / (length + asked.tokens) / users
                if not number:
                    continue  # the first round loads and compiles
                if length == 128:
                    take(taken[name], f"{users} user(s), tokens a second", figures[SPEED] or 0.0)
                    between = 1e3 * (figures[BETWEEN] or 0.0)
                    take(taken[name], f"{users} user(s), ms between tokens", between)
                else:
                    take(taken[name], f"first token of {length}, s", figures[TTFT] or 0.0)
                if (length, users) == (128, 1):
                    take(taken[name], "kB a token, the prompt's too", sent / 1e3)


SPEED, TTFT, BETWEEN = "tokens_per_second", "ttft_seconds", "tbt_seconds"


def loss(rival: Rival, taken: Taken) -> None:
    """kill -9 of the last node in mid-answer, and that node back."""
    tokens = 4 * rival.asked.tokens
    right, broken, last = Answer(), Answer(), Answer()
    with within(rival.hosts[0]):
        stream(rival.url, tokens, right)
        asking = threading.Thread(target=stream, args=(rival.url, tokens, broken))
        asking.start()
    wait(lambda: len(broken.came) >= LOST_AT or not asking.is_alive())
    rival.daemons[len(rival.hosts) - 1].signal(signal.SIGKILL)
    asking.join()
    went_on = not broken.error and len(broken.text) >= len(right.text)
    same = "with the same text" if broken.text == right.text else "WITH ANOTHER TEXT"
    take(taken, "kill -9: the answer", f"goes on, {same}" if went_on else "ends in an error")
    take(taken, "kill -9: pause, s", broken.pause if went_on else "for good")
    began = time.monotonic()
    rival.bring_back()
    rival.until_ready()
    with within(rival.hosts[0]):
        stream(rival.url, 1, last)
    assert last.came, last.error
    take(taken, "node back: first token of a new answer, s", last.came[0] - began)


def switch(rival: Rival, taken: Taken) -> None:
    """Another model on the same hosts."""
    other, began = Answer(), time.monotonic()
    rival.end()
    rival.begin(rival.asked.second, False)
    rival.until_ready()
    with within(rival.hosts[0]):
        stream(rival.url, 1, other)
    assert other.came, other.error
    take(taken, "two models: until the other one answers, s", other.came[0] - began)


def wait(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def over_link(asked: argparse.Namespace, link: str) -> dict[str, Taken]:
    """All figures of both sides over such cables."""
    mbit, _, delay = link.partition(":")
    cable = Cable(float(delay), float(mbit))
    hidden = Path(asked.model).resolve().parent
    kinds: list[type[Rival]] = [Ours, *([Theirs] if asked.peer and asked.rpc else [])]
    names = [f"node-{n}" for n in range(asked.stages + 1)]
    with ExitStack() as stack:
        rivals: dict[str, Rival] = {}
        for kind in kinds:
            hosts, _ = stack.enter_context(board_hosts(hidden, *names, cable=cable))
            rivals[kind.name] = kind(asked, hosts, stack)
        taken: dict[str, Taken] = {name: {} for name in rivals}
        for name, rival in rivals.items():
            starts(rival, taken[name])
        speeds(rivals, taken, asked)
        for name, rival in rivals.items():
            for number, size in enumerate(rival.megabytes()):
                take(taken[name], f"memory of node {number}, MB", size)
            loss(rival, taken[name])
            switch(rival, taken[name])
    return taken


# --- what is told -------------------------------------------------------------------------------


def shown(values: list[float | str]) -> str:
    """A figure's median, or what a word says."""
    numbers = [value for value in values if not isinstance(value, str)]
    return f"{statistics.median(numbers):.3g}" if len(numbers) == len(values) else str(values[-1])


def table(found: dict[str, dict[str, Taken]]) -> str:
    """By link: each figure of ours and theirs, and their ratio where both are numbers."""
    lines = ["| link | | edgespec | llama.cpp + RPC | ours over theirs |", "| --- " * 5 + "|"]
    for link, taken in found.items():
        theirs = taken.get(Theirs.name, {})
        for name, values in taken[Ours.name].items():
            cells = [shown(values), shown(theirs[name]) if name in theirs else ""]
            both = [cell for cell in cells if re.fullmatch(r"[\d.e+-]+", cell)]
            over = "" if len(both) < 2 else f"{float(both[0]) / float(both[1]):.2f}"
            lines.append(f"| {link} | {name} | {' | '.join(cells)} | {over} |")
    return "\n".join(lines)


def report(asked: argparse.Namespace, found: dict[str, dict[str, Taken]]) -> str:
    """What the page says of a run."""
    peer = shlex.join(asked.peer) if asked.peer else "none was here, so its cells are empty"
    said = (
        f"{date.today():%-d %B %Y}, {os.cpu_count()} cores that {2 if asked.peer else 1} side(s) "
        f"share, load {os.getloadavg()[1]:.1f}; {Path(asked.model).name}, {asked.stages} stages, "
        f"{asked.tokens} tokens an answer, {asked.rounds} round(s). The peer: {peer}."
    )
    return f"\n{said}\n\n{table(found)}\n\n"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--second", help="another model; default: the bundled toy (ours alone)")
    parser.add_argument("--peer", type=shlex.split, metavar="COMMAND", help="a llama-server")
    parser.add_argument("--rpc", type=shlex.split, metavar="COMMAND", help="an rpc-server")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--links", nargs="+", default=["1000:0.5", "100:2"], metavar="MBIT:MS")
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    if bool(asked.peer) != bool(asked.rpc):
        parser.error("--peer and --rpc go together")
    if asked.peer and not asked.second:
        parser.error("--second: name another GGUF file, which both sides can serve")
    for words in (asked.peer, asked.rpc):
        if words and shutil.which(words[0]) is None:
            parser.error(f"{words[0]} is no program here; nothing is built or fetched")
    asked.second = asked.second or bundled("base")
    return asked


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    asked = parsed(arguments)
    found: dict[str, dict[str, Taken]] = {}
    for link in asked.links:
        mbit, _, delay = link.partition(":")
        found[f"{mbit} Mbit, {delay} ms"] = over_link(asked, link)
        page = asked.page.read_text("utf-8")
        place = block_of("side by side").search(page)
        assert place is not None, f"{asked.page} has no block for this"
        text = report(asked, found)
        asked.page.write_text(f"{page[: place.start(2)]}{text}{page[place.end(2) :]}", "utf-8")
    print(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    main()
