"""Script: what the models say to some prompts, computed once and looked up by all who play them.

The text of an answer depends on no policy and on no ring, so plain decoding finds it once. Then
stages run the toy model's exact arithmetic (see sim.toy_model) in place of their layers: what comes
back of a row is a number of all that it saw, by which the head finds the place in the text. A row
that saw anything but the text before it finds none, and its token is wrong. What a draft model
guesses depends on the tokens before alone, so it is computed once too, for all policies; the passes
that each of them would have run are counted as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.guess_scores import best_guesses
from edgespec.drafting.independent import GuessCache
from edgespec.drafting.ranking import Guessed
from edgespec.drafting.whole_model import WholeModelGuesser
from edgespec.errors import LocalProtocolError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource
from edgespec.model.tree_attention import tree_mask
from edgespec.sim.toy_model import toy_hidden
from edgespec.tree.drafted import Children
from edgespec.tree.ledger import IntArray, Rows
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling, choose, path_of
from edgespec.verify.top_logprobs import TopLogprobs

TOGETHER = 8
"""Prompts whose answers are decoded in the same passes."""
_CHUNK = 256  # rows of a prompt that run together
_WIDTH = 16  # children of a path that are found at once: policies ask for so many at most


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer, which no end token stops: policies look past it.

    `margins`: of each token of the answer (see verify.sampling.Choice).
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]

    def margin(self, position: int) -> float:
        return self.margins[position - len(self.tokens)]


# --- the base -----------------------------------------------------------------------------------


class _Batch:
    """Several texts in one cache; a row sees the rows of its own text up to itself."""

    def __init__(self, block: Block, reserve: int) -> None:
        self._block = block
        self._cache = block.new_cache(reserve)
        self._texts = self._positions = np.zeros(0, np.int64)  # of each slot

    def run(self, texts: IntArray, tokens: IntArray, positions: IntArray) -> torch.Tensor:
        """Hidden rows [R, H] of these tokens [R], which lie in these texts at these positions."""
        self._texts = np.concatenate([self._texts, texts])
        self._positions = np.concatenate([self._positions, positions])
        sees = self._texts == texts[:, None]
        sees &= self._positions <= positions[:, None]
        hidden = self._block.forward(
            torch.from_numpy(tokens), torch.from_numpy(positions), self._cache, tree_mask(0, sees)
        )
        assert hidden is not None, "nothing stops it"
        return hidden


def plain_texts(
    block: Block,
    head: OutputHead,
    prompts: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    sampling: Sampling,
) -> list[Text]:
    """Each prompt with its answer of so many tokens, by plain decoding, a few prompts together.

    `block`: all layers of the model. A row of a batch is computed as it would be alone but for the
    order of sums, so this is for float64, where that decides no token.
    """
    texts = [list(prompt) for prompt in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    batch = _Batch(block, sum(map(len, prompts)) + sum(limits))

    def take(numbers: Sequence[int], hidden: torch.Tensor) -> None:
        positions = np.array([len(texts[n]) for n in numbers])
        choice = choose(head.logits(hidden).numpy(), positions, sampling)
        taken = zip(numbers, choice.tokens.tolist(), choice.margins.tolist(), strict=True)
        for n, token, margin in taken:
            texts[n].append(token)
            margins[n].append(margin)

    for n, prompt in enumerate(prompts):
        for first in range(0, len(prompt), _CHUNK):
            part = np.array(prompt[first : first + _CHUNK])
            hidden = batch.run(np.full(len(part), n), part, first + np.arange(len(part)))
        take([n], hidden[-1:])
    while live := [n for n, limit in enumerate(limits) if len(margins[n]) < limit]:
        newest = np.array([texts[n][-1] for n in live])
        ends = np.array([len(texts[n]) - 1 for n in live])
        take(live, batch.run(np.array(live), newest, ends))
    return [Text(tuple(t), tuple(m)) for t, m in zip(texts, margins, strict=True)]


class ScriptedHead:
    """A Head (see backends.base) behind stages of the toy model: it looks the next token up."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._text = Text((), ())
        self._places: dict[int, int] = {}

    def begin(self, text: Text) -> None:
        """From now on rows are of this text."""
        self._text = text
        numbers = toy_hidden(text.tokens, self._stages).tolist()
        self._places = {number: position for position, number in enumerate(numbers)}

    def choose(
        self, hidden: Tensor, rows: Rows, sampling: Sampling, top: int = -1
    ) -> tuple[Choice, TopLogprobs | None]:
        """Raises LocalProtocolError if log-probabilities are wanted: there are none."""
        if top >= 0:
            raise LocalProtocolError("a scripted head knows no log-probabilities")
        numbers = np.frombuffer(hidden.data, np.uint64).tolist()
        positions = (rows.positions + 1).tolist()

        def target(row: int) -> int:
            return self._token(numbers[row], positions[row])

        path = path_of(target, rows)
        taken = [target(row) for row in path.tolist()]
        margins = [self._text.margin(positions[row]) for row in path.tolist()]
        return Choice(path, np.array(taken, np.int64), np.array(margins)), None

    def _token(self, number: int, position: int) -> int:
        """The text's token at that position, if a row before it saw the text; else another one."""
        right = self._text.tokens[position]
        return right if self._places.get(number) == position - 1 else max(right - 1, 0) or 1


