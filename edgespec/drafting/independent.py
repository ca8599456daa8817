"""Independent draft: any causal language model with the base's tokenizer guesses by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.guess_cache import GuessCache
from edgespec.drafting.ranking import Ranking
from edgespec.machines.features import Features
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource
from edgespec.tree.drafted import Children
from edgespec.verify.sampling import Sampling


class IndependentGuesser:
    """A Guesser (see drafting.base) that runs a whole small model beside the ring.

    Its caches hold the context and the guesses that were run; of these, the ones that turn out
    right are committed, and what lies behind them stays, instead of being computed again.
    """

    name = "independent"
    sources = ("independent",)
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
    ) -> None:
        """Load the draft model. `vocab_size`: tokens that the base model knows; no others are
        guessed (embeddings may be padded to different sizes). Raises ModelError."""
        self._block = Block(source, 0, source.layers, dtype, device)
        self._head = OutputHead(source, dtype, device, share=self._block)
        self._max_rows = int(source.config.max_position_embeddings)
        self._vocab_size = min(vocab_size or self._head.vocab_size, self._head.vocab_size)
        self._ranking = Ranking()
        self._rows: dict[int, GuessCache] = {}
        self._work: list[int] = []

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request; its guesses are ranked with the request's shared noise."""
        self._rows[request] = GuessCache(self._block, self._work)
        self._ranking.open(request, sampling)

    def read(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Take new certain tokens; False if the context is longer than the draft model's, or holds
        a token that the draft model lacks."""
        rows = self._rows[request]
        news = context[len(rows.context) :]
        if len(context) > self._max_rows or not self._knows(news):
            return False
        self._ranking.read(request, news)
        rows.catch_up(news)
        return True

    def guess(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
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
        logits = self._head.logits(rows.hidden_behind(asked))[:, : self._vocab_size]
        found = self._ranking.children(request, asked, logits, positions, width)
        return replace(found, parents=np.array(usable)[found.parents])

    def take_work(self) -> tuple[int, ...]:
        """Rows of each forward pass since the last call, in order, whatever request they served."""
        work = tuple(self._work)
        self._work.clear()  # the caches write to this list
        return work

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""
        self._rows.pop(request, None)
        self._ranking.close(request)

    def _knows(self, tokens: TokenPath) -> bool:
        return max(tokens, default=0) < self._block.vocab_size
