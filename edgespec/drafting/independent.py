"""Independent draft: any causal language model with the base's tokenizer guesses by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgespec.drafting.base import TokenPath
from edgespec.drafting.guess_cache import GuessCache
from edgespec.drafting.ranking import best_columns
from edgespec.machines.features import Features
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource
from edgespec.tree.drafted import Children
from edgespec.verify.sampling import Sampling, guess_log_scores


@dataclass(slots=True)
class _Request:
    """One request: how it samples, and the rows that were run for it."""

    sampling: Sampling
    rows: GuessCache


class IndependentGuesser:
    """A Guesser (see drafting.base) that runs a whole small model beside the ring.

    Its caches hold the context and the guesses that were run; of these, the ones that turn out
    right are committed, and what lies behind them stays, instead of being computed again.
    """

    name = "independent"
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
        self._requests: dict[int, _Request] = {}
        self._work: list[int] = []

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request; its guesses are ranked with the request's shared noise."""
        self._requests[request] = _Request(sampling, GuessCache(self._block, self._work))

    def read(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Take new certain tokens; False if the context is longer than the draft model's, or holds
        a token that the draft model lacks."""
        rows = self._requests[request].rows
        news = context[len(rows.context) :]
        if len(context) > self._max_rows or not self._knows(news):
            return False
        rows.catch_up(news)
        return True

    def guess(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """The best children of each path (see drafting.base); none for one that is longer than the
        draft model's context, or has a token that the draft model lacks."""
        state = self._requests[request]
        room = self._max_rows - len(state.rows.context)
        usable = [
            index for index, path in enumerate(paths) if len(path) <= room and self._knows(path)
        ]
        if not usable:
            return Children.none()
        asked = [paths[index] for index in usable]
        hidden = state.rows.hidden_behind(asked)
        positions = len(state.rows.context) + np.array([len(path) for path in asked])
        logits = self._head.logits(hidden)[:, : self._vocab_size]
        # A log score is never above 0, up to rounding: a child must not outrank its parent.
        scores = np.minimum(guess_log_scores(logits, positions, state.sampling), 0.0)
        rows, tokens = best_columns(scores, width)
        return Children(np.array(usable)[rows], tokens, scores[rows, tokens])

    def take_work(self) -> tuple[int, ...]:
        """Rows of each forward pass since the last call, in order, whatever request they served."""
        work = tuple(self._work)
        self._work.clear()  # the caches write to this list
        return work

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""
        self._requests.pop(request, None)

    def _knows(self, tokens: TokenPath) -> bool:
        return max(tokens, default=0) < self._block.vocab_size
