"""A ring on this machine: a coordinator and its stages as child processes, for `edgespec demo`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.child_process import last_words
from edgespec.daemon.cluster import VARIABLE, ClusterFolder, ClusterSettings
from edgespec.daemon.process import PARENT
from edgespec.errors import EXIT_USAGE, ConfigError, EdgespecError, PeerLost
from edgespec.model.bounded_process import STILL_S, speaks
from edgespec.plugins import own_policy_options
from edgespec.types.own_module import own_command

LOAD_S = 1800.0
"""Seconds that a coordinator may take to load its models on the slowest machine. A process that
ends meanwhile is an error at once (`check`)."""

RECOVERY_S = 5.0
"""Seconds that a request waits for a silent stage: one that only stalled is back by then. No other
device replaces a stage here, and a process that ended is an error at once (`check`)."""

END_S = 5.0
"""Seconds that processes get to end by themselves."""


class LocalRing:
    """Starts the processes on entering, and ends them all on leaving.

    They listen on loopback only, and the kernel ends them if this process is killed.
    """

    def __init__(
        self, config: CoordinatorConfig, trace: Path | None = None, *, interrupts: bool = True
    ) -> None:
        """`trace`: the folder for the traces of all processes, NAME.jsonl. `interrupts`: a Ctrl-C
        ends it (see `check`)."""
        self._takes_interrupts = interrupts
        self._config = config
        self._trace = trace
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="edgespec-")
        self.address = config.address
        # Temporary keys: no other cluster, and no other user of this machine, can connect.
        settings = ClusterSettings(config.model, stages=config.stages, host=config.address.host)
        self._cluster = ClusterFolder.create(Path(self._folder.name) / "cluster", settings)
        self.identity = self._cluster.identity
        self._interrupted = False
        self._before: Any = None  # what Ctrl-C did before

    def __enter__(self) -> LocalRing:
        is_main = threading.current_thread() is threading.main_thread()
        if self._takes_interrupts and is_main:
            self._before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _on_interrupt(self, number: int, frame: object) -> None:
        """Ctrl-C; noted too, as an exception raised within a destructor is lost."""
        self._interrupted = True
        raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
                process.send_signal(signal.SIGCONT)  # a stopped process ends only when it goes on
        deadline = time.monotonic() + END_S
        for process in self._processes.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._folder.cleanup()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: "coordinator", "stage 1", …"""
        return {name: process.pid for name, process in self._processes.items()}

    def check(self) -> None:
        """Raise if a process has ended: PeerLost, naming it and its last words.

        ConfigError if it ended because of a wrong setting. KeyboardInterrupt if Ctrl-C was pressed
        and has not ended this process.
        """
        if self._interrupted:
            raise KeyboardInterrupt
        codes = {name: process.poll() for name, process in self._processes.items()}
        ended = [(name, code) for name, code in codes.items() if code is not None]
        if ended:
            # The others end because of the one that was killed.
            raise self._end_of(*min(ended, key=lambda entry: entry[1] >= 0))

    def _start(self) -> None:
        config = self._config
        serve = ["serve", "--model", config.model, "--stages", str(config.stages)]
        serve += ["--draft", config.draft, "--dtype", config.dtype]
        serve += ["--quant", config.quantisation.name, "--context", str(config.context)]
        serve += ["--head-quant", config.head_quantisation.name]
        serve += ["--draft-quant", config.draft_quantisation.name]
        serve += ["--layers", ",".join(map(str, config.layers))]
        serve += ["--head", config.head, "--live", str(config.live)]
        serve += ["--with-stage", str(config.with_stage)]
        serve += ["--recovery", str(RECOVERY_S), "--http", "none"]
        serve += own_policy_options()
        cache = ["--cache", config.cache or str(Path(self._folder.name) / "blocks")]
        emulate = config.emulation.options if config.emulation else []
        # All at once, as each imports for as long as the coordinator does before it listens.
        with kept_port(config.address) as given:
            serve += ["--host", given.host, "--port", str(given.port)]
            coordinator = self._spawn("coordinator", serve + cache + emulate, subprocess.PIPE)
            for stage in range(1, config.stages + 1):
                if stage == config.with_stage:
                    continue  # the coordinator starts it
                join = ["join", "--stage", str(stage), "--coordinator", str(given)]
                join += ["--wait", str(LOAD_S)]
                self._spawn(f"stage {stage}", join + cache + emulate, subprocess.DEVNULL)
            self.address = self._read_address(coordinator)

    def _spawn(self, name: str, arguments: list[str], stdout: int) -> subprocess.Popen[bytes]:
        if self._trace is not None:
            trace = self._trace / f"{name.replace(' ', '-')}.jsonl"
            arguments = [*arguments, "--trace", str(trace)]
        # One thread each: several pools of threads would wait for one another on the few cores.
        own = {"OMP_NUM_THREADS": "1", PARENT: str(os.getpid()), VARIABLE: str(self._cluster.path)}
        own["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # for modules of our owner's
        with self._log(name).open("wb") as log, _signals_held():
            process = subprocess.Popen(
                [*own_command("edgespec.cli.main"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=log,
                env={**os.environ, **own},
                # A Ctrl-C at the terminal is for this process, which then ends its children.
                start_new_session=True,
            )
            self._processes[name] = process
        return process

    def _read_address(self, coordinator: subprocess.Popen[bytes]) -> Address:
        assert coordinator.stdout is not None
        _, _, text = _read_line(coordinator.stdout, coordinator.pid).rpartition(" ")
        if not text:
            coordinator.wait(END_S)
            self.check()
            raise PeerLost("the coordinator did not say where it listens")
        return Address.parse(text)

    def _log(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name.replace(' ', '-')}.log"

    def _end_of(self, name: str, code: int) -> EdgespecError:
        """What to say about a process that ended by itself."""
        process = f"the {name} process ({self._processes[name].pid})"
        if code < 0:
            return PeerLost(f"{process} was killed by {signal.Signals(-code).name}")
        words = last_words(self._log(name))
        if code == EXIT_USAGE and words:
            return ConfigError(words)
        return PeerLost(f"{process} ended: {words or f'its exit code is {code}'}")


@contextmanager
def kept_port(address: Address) -> Iterator[Address]:
    """The address, with a free port if it has none, which no other program is given meanwhile: a
    coordinator may listen there all the same, as it lets its port be used again."""
    if address.port:
        yield address
        return
    family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
    with socket.socket(family) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((address.host, 0))
        yield replace(address, port=kept.getsockname()[1])


def _read_line(stream: IO[bytes], writer: int) -> str:
    """One line, or "" if the stream ends, or its writer, a process, does nothing for STILL_S."""
    if not speaks(stream, writer, STILL_S):
        return ""
    return stream.readline().decode(errors="replace").strip()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Delay termination signals until after the block: a process that starts within it must be
    registered before all are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda n, _: held.append(n))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in held:
            signal.raise_signal(one)
