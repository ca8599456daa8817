"""Running edgespec commands: in this process for speed, as processes where signals matter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import pytest
import typer.main

from edgespec.cli.main import main

PATIENCE_S = 300.0
COMMAND = [sys.executable, "-m", "edgespec.cli.main"]


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    def assert_refused(self, *words: str, code: int = 2) -> None:
        """One clear error on standard error, nothing on standard output, no traceback."""
        assert self.code == code, self
        assert self.out == "", self
        assert "Traceback" not in self.err
        text = " ".join(self.err.split())
        for word in words:
            assert word in text, self.err


_built = cache(typer.main.get_command)
"""Making the commands of their functions takes longer than most of them run; they keep nothing."""


def run_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> Done:
    """Run a command in this process."""
    monkeypatch.setattr(typer.main, "get_command", _built)
    monkeypatch.setattr(sys, "argv", ["edgespec", *arguments])
    monkeypatch.setattr(os, "_exit", sys.exit)  # how a daemon ends its process
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    capfd.readouterr()
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capfd.readouterr()
    return Done(int(ended.value.code or 0), out, err)


class Command:
    """A command as a process of its own. Use as a context manager: it does not outlive it."""

    def __init__(
        self,
        *arguments: str | bytes,
        stdin: bytes | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.arguments = [*command, *arguments]
        self._stdin = stdin
        self._out: list[bytes] = []
        self._err: list[bytes] = []

    def __enter__(self) -> Command:
        self.process = subprocess.Popen(
            self.arguments,
            stdin=subprocess.DEVNULL if self._stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "COLUMNS": "200"},
        )
        if self.process.stdin is not None and self._stdin is not None:
            self.process.stdin.write(self._stdin)
            self.process.stdin.close()
        streams = ((self.process.stdout, self._out), (self.process.stderr, self._err))
        self._readers = [threading.Thread(target=_drain, args=pair) for pair in streams]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    @property
    def out(self) -> str:
        """Standard output so far."""
        return b"".join(self._out).decode(errors="replace")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return b"".join(self._err).decode(errors="replace")

    def until_out(self, text: str) -> None:
        """Wait until it wrote this to standard output."""
        self._until(lambda: text in self.out, f"{text!r} on standard output")

    def until_err(self, text: str) -> None:
        """Wait until it wrote this to standard error."""
        self._until(lambda: text in self.err, f"{text!r} on standard error")

    def _until(self, condition: object, what: str) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < limit, f"no {what}\n{self.out}\n{self.err}"
            assert self.process.poll() is None or condition(), (  # type: ignore[operator]
                f"it ended without {what}\n{self.out}\n{self.err}"
            )
            time.sleep(0.01)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def done(self) -> Done:
        """Wait for its end."""
        code = self.process.wait(PATIENCE_S)
        for reader in self._readers:
            reader.join()
        return Done(code, self.out, self.err)


def _drain(stream: object, into: list[bytes]) -> None:
    while piece := os.read(stream.fileno(), 65536):  # type: ignore[attr-defined]
        into.append(piece)


def run(*arguments: str | bytes, stdin: bytes | None = None) -> Done:
    """Run a command as a process to its end."""
    with Command(*arguments, stdin=stdin) as command:
        return command.done()


def to_prompt(address: object, *arguments: str) -> Sequence[str]:
    """`edgespec prompt` at an address."""
    return ["prompt", "--coordinator", str(address), *arguments]
