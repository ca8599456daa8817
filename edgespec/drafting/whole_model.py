"""Whole models: what guessers have in common that run a whole small model on text and guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.launches import Launches
from edgespec.drafting.ranking import Ranking, Unranked
from edgespec.drafting.steps import Steps, call
from edgespec.model.ends import OutputHead
from edgespec.tree.drafted import Children
from edgespec.types.features import Features
from edgespec.verify.sampling import Sampling


class CachedRows(Protocol):
    """What such a model ran for one request: committed tokens, and guesses after them."""

    request: int
    context: list[int]

    def catch_up(self, news: TokenPath) -> Steps[None]:
        """Take new committed tokens."""

    def rewind(self, rows: int) -> None:
        """Keep what was run for the first `rows` tokens at most; more come before any guess."""

    def copy(self: RowsT, other: RowsT, rows: int) -> None:
        """Begin with what another request ran for its first `rows` tokens at most."""

    def hidden_behind(self, paths: Sequence[TokenPath]) -> Steps[torch.Tensor]:
        """The hidden rows [n, H] of the last tokens of `paths`; the empty path is the context's."""


RowsT = TypeVar("RowsT", bound=CachedRows)


class WholeModelGuesser(Guesser, Generic[RowsT]):
    """A Guesser that runs a whole model; how it runs rows is up to `new_rows`."""

    def __init__(
        self,
        name: str,
        new_rows: Callable[[int], RowsT],
        head: OutputHead,
        *,
        known: int,
        most_rows: int,
        vocab_size: int | None,
    ) -> None:
        """`new_rows` begins a request, given its number. `head`: the draft model's own; `known`:
        tokens that it can read; `most_rows`: its context. `vocab_size`: tokens that the base model
        knows; no others are guessed (embeddings may be padded to different sizes)."""
        super().__init__(name)
        self._new_rows, self._head = new_rows, head
        self._known, self._max_rows = known, most_rows
        self._vocab_size = min(vocab_size or head.vocab_size, head.vocab_size)
        self._launches = Launches(head.device)
        self._ranking = Ranking(self.ranked, self.allowed)
        self._rows: dict[int, RowsT] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        self._rows[request] = self._new_rows(request)
        self._ranking.open(request, sampling)

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        if base not in self._rows:
            return
        if ends:
            own = self._rows[request] = self._rows.pop(base)
            own.request = request
            own.rewind(rows)
        else:
            self._rows[request].copy(self._rows[base], rows)

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Take new committed tokens; False if the context is longer than the draft model's, or
        holds a token that the draft model lacks."""
        return (yield from self._read(request, context, len(context)))

    def reading_part(self, request: int, context: Sequence[int], rows: int) -> Steps[None]:
        yield from self._read(request, context, rows)

    def _read(self, request: int, context: Sequence[int], end: int) -> Steps[bool]:
        """Take the new ones of the first `end` tokens, if all can be read."""
        rows = self._rows[request]
        known = len(rows.context)
        if len(context) > self._max_rows or not self._knows(context[known:]):
            return False
        news = context[known:end]
        self._ranking.read(request, news)
        yield from rows.catch_up(news)
        return True

    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Steps[Children]:
        """The best children of each path (see drafting.base); none for one that is longer than the
        draft model's context, or has a token that the draft model lacks."""
        rows = self._rows[request]
        room = self._max_rows - len(rows.context)
        usable = [
            index for index, path in enumerate(paths) if len(path) <= room and self._knows(path)
        ]
        if not usable:
            return Children.none()
        asked = [paths[index] for index in usable]
        positions = len(rows.context) + np.array([len(path) for path in asked])
        hidden = yield from rows.hidden_behind(asked)
        wanted = Unranked(request, asked, hidden, positions, width)
        found = yield from call(self._rank, wanted, late=True)
        return replace(found, parents=np.array(usable)[found.parents])

    def _rank(self, asked: Sequence[Unranked]) -> list[Children]:
        """The best children of each request's paths."""
        self.between_layers()
        return self._ranking.together(asked, self._logits)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden)[:, : self._vocab_size]

    def close(self, request: int) -> None:
        self._rows.pop(request, None)
        self._ranking.close(request)

    def between_layers(self) -> bool:
        self._launches.keep_near()
        return super().between_layers()

    def _knows(self, tokens: TokenPath) -> bool:
        return max(tokens, default=0) < self._known
