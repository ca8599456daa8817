"""Notes for the user: progress and figures, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

EVERY_S = 1.0
"""Seconds between two lines of progress where there is no terminal to rewrite one."""


class Notes:
    """Standard error, without markup: names and reasons are shown as they are."""

    def __init__(self, verbose: bool = False) -> None:
        """`verbose`: say details too."""
        self.is_verbose = verbose
        self._console = Console(stderr=True, markup=False, highlight=False, emoji=False)

    @property
    def is_terminal(self) -> bool:
        """Whether standard error is a terminal that can rewrite a line."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def say(self, text: str | Text) -> None:
        self._console.print(text, style="dim" if isinstance(text, str) else "", soft_wrap=True)

    def detail(self, text: str) -> None:
        """Say what only someone who looks into the ring wants to know."""
        if self.is_verbose:
            self.say(text)

    def warn(self, text: str) -> None:
        self._console.print(text, style="red", soft_wrap=True)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """A name and a value on each line."""
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        self._console.print(table)

    @contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show progress; yields a function that sets its text ("" hides it)."""
        if not self._console.is_terminal:
            yield self._line_by_line()
            return
        spinner = _Spinner(self._console)
        spinner.update(text)
        try:
            yield spinner.update
        finally:
            spinner.update("")

    def _line_by_line(self) -> Callable[[str], None]:
        last, at = "", float("-inf")

        def update(text: str) -> None:
            nonlocal last, at
            now = time.monotonic()
            if text and text != last and now - at >= EVERY_S:
                last, at = text, now
                self.say(text)

        return update


class TimeLeft:
    """Says how long the rest will take, by how long parts took; what goes before the first one
    (loading) does not count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, int] | None = None

    def __call__(self, done: int, of: int) -> str:
        """After `done` of `of` equal parts, in words; "" while nothing is known."""
        now = self._clock()
        began, before = self._first = self._first or (now, done)
        if not before < done < of:
            return ""
        seconds = (now - began) / (done - before) * (of - done)
        words = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
        return f", about {words} left"


class _Spinner:
    """An animated line on a terminal, which can be hidden."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None

    def update(self, text: str) -> None:
        if not text:
            if self._status is not None:
                self._status.stop()
            self._status = None
        elif self._status is None:
            self._status = self._console.status(Text(text))
            self._status.start()
        else:
            self._status.update(Text(text))
