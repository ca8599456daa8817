"""edgespec top: the status of the ring, every second."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.live import Live

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.reach import reach
from edgespec.cli.search import Silent
from edgespec.cli.status import print_status
from edgespec.cli.top_view import BusyHistory, TopView, screen
from edgespec.config import Address
from edgespec.errors import (
    AddressUnavailable,
    ConfigError,
    EdgespecError,
    OtherVersion,
)
from edgespec.net.keys import Identity
from edgespec.runtime.client import Client
from edgespec.types.shown import shown
from edgespec.wire.client_messages import Status

EVERY_S = 1.0
"""Seconds between two requests for the status."""

KEY_S = 0.1
"""Seconds within which a key or a new terminal size is noticed."""

AGAIN_S = 3.0
"""Seconds for a coordinator's first answer, before it is searched for again."""


def top(
    coordinator: str | None = options.COORDINATOR,
    wait: float = typer.Option(
        10.0, help="Seconds to look for the coordinator on the network at the start."
    ),
    cluster: str = options.CLUSTER,
) -> None:
    """Watch the ring: its devices, their memory, temperature and work; q or Ctrl-C leaves.

    Where standard output is no terminal, the status is printed every second.
    """
    address, identity = reach(coordinator, cluster, wait, Notes())
    console = Console(markup=False, highlight=False, emoji=False)
    poller = StatusPoller(address, identity, coordinator, cluster)
    with poller:
        if console.is_terminal and not console.is_dumb_terminal:
            _show(poller, console)
        else:
            _print(poller, console)


class StatusPoller:
    """A thread that asks for the status every second, and goes on after errors.

    Use as a context manager. `looks` counts answers and failures.
    """

    def __init__(
        self, address: Address, identity: Identity, coordinator: str | None, cluster: str
    ) -> None:
        self._at, self._coordinator, self._cluster = (address, identity), coordinator, cluster
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgespec-top", daemon=True)
        self._state: Status | None = None
        self._heard = time.monotonic()
        self._problem = ""
        self._fatal: EdgespecError | None = None
        self._busy = BusyHistory()
        self.looks = 0

    def __enter__(self) -> StatusPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join(AGAIN_S)  # longer only during a search on the network

    def view(self) -> TopView:
        """The latest state. Raises errors that do not pass, such as a refused key."""
        with self._lock:
            if self._fatal is not None:
                raise self._fatal
            silent = time.monotonic() - self._heard if self._problem else 0.0
            return TopView(
                str(self._at[0]), self._state, self._busy, self._problem, silent,
                time.strftime("%H:%M:%S"),
            )  # fmt: skip

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                try:
                    self._watch()
                except EdgespecError as problem:
                    self._note(problem)
                self._leaving.wait(EVERY_S)
        except _Left:
            return

    def _watch(self) -> None:
        """Until an error, or until the user leaves."""
        if self._problem:
            self._at = reach(self._coordinator, self._cluster, AGAIN_S, Silent())
        with Client(*self._at, AGAIN_S, check=self._check) as client:
            while True:
                state = client.status()
                with self._lock:
                    self._state, self._problem, self._heard = state, "", time.monotonic()
                    self._busy.add(state)
                    self.looks += 1
                if self._leaving.wait(EVERY_S):
                    return

    def _note(self, problem: EdgespecError) -> None:
        is_wrong = isinstance(problem, ConfigError | OtherVersion)
        may_come = not is_wrong or isinstance(problem, AddressUnavailable)
        with self._lock:
            self._problem = shown(str(problem))
            self._fatal = None if may_come else problem
            self.looks += 1
        if not may_come:
            self._leaving.set()

    def _check(self) -> None:
        if self._leaving.is_set():
            raise _Left


class _Left(Exception):
    """The user has left."""


def _show(poller: StatusPoller, console: Console) -> None:
    """Full screen, until q or Ctrl-C."""
    seen: object = None
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                view = poller.view()
                now = (poller.looks, console.size, view.clock)
                if now != seen:
                    live.update(screen(view, console), refresh=True)
                    seen = now
                if key() in ("q", "Q", "\x03", "\x04"):
                    return
        except KeyboardInterrupt:
            return


def _print(poller: StatusPoller, console: Console) -> None:
    """One block of lines for each status, until Ctrl-C."""
    seen = 0
    try:
        while True:
            view = poller.view()
            if poller.looks == seen:
                time.sleep(KEY_S)
                continue
            seen = poller.looks
            print(f"{view.clock}  coordinator at {view.address}")
            if view.problem:
                print(f"the coordinator cannot be reached; trying again: {view.problem}")
            elif view.state is not None:
                print_status(view.state)
            print(flush=True)
    except KeyboardInterrupt:
        return


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yields a function that returns the next key, or "" after KEY_S without one.

    The terminal is restored, after SIGTERM too.
    """
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    mode = termios.tcgetattr(descriptor) if descriptor is not None else None

    def next_key() -> str:
        if descriptor is None:
            time.sleep(KEY_S)
            return ""
        ready, _, _ = select.select([descriptor], [], [], KEY_S)
        return os.read(descriptor, 1).decode("latin-1") if ready else ""

    try:
        if descriptor is not None:
            tty.setcbreak(descriptor)
        yield next_key
    finally:
        if descriptor is not None and mode is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
        signal.signal(signal.SIGTERM, before)