# --- the draft ----------------------------------------------------------------------------------


class KnownGuesses:
    """What a whole draft model guesses on one text and beside it, each place computed once."""

    def __init__(self, source: TensorSource, dtype: str, vocab_size: int) -> None:
        """Load the draft model; it guesses none but the first `vocab_size` tokens."""
        self.block = Block(source, 0, source.layers, dtype)
        self.head = OutputHead(source, dtype, share=self.block)
        self.most_rows = int(source.config.max_position_embeddings)
        self.vocab_size = min(vocab_size, self.head.vocab_size)
        self._sampling = Sampling()
        self.begin((), self._sampling)

    def begin(self, text: tuple[int, ...], sampling: Sampling) -> None:
        """From now on guesses are asked for along this text; forget those of another one."""
        self._text, self._sampling = text, sampling
        self._known: dict[object, tuple[int, Guessed]] = {}
        self._cache = self._new_cache()

    def best(
        self,
        context: Sequence[int],
        paths: Sequence[TokenPath],
        width: int,
        draft_temperature: float | None,
    ) -> list[Guessed]:
        """Tokens and log scores of the best children of each path (see drafting.ranking)."""
        places = [(*self._place(context, path), draft_temperature) for path in paths]
        missing = {
            place: path
            for place, path in zip(places, paths, strict=True)
            if place not in self._known or self._known[place][0] < width
        }
        if missing:
            found = self._guess(context, list(missing.values()), width, draft_temperature)
            self._known.update(zip(missing, found, strict=True))
        known = (self._known[place][1] for place in places)
        return [(tokens[:width], scores[:width]) for tokens, scores in known]

    def _place(self, context: Sequence[int], path: TokenPath) -> tuple[int, tuple[int, ...]]:
        """The same for all ways to say it: where the text is left, and what follows there."""
        text, size = self._text, len(context)
        if text[:size] != tuple(context):
            return -1, (*context, *path)
        at = 0
        while at < len(path) and size + at < len(text) and text[size + at] == path[at]:
            at += 1
        return size + at, tuple(path[at:])

    def _guess(
        self,
        context: Sequence[int],
        paths: list[TokenPath],
        width: int,
        draft_temperature: float | None,
    ) -> list[tuple[int, Guessed]]:
        wide = max(width, _WIDTH)
        self._read(list(context))
        logits = self.head.logits(self._cache.hidden_behind(paths))[:, : self.vocab_size]
        positions = len(context) + np.array([len(path) for path in paths])
        rows, columns, scores = best_guesses(
            logits, positions, self._sampling, wide, draft_temperature
        )
        ends = np.searchsorted(rows, np.arange(1, len(paths)))
        split = zip(np.split(columns, ends), np.split(scores, ends), strict=True)
        return [(wide, guessed) for guessed in split]

    def _new_cache(self) -> GuessCache:
        return GuessCache(self.block, ran=lambda rows: None, between_layers=lambda: False)

    def _read(self, context: list[int]) -> None:
        """Have the cache end with this context, from as much of it as is there."""
        cache = self._cache
        if len(cache.context) > len(context) > 1 and cache.context[: len(context)] == context:
            cache.rewind(len(context) - 1)  # the last one runs again, as its hidden row is gone
        elif context[: len(cache.context)] != cache.context:
            self._cache = cache = self._new_cache()
        cache.catch_up(context[len(cache.context) :])


class ScriptedGuesser(WholeModelGuesser[GuessCache]):
    """An independent draft that looks its guesses up; its passes count as if it had run them."""

    def __init__(self, known: KnownGuesses) -> None:
        nothing = _Nothing()
        super().__init__(
            "independent",
            lambda: GuessCache(cast("Block", nothing), self.ran, self.between_layers),
            cast("OutputHead", nothing),
            known=known.block.vocab_size,
            most_rows=known.most_rows,
            vocab_size=known.vocab_size,
        )
        self._guesses = known

    def _ranked(
        self,
        request: int,
        paths: Sequence[TokenPath],
        hidden: torch.Tensor,
        positions: IntArray,
        width: int,
    ) -> Children:
        heat = self._ranking.draft_temperature(request)
        found = self._guesses.best(self._rows[request].context, paths, width, heat)
        parents = np.repeat(np.arange(len(found)), [len(tokens) for tokens, _ in found])
        tokens, scores = (np.concatenate(column) for column in zip(*found, strict=True))
        return self._ranking.ranked(request, paths, positions, parents, tokens, scores)


class _Nothing:
    """In the place of a draft's block, of its cache, and of its output matrix."""

    device = torch.device("cpu")
    vocab_size = 1 << 31

    def new_cache(self, reserve: int) -> _Nothing:
        return self

    def gather(self, start: int, order: IntArray) -> None:
        """There is nothing to move."""

    def forward(self, tokens: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """As many rows, which hold nothing."""
        return torch.empty(len(tokens), 0)
