"""A cluster on a LAN of namespaces, made as people make one, and what goes wrong with its boards.

with boards(tmp_path) as ring, ring.asking("d0", "Once", 40, "adaptive") as asking:
    ring.kill(ring.holder(2)) ...
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.commands import Command
from support.namespaces import Host, lan
from support.torch_rings import BASE, DRAFT

STOPPED_S = 10.0
UNPLUGGED_S = 5.0
PATIENCE_S = 180.0
"""A machine of two cores that others use, too, needs a minute to start five processes."""
LOSSES = (
    "has been silent for",
    "left: ",
    "lost its connection",
    "cannot go on: ",
    "was replaced by process",
    "was removed from the cluster",
)
"""What the coordinator says of a stage that is lost, behind its name."""


class Boards:
    """A coordinator (d0), boards that have joined by a token and discovery, and a user's machine.

    Each has folders of its own, so that it knows what it was told and nothing else.
    """

    def __init__(self, stack: ExitStack, folder: Path, hosts: Sequence[Host]) -> None:
        self._stack = stack
        self._folder = folder
        self.hosts = {host.name: host for host in hosts}
        self.daemons: dict[str, Command] = {}
        self.token = ""

    # --- set-up -------------------------------------------------------------------------------

    def on(self, name: str, command: str, *arguments: str) -> Command:
        """A command on a host, as its user."""
        cluster = str(self._folder / name / "cluster")
        return self.hosts[name].command(*command.split(), "--cluster", cluster, *arguments)

    def said(self, name: str, command: str, *arguments: str) -> str:
        """What a command that has to succeed writes to standard output."""
        with self.on(name, command, *arguments) as running:
            done = running.done()
        assert done.code == 0, done
        return done.out

    def init(self, *options: str, model: Sequence[str] = ("--model", BASE)) -> None:
        """Make the cluster on d0."""
        asked = [*model, "--draft", DRAFT, "--dtype", "float64", "--host", "0.0.0.0", *options]
        self.token = self.said("d0", "init", *asked).split()[-1]

    def serve(self, *options: str) -> None:
        """Start the coordinator."""
        self._start("d0", "serve", *options)

    def join(self, name: str, *arguments: str) -> None:
        """Start a board's daemon; a token is needed the first time alone."""
        self._start(name, "join", *arguments)

    def _start(self, name: str, command: str, *arguments: str) -> None:
        cache = ("--cache", str(self._folder / name / "cache"))
        self.daemons[name] = self._stack.enter_context(self.on(name, command, *cache, *arguments))

    def start(self, *names: str, options: Sequence[str] = ()) -> None:
        """Coordinator and boards, with their token; until the ring is up."""
        self.serve(*options)
        for name in names:
            self.join(name, self.token)
        self.until(lambda: "the ring is up" in self.coordinator.err, "the ring is up")

    # --- what is to be seen -------------------------------------------------------------------

    @property
    def coordinator(self) -> Command:
        """That of now."""
        return self.daemons["d0"]

    def asking(self, name: str, prompt: str, new_tokens: int, policy: str = "adaptive") -> Command:
        """A prompt on its way, to be continued as it is."""
        options = ["--raw", "--policy", policy, "--max-new-tokens", str(new_tokens), "--wait", "60"]
        return self.on(name, "prompt", prompt, *options)

    def holder(self, stage: int) -> str:
        """The board that holds a stage now, by what the coordinator said last."""
        said = re.findall(rf"stage {stage} \(\S+, process (\d+)\) joined", self.coordinator.err)
        return self.board(int(said[-1]))

    def board(self, pid: int) -> str:
        """Whose daemon that process is."""
        return next(n for n, daemon in self.daemons.items() if daemon.process.pid == pid)

    @property
    def is_up(self) -> bool:
        """Whether the ring is, by what was said last."""
        lost = rf"stage \d+ \(\S+, process \d+\) (?:{'|'.join(LOSSES)})"
        said = re.findall(f"the ring is up|{lost}", self.coordinator.err)
        return said[-1:] == ["the ring is up"]

    def device(self, name: str) -> str:
        """What the cluster calls a board."""
        (called,) = set(re.findall(r"this machine is (\S+) of the", self.daemons[name].err))
        return str(called)

    def count(self, text: str) -> int:
        """How often the coordinator has said that."""
        return self.coordinator.err.count(text)

    def losses(self, pid: int) -> int:
        """How often it has lost this very process."""
        who = rf"(stage \d+|the spare) \(\S+, process {pid}\)"
        return len(re.findall(f"{who} ({'|'.join(LOSSES)})", self.coordinator.err))

    def until(self, condition: Callable[[], bool], what: str) -> float:
        """Wait for it; when that was."""
        limit = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < limit, f"never: {what}\n{self.coordinator.err}"
            time.sleep(0.005)
        return time.monotonic()

    def bytes_sent(self, name: str) -> int:
        """What a board has put on the network."""
        text = Path(f"/proc/{self.daemons[name].process.pid}/net/dev").read_text(encoding="ascii")
        (figures,) = re.findall(r"eth0:(.*)", text)
        return int(figures.split()[8])

    # --- what goes wrong ----------------------------------------------------------------------

    def cut_power(self, name: str) -> None:
        """It is gone."""
        self.daemons[name].signal(signal.SIGKILL)
        self.daemons[name].process.wait()

    def kill(self, name: str) -> None:
        """Power cut; somebody switches the board on again."""
        self.cut_power(name)
        self.join(name)

    def stop(self, name: str) -> None:
        """It hangs for a while, and then goes on."""
        self.daemons[name].signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        self.daemons[name].signal(signal.SIGCONT)

    def unplug(self, name: str) -> None:
        """The cable is out for a while."""
        self.hosts[name].link_down()
        time.sleep(UNPLUGGED_S)
        self.hosts[name].link_up()

    def restart(self, name: str) -> None:
        """As `systemctl restart` does."""
        self.daemons[name].signal(signal.SIGTERM)
        self.daemons[name].process.wait()
        self.join(name)


@contextmanager
def boards(folder: Path, *names: str) -> Iterator[Boards]:
    """A LAN of d0, a user's machine and these boards, on which nothing runs yet."""
    with lan("d0", "user", *names) as hosts, ExitStack() as stack:
        yield Boards(stack, folder, hosts)
