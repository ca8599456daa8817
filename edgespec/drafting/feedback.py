"""Feedback: what was guessed for each path, until committed tokens tell what was right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from edgespec.drafting.base import TokenPath

Guessed = TypeVar("Guessed")


class Feedback(Generic[Guessed]):
    """What was guessed for the children of paths after one request's context."""

    def __init__(self) -> None:
        self._guessed: dict[tuple[int, ...], Guessed] = {}

    def guessed(self, paths: Iterable[TokenPath], what: Iterable[Guessed]) -> None:
        """Remember the newest guesses of each path."""
        for path, one in zip(paths, what, strict=True):
            self._guessed[tuple(path)] = one

    def committed(self, news: Sequence[int]) -> Iterator[tuple[Guessed, int]]:
        """These tokens became committed: for each that was asked about, what was guessed and the
        token itself. Guesses of other paths are forgotten."""
        news = tuple(news)
        for at, token in enumerate(news):
            if (guessed := self._guessed.get(news[:at])) is not None:
                yield guessed, token
        cut = len(news)
        self._guessed = {
            path[cut:]: guessed for path, guessed in self._guessed.items() if path[:cut] == news
        }
