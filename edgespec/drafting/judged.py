"""Judged guesses: what was said about each path, until committed tokens say what was right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from edgespec.drafting.base import TokenPath

Said = TypeVar("Said")


class Judged(Generic[Said]):
    """What was said about the children of paths behind one request's context."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, ...], Said] = {}

    def said(self, paths: Iterable[TokenPath], what: Iterable[Said]) -> None:
        """Remember the newest word on each path."""
        for path, one in zip(paths, what, strict=True):
            self._said[tuple(path)] = one

    def committed(self, news: Sequence[int]) -> Iterator[tuple[Said, int]]:
        """These tokens became committed: what was said before each of them that had been asked
        about, with the token itself. What lies beside them is forgotten."""
        news = tuple(news)
        for at, token in enumerate(news):
            if (said := self._said.get(news[:at])) is not None:
                yield said, token
        cut = len(news)
        self._said = {path[cut:]: said for path, said in self._said.items() if path[:cut] == news}
