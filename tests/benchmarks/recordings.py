"""Terminal sessions for docs/results/complaints.md, of real commands on this machine.

    make recordings
    python tests/benchmarks/recordings.py [--only NAME,…] [--page FILE]

Each session types commands of edgespec, by hand or on boards that are network namespaces of their
own (root, and `ip` of iproute2), each with its own name, home and caches, and with nothing of the
model but what the ring sends it. What they print, folders and tokens shortened, is written to the
page between `<!-- recorded NAME -->` and `<!-- end -->`. A session whose `words` are not in what
was printed is an error, and the page stays as it was.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.board_hosts import board_hosts
from support.commands import COMMAND, Command
from support.namespaces import Host

from edgespec.daemon.model_names import packaged
from edgespec.planning.catalogue import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "results" / "complaints.md"
MODEL = "smollm2-135m"
STORY = "Write a story about a lighthouse."
PATIENCE_S = 300.0
TOKEN = re.compile(r"\bedge-[\w-]{20,}")
PROGRESS = re.compile(r"^playing the plans|^still |^\S+ still |: still ")
"""Lines that come by the clock."""


@dataclass
class Terminal:
    """What one session types and reads; `boards`: their folders, shown as `~`."""

    boards: dict[str, Path] = field(default_factory=dict)
    _lines: list[str] = field(default_factory=list)

    def typed(self, line: str, on: str = "") -> None:
        """A command, as a person would type it."""
        self._lines += [f"# on {on}"] if on else []
        self._lines.append(f"$ {line}")

    def note(self, text: str) -> None:
        """What happened that nobody typed."""
        self._lines.append(f"# {text}")

    def printed(self, text: str) -> None:
        """What it printed, without empty lines and those that only tell that time passes."""
        for folder in self.boards.values():
            text = text.replace(f"{folder}/home", "~").replace(f"{folder}/cache", "~/.cache")
        shown = [line.rstrip() for line in TOKEN.sub("edge-…", text).splitlines()]
        self._lines += [line for line in shown if line.strip() and not PROGRESS.search(line)]

    def run(self, line: str, host: Host | None = None) -> str:
        """Type an edgespec command, wait for its end, and keep what it prints."""
        self.typed(line, host.name if host else "")
        arguments = [*COMMAND, *line.split()[1:]]
        done = subprocess.run(
            host.inside(*arguments) if host else arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )
        self.printed(done.stdout)
        return done.stdout

    def text(self) -> str:
        """All of it, as a block of Markdown."""
        return "".join(f"    {line}\n" for line in self._lines)


Session = Callable[[Terminal], None]


# --- boards -------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """A coordinator and stages on boards, each command typed once."""

    terminal: Terminal
    stack: ExitStack
    hosts: list[Host]
    token: str = ""
    daemons: dict[str, Command] = field(default_factory=dict)

    def start(self, line: str, host: Host) -> Command:
        """Type a command that runs on."""
        self.terminal.typed(TOKEN.sub("edge-…", line), host.name)
        started = self.stack.enter_context(host.command(*line.split()[1:]))
        self.daemons[host.name] = started
        return started

    def serve(self) -> None:
        """Make the cluster and start its coordinator, on the first board."""
        first = self.hosts[0]
        stages = len(self.hosts) - 1
        found = TOKEN.search(
            self.terminal.run(f"edgespec init --model {MODEL} --stages {stages}", first)
        )
        assert found is not None
        self.token = found[0]
        self.start("edgespec serve", first)

    def join(self) -> None:
        """Start all stages; none is told an address."""
        for host in self.hosts[1:]:
            self.start(f"edgespec join {self.token}".rstrip(), host)
        self.daemons[self.hosts[0].name].until_err("the ring is up")

    def told(self, host: Host, since: int = 0) -> None:
        """Keep what a daemon has printed."""
        command = self.daemons[host.name]
        self.terminal.printed((command.err + command.out)[since:])


@contextmanager
def cluster(terminal: Terminal, *names: str) -> Iterator[Cluster]:
    """Boards and what runs on them."""
    model = Path(packaged(MODELS[MODEL])).parent
    with board_hosts(model, *names) as (hosts, folders), ExitStack() as stack:
        terminal.boards |= folders
        yield Cluster(terminal, stack, hosts)


# --- the sessions -------------------------------------------------------------------------------


def find(terminal: Terminal) -> None:
    """Nodes do not find each other."""
    with cluster(terminal, "board-a", "board-b", "board-c") as ring:
        ring.serve()
        ring.join()
        ring.told(ring.hosts[2])
        terminal.run("edgespec status", ring.hosts[0])


def lost(terminal: Terminal) -> None:
    """A node is lost."""
    with cluster(terminal, "board-a", "board-b", "board-c") as ring:
        ring.serve()
        ring.join()
        first, last = ring.hosts[0], ring.hosts[-1]
        line = f"edgespec prompt --temperature 0 --max-new-tokens 160 {STORY!r}"
        words = ("prompt", "--temperature", "0", "--max-new-tokens", "160", STORY)
        terminal.typed(line, first.name)
        with first.command(*words) as asked:
            until(lambda: len(asked.out) > 60)
            began = asked.out
            ring.daemons[last.name].signal(signal.SIGKILL)
            asked.until_err("waiting for it")
            terminal.printed(began + " …")
            terminal.typed("kill -9 …   # of edgespec join, while that answer comes", last.name)
            ring.start("edgespec join", last)
            done = asked.done()
        terminal.note("the prompt on board-a goes on")
        terminal.printed("… " + done.out[len(began) :])
        terminal.printed(done.err)
        with first.command(*words) as again:
            same = again.done().out == done.out
        terminal.typed(line, first.name)
        terminal.note(f"nothing is lost this time: {'the same text' if same else 'ANOTHER TEXT'}")


def own_layers(terminal: Terminal) -> None:
    """Every node loads everything."""
    with cluster(terminal, "board-a", "board-b", "board-c") as ring:
        ring.serve()
        ring.join()
        board = ring.hosts[1]
        ring.told(board)
        blocks = terminal.boards[board.name] / "cache" / "edgespec" / "blocks"
        size = sum(path.stat().st_size for path in blocks.rglob("*") if path.is_file())
        terminal.typed("du -sh ~/.cache/edgespec/blocks", board.name)
        terminal.printed(f"{size / 1e6:.1f} MB; the model's file has {file_megabytes():.1f} MB")
        terminal.note("all boards are switched off and on again")
        for daemon in ring.daemons.values():
            daemon.signal(signal.SIGTERM)
        for daemon in ring.daemons.values():
            daemon.done()
        ring.start("edgespec serve", ring.hosts[0])
        ring.token = ""
        ring.join()
        ring.told(board)


def memory(terminal: Terminal) -> None:
    """Out of memory, at the first prompt."""
    terminal.run("edgespec plan --model qwen3-14b --devices 2*raspberry-pi-5-8gb --draft none")
    terminal.run("edgespec plan --model llama-3.3-70b --devices 3*jetson-orin-nano-8gb")


def more(terminal: Terminal) -> None:
    """Slower with more nodes."""
    terminal.run("edgespec plan --model llama-3.2-3b --devices 3*raspberry-pi-5-8gb --draft none")


def mixed(terminal: Terminal) -> None:
    """Boards that are not alike."""
    devices = "jetson-orin-nano-8gb,jetson-orin-nx-16gb,jetson-orin-nano-8gb,raspberry-pi-5-8gb"
    terminal.run(f"edgespec plan --model qwen2.5-32b --devices {devices} --draft none")


def guesses(terminal: Terminal) -> None:
    """No speculation over nodes."""
    terminal.run("edgespec demo --compare --emulate jetson-orin-nano-8gb")


SESSIONS: dict[str, tuple[Session, tuple[str, ...]]] = {
    "find": (find, ("board-b", "board-c", "found the coordinator", "the ring is up")),
    "lost": (lost, ("kill -9", "waiting for it", "the ring is up again", "the same text")),
    "own layers": (
        own_layers,
        ("receiving the block", "MB; the model's file has", "the block is in"),
    ),
    "memory": (memory, ("of GiB", "does not fit", "GiB")),
    "more": (more, ("no faster with it", "alone is the fastest: use the other boards")),
    "mixed": (mixed, ("jetson-orin-nx-16gb", "raspberry-pi-5-8gb", "layers")),
    "guesses": (guesses, ("times are emulated", "times as fast, same text")),
}
"""By name: what is typed, and the words that matter in what is printed."""


def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    limit = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def file_megabytes() -> float:
    """Of the model's file."""
    return Path(packaged(MODELS[MODEL])).stat().st_size / 1e6


def record(name: str) -> str:
    """Play a session; returns its block. Raises AssertionError if a word is missing in it."""
    session, words = SESSIONS[name]
    terminal = Terminal()
    session(terminal)
    text = terminal.text()
    missing = [word for word in words if word not in text]
    assert not missing, f"{name}: nothing says {missing}\n{text}"
    return text


def block_of(name: str) -> re.Pattern[str]:
    """A session on the page: what is before it, it, and what is behind it."""
    return re.compile(rf"(<!-- recorded {name} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def put(page: str, name: str, text: str) -> str:
    """The page with that session."""
    found = block_of(name).search(page)
    assert found is not None, f"the page has no block for {name}"
    return f"{page[: found.start(2)]}\n{text}\n{page[found.end(2) :]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(SESSIONS))
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    for name in asked.only.split(","):
        text = record(name)
        asked.page.write_text(put(asked.page.read_text("utf-8"), name, text), "utf-8")
        print(f"recorded {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
