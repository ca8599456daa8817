"""Input of a chat: edited lines of a terminal, or lines of a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.files import state_folder, write_whole
from edgespec.types.record import MOST_CHARS

try:
    import readline
except ImportError:  # a Python that was built without it
    readline = None  # type: ignore[assignment]

FENCE = '"""'
"""Lines between two fences are one input."""

MOST_LINES = 1000
"""Lines of history that are loaded at most."""

_MOST_BYTES = 4 * MOST_CHARS + 4
"""A bound for a line without an end; a request refuses so long a text anyway."""


def history_file() -> Path:
    """The history file, in the user's state folder."""
    return state_folder() / "chat-history"


class History:
    """Typed lines, kept in a file that only its owner can read.

    A file that cannot be read or written is ignored.
    """

    def __init__(self, path: Path | None) -> None:
        """None: nothing is stored."""
        self._path = path
        self._last = ""
        for line in self._read()[-MOST_LINES:]:
            self._remember(line)

    def add(self, line: str) -> None:
        """Keep a line, unless it repeats the last one."""
        if not line.strip() or line == self._last:
            return
        self._remember(line)
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            with open(os.open(self._path, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            self._path = None

    def _remember(self, line: str) -> None:
        self._last = line
        if readline is not None:
            readline.add_history(line)

    def _read(self) -> list[str]:
        if self._path is None:
            return []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            if len(lines) > 2 * MOST_LINES:
                lines = lines[-MOST_LINES:]
                write_whole(self._path, "\n".join(lines) + "\n", 0o600)
        except OSError:
            return []
        return [line for text in lines if (line := _line_of(text))]


def _line_of(text: str) -> str:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return line if isinstance(line, str) else ""


class LineInput:
    """Reads inputs, of one line or several."""

    def __init__(self, history: History, words: Sequence[str] = ()) -> None:
        """`words`: completions for the tab key at the start of a line."""
        self.is_interactive = sys.stdin is not None and sys.stdin.isatty()
        self._history = history
        self._words = words
        self._number = 0
        self._both = self.is_interactive and sys.stdout.isatty()
        if self._both and readline is not None:
            readline.set_auto_history(False)
            readline.set_completer_delims("")
            readline.set_completer(self._complete)
            readline.parse_and_bind("tab: complete")
            # Pasted lines stay together; Python turns that off.
            readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> str | None:
        """The next input, None after the last.

        A line that ends with a backslash continues in the next one; lines between two FENCEs are
        one input. Raises KeyboardInterrupt for Ctrl-C, and ConfigError if a pipe holds no UTF-8.
        """
        line = self._line("> ")
        if line is None:
            return None
        if line.lstrip().startswith(FENCE):
            return self._fenced(line.lstrip()[len(FENCE) :])
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(". ")
        return "\n".join([*lines, *([] if line is None else [line])])

    def _fenced(self, line: str | None) -> str:
        lines = []
        while line is not None and not line.rstrip().endswith(FENCE):
            lines.append(line)
            line = self._line(". ")
        if line is not None:
            lines.append(line.rstrip()[: -len(FENCE)])
        return "\n".join(lines).strip("\n")

    def _line(self, sign: str) -> str | None:
        return self._typed(sign) if self.is_interactive else self._piped()

    def _typed(self, sign: str) -> str | None:
        if not self._both:  # `edgespec chat > answers.txt`: no prompt sign among the answers
            sys.stderr.write(sign)
            sys.stderr.flush()
        try:
            line = input(_bold(sign) if self._both else "").rstrip("\n")
        except EOFError:
            sys.stderr.write("\n")
            return None
        except UnicodeDecodeError:
            return ""
        self._history.add(line)
        return line

    def _piped(self) -> str | None:
        self._number += 1
        raw = sys.stdin.buffer.readline(_MOST_BYTES) if sys.stdin is not None else b""
        if not raw:
            return None
        try:
            return raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise ConfigError(
                f"line {self._number} of standard input is not valid UTF-8; convert it first, for "
                "instance with iconv"
            ) from None

    def _complete(self, text: str, number: int) -> str | None:
        fitting = [word for word in self._words if text and word.startswith(text)]
        return fitting[number] if number < len(fitting) else None


def _bold(sign: str) -> str:
    """Bold; \\001 and \\002 tell readline which characters have no width."""
    if readline is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return sign
    return f"\001\033[1m\002{sign}\001\033[0m\002"
