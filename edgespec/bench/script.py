"""Script: what the models say to some prompts, computed once and looked up by all who play them.

The text of an answer depends on no policy and on no ring, so plain decoding finds it once. Then
stages run the toy model's exact arithmetic (see sim.toy_model) in place of their layers: what comes
back of a row is a number of all that it saw, by which the head finds the place in the text. A row
that saw anything but the text before it finds none, and its token is wrong. What a draft model
guesses depends on the tokens before alone, so it is computed once too, for all policies; the passes
that each of them would have run are counted as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from edgespec.backends.base import Walk
from edgespec.bench.draft_rows import DraftRows, Place
from edgespec.drafting.base import TokenPath
from edgespec.drafting.guess_scores import best_guesses
from edgespec.drafting.independent import GuessCache, JointPasses, WholeModelGuesser
from edgespec.drafting.ranking import Unranked
from edgespec.errors import LocalProtocolError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.joint import CachedPart
from edgespec.model.source import TensorSource
from edgespec.model.tree_attention import tree_mask
from edgespec.sim.toy_model import toy_hidden
from edgespec.tree.drafted import Children, Floats
from edgespec.tree.ledger import IntArray, Rows
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling, choose, path_of
from edgespec.verify.top_logprobs import TopLogprobs

TOGETHER = 16
"""Prompts whose answers are decoded in the same passes."""
NO_TEXT = -1
"""Stands for whatever is not on a known text."""
_CHUNK = 256  # rows of a prompt that run together
_WIDTH = 16  # children of a path that are found at once: policies ask for so many at most


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer, which no end token stops: policies look past it.

    `margins`: of each token of the answer (see verify.sampling.Choice).
    """

    tokens: tuple[int, ...]
    margins: tuple[float, ...]

    @property
    def answer(self) -> range:
        """The positions of the answer."""
        return range(len(self.tokens) - len(self.margins), len(self.tokens))

    def margin(self, position: int) -> float:
        return self.margins[position - len(self.tokens)]


# --- the base -----------------------------------------------------------------------------------


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
    sizes = zip(prompts, limits, strict=True)
    caches = [block.new_cache(len(prompt) + limit) for prompt, limit in sizes]

    def run(parts: Sequence[tuple[int, IntArray]]) -> torch.Tensor:
        """Hidden rows of so many next tokens of each of these texts."""
        before = [np.arange(len(tokens)) + caches[n].length for n, tokens in parts]
        hidden = block.forward_joint(
            torch.from_numpy(np.concatenate([tokens for _, tokens in parts])),
            torch.from_numpy(np.concatenate(before)),
            [
                CachedPart(n, caches[n], tree_mask(caches[n].length, np.tri(len(tokens)) > 0))
                for n, tokens in parts
            ],
        )
        assert hidden is not None, "nothing stops it"
        return hidden

    def take(numbers: Sequence[int], hidden: torch.Tensor) -> None:
        positions = np.array([len(texts[n]) for n in numbers])
        choice = choose(head.logits(hidden).numpy(), positions, sampling)
        taken = zip(numbers, choice.tokens.tolist(), choice.margins.tolist(), strict=True)
        for n, token, margin in taken:
            texts[n].append(token)
            margins[n].append(margin)

    for n, prompt in enumerate(prompts):
        for first in range(0, len(prompt), _CHUNK):
            hidden = run([(n, np.array(prompt[first : first + _CHUNK]))])
        take([n], hidden[-1:])
    while live := [n for n, limit in enumerate(limits) if len(margins[n]) < limit]:
        take(live, run([(n, np.array(texts[n][-1:])) for n in live]))
    return [Text(tuple(t), tuple(m)) for t, m in zip(texts, margins, strict=True)]


class ScriptedHead:
    """A Head (see backends.base) behind stages of the toy model: it looks the next token up."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self._texts: list[Text] = []
        self._places: dict[int, tuple[Text, int]] = {}  # what comes after the row of that number

    def add(self, text: Text) -> None:
        """From now on rows may be of this text too."""
        self._texts.append(text)
        numbers = toy_hidden(text.tokens, self._stages).tolist()
        # Only in front of the answer's tokens: after as much of its prompt another text may go on
        # in another way. Answers that begin alike go on alike.
        self._places.update((numbers[at - 1], (text, at)) for at in text.answer)

    def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
        """Raises LocalProtocolError if log-probabilities are wanted: there are none."""
        if any(walk.top >= 0 for walk in walks):
            raise LocalProtocolError("a scripted head knows no log-probabilities")
        return [(self._along(walk.hidden, walk.rows), None) for walk in walks]

    def score(self, hidden: Tensor, tokens: IntArray, top: int) -> TopLogprobs:
        """Raises LocalProtocolError: there are no log-probabilities."""
        raise LocalProtocolError("a scripted head knows no log-probabilities")

    def _along(self, hidden: Tensor, rows: Rows) -> Choice:
        numbers = np.frombuffer(hidden.data, np.uint64).tolist()
        positions = (rows.positions + 1).tolist()

        def target(row: int) -> int:
            return self._token(numbers[row], positions[row])[0]

        path = path_of(target, rows)
        found = [self._token(numbers[row], positions[row]) for row in path.tolist()]
        tokens, margins = (np.array(column) for column in zip(*found, strict=True))
        return Choice(path, tokens.astype(np.int64), margins)

    def _token(self, number: int, position: int) -> tuple[int, float]:
        """The token at that position and its margin in the text of which a row before it saw all;
        if it saw that of none, another token than the newest text has."""
        text, at = self._places.get(number, (None, NO_TEXT))
        if text is not None and at == position:
            return text.tokens[at], text.margin(at)
        newest = next(one for one in reversed(self._texts) if position in one.answer)
        right = newest.tokens[position]
        return max(right - 1, 0) or 1, newest.margin(position)


# --- the draft ----------------------------------------------------------------------------------


Guessed = tuple[IntArray, Floats]
"""Tokens and log scores of one path's guesses, the best first."""

