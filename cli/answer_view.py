"""One answer on the screen: its text as it comes, why it pauses, and which tokens came together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from edgespec.cli.notes import Notes
from edgespec.runtime.client import Answer
from edgespec.types.shown import shown
from edgespec.types.thinking import TAGS, ThoughtReader
from edgespec.wire.client_messages import Finished, Progress, Tokens

_RUN_COLOURS = (("green", "\033[32m"), ("magenta", "\033[35m"))
_DIM, _PLAIN = "\033[2m", "\033[0m"

# ESC D: a line down, which makes one where the screen ends; then the cursor back up.
_ROOM_BELOW = "\033D\033[A"
_SAVE, _RESTORE = "\0337", "\0338"
_LINE_BELOW = "\033[B\r\033[2K"


class AnswerView:
    """Text goes to standard output, on a terminal thoughts before it dimmed; all else goes to
    standard error.

    `text`: the answer so far. `runs`: how many tokens each result committed.
    """

    def __init__(self, notes: Notes, *, hidden: bool = False, speculation: bool = False) -> None:
        """`hidden`: show no text. `speculation`: colour the runs where a terminal can."""
        self._notes = notes
        self._hidden = hidden
        self._colours = speculation and not hidden and _takes_colours()
        self._beneath = _Beneath() if notes.is_terminal and _shows_text() else None
        self._on_terminal = sys.stdout.isatty()
        self._dims = self._on_terminal and not hidden and _takes_colours()
        # What is piped is the text as it is.
        self._thoughts = ThoughtReader(*(TAGS if self._on_terminal else ()))
        self._thinks = False
        self._written = False
        self.text = ""
        self.runs: list[int] = []

    def follow(self, answer: Iterable[Answer]) -> Finished:
        """Show an answer until it ends. The last line of text is ended after an error too."""
        finished: Finished | None = None
        try:
            with self._notes.waiting("waiting for the first token") as waiting:
                for message in answer:
                    match message:
                        case Progress(_, why):
                            self._pause(why, waiting)
                        case Tokens(_, token_ids, text):
                            self.runs.append(len(token_ids))
                            self.text += text
                            for piece in self._thoughts.push(text, thinks=message.thinks):
                                self._go_on(*piece, waiting)
                        case Finished():
                            finished = message
                for piece in self._thoughts.flush():
                    self._go_on(*piece, waiting)
        finally:
            self._end()
        assert finished is not None, "an answer ends with Finished or raises"
        return finished

    def legend(self) -> None:
        if not self._colours or not self.runs:
            return
        each = sum(self.runs) / len(self.runs)
        samples = [Text(f"{name} ", style=name) for name, _ in _RUN_COLOURS]
        rest = (
            f"change with each result that made tokens certain: {len(self.runs)} of them, "
            f"{each:.2f} tokens each"
        )
        self._notes.say(Text.assemble(*samples, (rest, "dim")))

    def _pause(self, why: str, waiting: Callable[[str], None]) -> None:
        why = shown(why)
        if self._written and self._beneath is not None:
            self._beneath.show(why)
        else:
            waiting(why)

    def _go_on(self, text: str, thinks: bool, waiting: Callable[[str], None]) -> None:
        if not text or self._hidden:
            return
        if self._thinks and not thinks:
            text = f"\n\n{text}"
        self._thinks = thinks
        waiting("")
        if self._beneath is not None:
            self._beneath.hide()
        if self._on_terminal:
            text = shown(text)
        if self._beneath is not None:
            self._beneath.wrote(text)
        if thinks and self._dims:
            text = f"{_DIM}{text}{_PLAIN}"
        elif self._colours:
            text = f"{_RUN_COLOURS[len(self.runs) % 2][1]}{text}{_PLAIN}"
        self._written = True
        sys.stdout.write(text)
        sys.stdout.flush()

    def _end(self) -> None:
        if self._written:
            if self._beneath is not None:
                self._beneath.hide()
            sys.stdout.write("\n")
            sys.stdout.flush()


class _Beneath:
    """A remark on the line below the text, which can be erased.

    The cursor stays where the text ends. Text and remarks must be on one terminal.
    """

    def __init__(self) -> None:
        self._shown = False
        self._line = ""  # the text's last line so far

    def wrote(self, text: str) -> None:
        """Keep the last line of the text: `show` must know whether it fills the width."""
        self._line = (self._line + text).rpartition("\n")[2]

    def show(self, remark: str) -> None:
        width = _width()
        room = _ROOM_BELOW
        if self._is_full(width):
            # The terminal wraps a full line at the next character only; that cursor position cannot
            # be saved. Ending the line now looks the same.
            room = "\r\n" + room
            self._line = ""
        text = set_cell_size(" ".join(remark.split()), width - 1).rstrip()
        self._write(f"{room}{_SAVE}{_LINE_BELOW}{_DIM}{text}{_PLAIN}{_RESTORE}")
        self._shown = True

    def hide(self) -> None:
        if self._shown:
            self._write(f"{_SAVE}{_LINE_BELOW}{_RESTORE}")
            self._shown = False

    def _is_full(self, width: int) -> bool:
        length = cell_len(self._line.expandtabs())
        return length > 0 and length % width == 0

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _shows_text() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()


def _takes_colours() -> bool:
    console = Console()
    return console.is_terminal and not console.no_color and console.color_system is not None


def _width() -> int:
    try:
        return max(os.get_terminal_size(sys.stderr.fileno()).columns, 20)
    except OSError:
        return 80
