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
from contextlib import suppress

import pytest


class Terminal:
    """A pseudo-terminal as this process's standard streams, whose screen a test can read."""

    def __init__(self) -> None:
        self._main, side = pty.openpty()
        self.resize(24, 120)
        self._side = os.fdopen(side, "r+b", buffering=0)
        out = os.fdopen(os.dup(side), "w", encoding="utf-8", buffering=1)
        self._streams = {
            "stdin": os.fdopen(os.dup(side), encoding="utf-8"),
            "stdout": out,
            "stderr": out,
        }
        self.mode = termios.tcgetattr(side)
        self._raw = b""

    def take_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From within a test: pytest sets the streams anew when it begins."""
        for name, stream in self._streams.items():
            monkeypatch.setattr(sys, name, stream)
        monkeypatch.setenv("TERM", "xterm-256color")
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name, raising=False)

    def resize(self, rows: int, columns: int) -> None:
        """As a person does with the mouse."""
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """At the keyboard."""
        os.write(self._main, text.encode())

    @property
    def raw(self) -> str:
        """All that was written so far."""
        while select.select([self._main], [], [], 0)[0]:
            self._raw += os.read(self._main, 65536)
        return self._raw.decode(errors="replace")

    @property
    def text(self) -> str:
        """The same without colours."""
        return re.sub(r"\033\[[\d;]*m", "", self.raw)

    def forget(self) -> None:
        """What was written."""
        assert self.text is not None
        self._raw = b""

    def is_as_before(self) -> bool:
        """Whether keys are echoed and lines can be edited again."""
        return termios.tcgetattr(self._side.fileno()) == self.mode

    def close(self) -> None:
        for file in (self._side, *self._streams.values()):
            with suppress(OSError):
                file.close()
        os.close(self._main)
