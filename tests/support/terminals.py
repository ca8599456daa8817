"""A pseudo-terminal in the place of this process's standard streams."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import threading

import pytest

STREAMS = ("stdin", "stdout", "stderr")


class Terminal:
    """What is written to it can be read, and keys be pressed. Use as a context manager, within a
    test: pytest sets the streams anew when one begins."""

    def __init__(self, rows: int = 24, columns: int = 120) -> None:
        self._main, self._side = pty.openpty()
        self.resize(rows, columns)
        self._mode = termios.tcgetattr(self._side)
        self._raw = b""
        self._reading = threading.Lock()
        self._over = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Terminal:
        self._reader.start()
        # Who asks for the terminal's size asks the first three descriptors.
        self._before = [os.dup(number) for number in range(3)]
        for number in range(3):
            os.dup2(self._side, number)
        self._files = [
            os.fdopen(n, "w" if n else "r", 1, encoding="utf-8", closefd=False) for n in range(3)
        ]
        for name, file in zip(STREAMS, self._files, strict=True):
            self._patch.setattr(sys, name, file)
        self._patch.setenv("TERM", "xterm-256color")
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            self._patch.delenv(name, raising=False)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        for file in self._files:
            file.close()
        for number, descriptor in enumerate(self._before):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._over.set()
        self._reader.join()
        os.close(self._side)
        os.close(self._main)

    def _read(self) -> None:
        """Take what is written while no test looks: a screen is more than the kernel keeps, and who
        writes would wait for ever."""
        while not self._over.is_set():
            select.select([self._main], [], [], 0.05)
            self._take()

    def _take(self) -> None:
        with self._reading:
            while select.select([self._main], [], [], 0)[0]:
                self._raw += os.read(self._main, 65536)

    def set(self, name: str, value: str) -> None:
        """An environment variable."""
        self._patch.setenv(name, value)

    def resize(self, rows: int, columns: int) -> None:
        """As a person does with the mouse."""
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """At the keyboard."""
        os.write(self._main, text.encode())

    @property
    def raw(self) -> str:
        """All that was written so far."""
        self._take()
        return self._raw.decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without colours."""
        return re.sub(r"\033\[[\d;]*m", "", self.raw)

    def forget(self) -> None:
        """What was written."""
        self._take()
        with self._reading:
            self._raw = b""

    def is_as_before(self) -> bool:
        """Whether keys are echoed and lines can be edited again."""
        return termios.tcgetattr(self._side) == self._mode
