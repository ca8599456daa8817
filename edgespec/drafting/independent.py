"""Independent draft: any causal language model with the base's tokenizer grows the tree itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from edgespec.drafting.guess_cache import GuessCache, TokenPath
from edgespec.errors import LocalProtocolError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree
from edgespec.tree.ledger import IntArray
from edgespec.verify.sampling import Sampling, guess_log_scores

Floats = npt.NDArray[np.float64]


@dataclass(slots=True)
class _Tree:
    """The tree that grows below one root. Guesses are numbered from 0 in topological order."""

    root_position: int
    parents: list[IntArray] = field(default_factory=list)
    tokens: list[IntArray] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)
    paths: list[TokenPath] = field(default_factory=list)  # of the last level's guesses
    size: int = 0

    @property
    def levels(self) -> int:
        return len(self.tokens)

    def frontier(self, width: int) -> tuple[list[TokenPath], IntArray, Floats]:
        """The `width` best guesses of the last level, in order: paths, indices, scores.

        Ties go to the smaller index. Before the first level it is the root alone.
        """
        if not self.levels:
            return [()], np.array([FROM_ROOT]), np.zeros(1)
        newest = self.scores[-1]
        best = np.sort(np.argsort(-newest, kind="stable")[:width])
        paths = [self.paths[index] for index in best.tolist()]
        return paths, best + (self.size - len(newest)), newest[best]

    def add(
        self, parents: IntArray, tokens: IntArray, scores: Floats, paths: list[TokenPath]
    ) -> None:
        """Add one level of guesses."""
        self.parents.append(parents)
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.paths = paths
        self.size += len(tokens)

    def drafted(self) -> DraftedTree:
        """All guesses so far."""
        if not self.levels:
            return DraftedTree.empty()
        return DraftedTree(
            np.concatenate(self.parents), np.concatenate(self.tokens), np.concatenate(self.scores)
        )


@dataclass(slots=True)
class _Request:
    """One request: the rows that were run for it, and the tree of the last refresh."""

    sampling: Sampling
    rows: GuessCache
    tree: _Tree | None = None


class IndependentDraft:
    """A DraftSource (see drafting.base) that runs a whole small model beside the ring.

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

    def refresh(self, request: int, context: Sequence[int], depth: int, width: int) -> DraftedTree:
        """Grow a fresh tree below the last token of `context` (see drafting.base).

        Empty if the context is longer than the draft model's, or holds a token that the draft
        model lacks. Raises LocalProtocolError if the request is not open or its context did not
        grow from the last one.
        """
        state = self._state(request)
        state.tree = None
        if not self._catch_up(request, state, context):
            return DraftedTree.empty()
        state.tree = _Tree(root_position=len(context) - 1)
        return self._grow(state, state.tree, depth, width)

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        """Grow the last tree by `levels` more; return all of it. Empty if there is none.

        A tree whose root is not the last token any more, as `expand` was given a longer context,
        grows no further.
        """
        state = self._state(request)
        if state.tree is None:
            return DraftedTree.empty()
        return self._grow(state, state.tree, levels, width)

    def expand(
        self, request: int, context: Sequence[int], paths: Sequence[TokenPath], width: int
    ) -> Children:
        """Guess the `width` best children of each path behind `context` (see drafting.base).

        There are none where `refresh` would guess nothing, nor for a path with a token that the
        draft model lacks. Raises as `refresh` does.
        """
        state = self._state(request)
        usable: list[int] = []
        if self._catch_up(request, state, context) and width > 0:
            room = self._max_rows - len(context)
            usable = [
                index for index, path in enumerate(paths) if len(path) <= room and self._knows(path)
            ]
        if not usable:
            nothing = np.zeros(0, np.int64)
            return Children(nothing, nothing, np.zeros(0))
        rows, tokens, scores = self._guess(state, [paths[index] for index in usable], width)
        return Children(np.array(usable)[rows], tokens, scores)

    def take_work(self) -> tuple[int, ...]:
        """Rows of each forward pass since the last call, in order, whatever request they served."""
        work = tuple(self._work)
        self._work.clear()  # the caches write to this list
        return work

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""
        self._requests.pop(request, None)

    def _state(self, request: int) -> _Request:
        if request not in self._requests:
            raise LocalProtocolError(f"request {request} is not open on this draft source")
        return self._requests[request]

    def _catch_up(self, request: int, state: _Request, context: Sequence[int]) -> bool:
        """Make `context` the certain tokens; False, changing nothing, if the model cannot."""
        known = len(state.rows.context)
        if not context or list(context[:known]) != state.rows.context:
            raise LocalProtocolError(f"the context of request {request} did not only grow")
        news = [int(token) for token in context[known:]]
        if len(context) > self._max_rows or not self._knows(news):
            return False
        state.rows.catch_up(news)
        return True

    def _knows(self, tokens: TokenPath) -> bool:
        return max(tokens, default=0) < self._block.vocab_size

    def _grow(self, state: _Request, tree: _Tree, levels: int, width: int) -> DraftedTree:
        """Grow `levels` levels, or as many as the draft model's context has room for."""
        if tree.root_position != len(state.rows.context) - 1:
            return tree.drafted()
        for _ in range(levels if width > 0 else 0):
            paths, indices, above = tree.frontier(width)
            # The position of the rows whose children come now:
            if not paths or tree.root_position + tree.levels >= self._max_rows:
                break
            rows, tokens, scores = self._guess(state, paths, width)
            longer: list[TokenPath] = [
                (*paths[row], token)
                for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)
            ]
            tree.add(indices[rows], tokens, above[rows] + scores, longer)
        return tree.drafted()

    def _guess(
        self, state: _Request, paths: Sequence[TokenPath], width: int
    ) -> tuple[IntArray, IntArray, Floats]:
        """The `width` best children of each path: indices of paths, tokens and own scores."""
        hidden = state.rows.hidden_behind(paths)
        positions = len(state.rows.context) + np.array([len(path) for path in paths])
        logits = self._head.logits(hidden)[:, : self._vocab_size]
        # A log score is never above 0, up to rounding: a child must not outrank its parent.
        scores = np.minimum(guess_log_scores(logits, positions, state.sampling), 0.0)
        rows, tokens = best_columns(scores, width)
        return rows, tokens, scores[rows, tokens]


def best_columns(scores: Floats, width: int) -> tuple[IntArray, IntArray]:
    """The `width` best finite columns of each row of `scores` [R, V], best first.

    Returns row and column indices, rows in order. Ties go to the lower column: logits of few bits
    often tie, and a plain top-k then takes any of them.
    """
    width = min(width, scores.shape[1])
    limits = torch.topk(torch.from_numpy(scores), width, dim=1, sorted=False).values.numpy()
    # Flat, as numpy takes 20 times longer to find the few marks of a wide array by row and column.
    marks = np.flatnonzero(scores >= limits.min(axis=1, keepdims=True))
    rows, columns = np.divmod(marks, scores.shape[1])
    values = scores[rows, columns]
    order = np.lexsort((columns, -values, rows))
    rows, columns, values = rows[order], columns[order], values[order]
    # Rank within its row: how far it lies behind the first entry of that row.
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = (rank < width) & np.isfinite(values)
    return rows[kept], columns[kept]
