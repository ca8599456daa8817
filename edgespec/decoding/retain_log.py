"""Retain log: the retained sets of one request on one ring (FlowSpec §3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgespec.tree.ledger import RetainSet
from edgespec.wire.messages import Retain


class RetainLog:
    """Makes each retained set so that a lost, late or repeated one is harmless: its accepted list
    reaches back to what every stage has acknowledged."""

    def __init__(self, request: int, prefix: int) -> None:
        """`prefix`: rows with smaller ids are committed from the start."""
        self._request = request
        self._prefix = prefix
        self._unacknowledged: list[tuple[int, tuple[int, ...]]] = []
        self.epoch = 0
        """The newest retained set."""
        self.rows: list[int] = []
        """Ids of all guessed rows that became committed, in order."""

    def guessed(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Those of these rows that are no part of the prefix."""
        return tuple(i for i in ids if i >= self._prefix)

    def used(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The target tokens of rows `ids` were used: they are committed. Returns the guessed."""
        guessed = self.guessed(ids)
        self.rows += guessed
        return guessed

    def next(self, watermark: int, passed: Sequence[int], live: Sequence[int]) -> Retain:
        """After rows `passed` became committed: of the ids up to `watermark` keep `live`."""
        self.epoch += 1
        self._unacknowledged.append((self.epoch, self.guessed(passed)))
        accepted = tuple(i for _, ids in self._unacknowledged for i in ids)
        keep = RetainSet(self.epoch, watermark, accepted, frozenset(live))
        return Retain(self._request, keep)

    def last(self, watermark: int) -> Retain:
        """The request is answered: none of its guesses is wanted."""
        self.epoch += 1
        keep = RetainSet(self.epoch, watermark, tuple(self.rows), frozenset())
        return Retain(self._request, keep)

    def acknowledge(self, epoch: int) -> None:
        """Every stage has applied the retained sets up to `epoch`."""
        self._unacknowledged = [entry for entry in self._unacknowledged if entry[0] > epoch]
