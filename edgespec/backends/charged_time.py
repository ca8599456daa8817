"""Charged time: where the time that an effect is charged can be cut, by an abort or by a head."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

SAME_S = 1e-9
"""Times this close are one time: clocks count in binary fractions."""


class ChargedTime:
    """The charged time of one effect, which falls into parts: layers, and a draft's output matrix.

    What a real worker does, an emulated and a simulated one are charged for by this one rule. A
    head that is asked for while a draft runs starts at the draft's next boundary: before its first
    part, or between two. Heads that wait by then run one after the other; with the end of the last
    one the draft goes on, and takes what it had left. In its last part it ends first. No head is
    interrupted. A block that is aborted ends at such a boundary, and one that goes on without some
    requests' rows takes less from there on.

    A stage that is on D0's device shares its time by the same rule (see compute.lane_of): a block
    waits for heads, and drafts wait for blocks, each from its next boundary on.
    """

    def __init__(self, start: float, seconds: float) -> None:
        self.end = start + seconds
        self._seconds = seconds
        self._since, self._done = start, 0.0  # goes on since then, with so much of it done before

    def boundary(self, at: float, parts: Sequence[float]) -> float | None:
        """When the part that runs at `at` ends; None if it is the last. `parts`: their lengths, in
        any unit."""
        total = sum(parts)
        unit = self._seconds / total if total else 0.0
        ends = [unit * end for end in accumulate(parts, initial=0.0)]
        done = self._done + max(at - self._since, 0.0)
        part = bisect_left(ends, done - SAME_S)
        return self._since + ends[part] - self._done if part < len(parts) else None

    def change(self, boundary: float, seconds: float) -> None:
        """From one of the boundaries on, the parts take what they do if all take `seconds`."""
        done = (self._done + boundary - self._since) / self._seconds if self._seconds else 1.0
        self._seconds, self._since, self._done = seconds, boundary, done * seconds
        self.end = boundary + seconds - self._done

    def pause(self, boundary: float) -> None:
        """Heads run from one of the boundaries on."""
        self._done += boundary - self._since
        self._since = boundary

    def go_on(self, at: float) -> None:
        """The last of those heads ended."""
        self._since = at
        self.end = at + self._seconds - self._done
