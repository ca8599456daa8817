"""Find stop strings in streamed text, and hold back whatever could still become one."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.errors import ConfigError


def _failure_table(pattern: str) -> list[int]:
    """Knuth, Morris and Pratt: after i+1 matched characters, the length to fall back to."""
    table = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[index] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[index] == pattern[matched]:
            matched += 1
        table[index] = matched
    return table


class StopScanner:
    """Lets text through up to the first stop string, however the text is cut into pieces.

    The stop is the stop string that is *completed* first (of several completed by the same
    character, the one that began first): exactly what reading one character at a time would find.
    So the outcome depends on the text alone, and no finished stop ever waits for a longer one. With
    one stop string, or none that lies inside another, this is where ``str.find`` would put it.

    Text is counted in code points and compared exactly, without normalisation. Cost: linear in the
    text for each stop string, whatever the strings are.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """`stops`: the stop strings, possibly none. Raises ConfigError for one that is empty or not
        a string, and for a bare string in place of the sequence."""
        if isinstance(stops, str):
            raise ConfigError(f"stop must be a list of strings, not the one string {stops!r}")
        for index, stop in enumerate(stops):
            if not isinstance(stop, str):
                raise ConfigError(
                    f"stop[{index}] must be a string, not {type(stop).__name__} ({stop!r})"
                )
            if not stop:
                raise ConfigError(
                    f"stop[{index}] is empty: every text contains it; leave it out to have no stop"
                )
        self._stops = tuple(dict.fromkeys(stops))
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped = False
        """Whether a stop string has been completed."""
        self.found = ""
        """That stop string."""

    def push(self, text: str) -> tuple[str, bool]:
        """Add `text`; return what may be shown now, and whether a stop string has been completed.

        When it has, everything shown so far ends just before the stop string, the rest is dropped,
        and every later push returns ``("", True)``.
        """
        if self.stopped:
            return "", True
        if not self._stops:
            return text, False
        pending = self._held + text
        for index in range(len(self._held), len(pending)):
            completed = self._advance(pending[index])
            if completed:
                self.stopped = True
                self._held = ""
                self.found = pending[index + 1 - completed : index + 1]
                return pending[: index + 1 - completed], True
        safe = len(pending) - max(self._matched)
        self._held = pending[safe:]
        return pending[:safe], False

    def flush(self) -> str:
        """The text ended: what was held back, to be shown now; nothing if a stop was found.

        The scanner is then as new, save that a stop already found stays found.
        """
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> int:
        """Read one character; the length of the longest stop string that it completes, or 0."""
        completed = 0
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and character != stop[matched]:
                matched = self._tables[index][matched - 1]
            if character == stop[matched]:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                completed = max(completed, matched)
        return completed