Scoring = tuple[Sampling, float]
"""The sampling and the draft temperature that guesses are scored with."""


class KnownGuesses:
    """What a whole draft model guesses on some texts and beside them, each place computed once."""

    def __init__(self, source: TensorSource, dtype: str, vocab_size: int) -> None:
        """Load the draft model; it guesses none but the first `vocab_size` tokens."""
        self.block = Block(source, 0, source.layers, dtype)
        self.head = OutputHead(source, dtype, share=self.block)
        self.most_rows = int(source.config.max_position_embeddings)
        self.vocab_size = min(vocab_size, self.head.vocab_size)
        self._texts: dict[int, tuple[int, ...]] = {}
        self._rows = {NO_TEXT: DraftRows(self.block, (), self.most_rows)}
        self._known: dict[int, dict[tuple[Place, Scoring], tuple[int, Guessed]]] = {NO_TEXT: {}}

    def begin(self, number: int, text: tuple[int, ...]) -> None:
        """From now on guesses are asked for along this text, known by a number, too."""
        if number not in self._texts:
            self._texts[number] = text
            self._rows[number] = DraftRows(self.block, text, self.most_rows)
            self._known[number] = {}

    def forget(self, number: int) -> None:
        """No guesses are asked for any more along the text of that number, or hardly any."""
        if self._texts.pop(number, None) is not None:
            del self._known[number], self._rows[number]

    def best(
        self,
        context: Sequence[int],
        paths: Sequence[TokenPath],
        width: int,
        scoring: Scoring,
    ) -> list[Guessed]:
        """Tokens and log scores of the best children of each path (see drafting.ranking)."""
        text = self._text_of(context)
        rows, known = self._rows[text], self._known[text]
        places = rows.places(context, paths)
        missing = [
            place for place in dict.fromkeys(places) if known.get((place, scoring), (0,))[0] < width
        ]
        if missing:
            wide = max(width, _WIDTH)
            for place, guessed in self._guess(rows, missing, wide, scoring):
                known[place, scoring] = wide, guessed
        best = (known[place, scoring][1] for place in places)
        return [(tokens[:width], scores[:width]) for tokens, scores in best]

    def _text_of(self, context: Sequence[int]) -> int:
        """The number of a text that begins so."""
        begin = tuple(context)
        fits = (n for n, text in self._texts.items() if text[: len(begin)] == begin)
        return next(fits, NO_TEXT)

    def _guess(
        self, known: DraftRows, places: list[Place], width: int, scoring: Scoring
    ) -> Iterator[tuple[Place, Guessed]]:
        logits = self.head.logits(known.hidden(places))[:, : self.vocab_size]
        positions = np.array([at + len(path) for at, path in places])
        rows, columns, scores = best_guesses(logits, positions, scoring[0], width, scoring[1])
        ends = np.searchsorted(rows, np.arange(1, len(places)))
        split = zip(np.split(columns, ends), np.split(scores, ends), strict=True)
        return zip(places, split, strict=True)


class ScriptedGuesser(WholeModelGuesser[GuessCache]):
    """An independent draft that looks its guesses up; its passes count as if it had run them."""

    def __init__(self, known: KnownGuesses) -> None:
        nothing = _Nothing()
        passes = JointPasses(cast("Block", nothing), self.ran, self.between_layers)
        super().__init__(
            "independent",
            lambda request: GuessCache(request, passes),
            cast("OutputHead", nothing),
            known=known.block.vocab_size,
            most_rows=known.most_rows,
            vocab_size=known.vocab_size,
        )
        self._guesses = known

    def _rank(self, asked: Sequence[Unranked]) -> list[Children]:
        found, product = [], sum(len(one.paths) for one in asked)
        for one in asked:
            found.append(self._looked_up(one, product))
            product = 0
        return found

    def _looked_up(self, one: Unranked, product: int) -> Children:
        request, paths = one.request, one.paths
        scoring = self._ranking.scoring(request)
        found = self._guesses.best(self._rows[request].context, paths, one.width, scoring)
        parents = np.repeat(np.arange(len(found)), [len(tokens) for tokens, _ in found])
        tokens, scores = (np.concatenate(column) for column in zip(*found, strict=True))
        return self._ranking.ranked(request, paths, one.positions, parents, tokens, scores, product)


class _Nothing:
    """In the place of a draft's block, of its cache, and of its output matrix."""

    device = torch.device("cpu")
    vocab_size = 1 << 31

    def new_cache(self, reserve: int) -> _Nothing:
        return self

    def gather(self, start: int, order: IntArray) -> None:
        """There is nothing to move."""

    def forward_joint(self, tokens: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """As many rows, which hold nothing."""
        return torch.empty(len(tokens), 0)
