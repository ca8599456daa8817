"""Independent draft: any causal language model with the base's tokenizer grows the tree itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from edgespec.errors import LocalProtocolError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.loader import Checkpoint
from edgespec.model.tree_attention import tree_mask
from edgespec.tree.drafted import FROM_ROOT, DraftedTree
from edgespec.tree.ledger import BoolArray, IntArray, RetainSet, RowLedger, Rows
from edgespec.verify.sampling import Sampling, guess_log_scores

Floats = npt.NDArray[np.float64]

_CHUNK = 256  # rows of a prefill that run together: bounds the mask and the activations
_RESERVE = 512  # rows that a new cache has room for; it doubles when they are used up


@dataclass(slots=True)
class _Tree:
    """The tree that grows below one root. Guesses are numbered from 0 in topological order."""

    root_position: int
    parents: list[IntArray] = field(default_factory=list)
    tokens: list[IntArray] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)
    size: int = 0

    def add(self, parents: IntArray, tokens: IntArray, scores: Floats) -> None:
        """Add one level of guesses."""
        self.parents.append(parents)
        self.tokens.append(tokens)
        self.scores.append(scores)
        self.size += len(tokens)

    @property
    def levels(self) -> int:
        return len(self.tokens)

    def drafted(self) -> DraftedTree:
        """All guesses so far."""
        if not self.levels:
            return DraftedTree.empty()
        return DraftedTree(
            np.concatenate(self.parents), np.concatenate(self.tokens), np.concatenate(self.scores)
        )


@dataclass(slots=True)
class _Request:
    """One request: its cache, whose rows the ledger knows, and the tree of the last refresh."""

    sampling: Sampling
    cache: TwoRegionCache
    ledger: RowLedger = field(default_factory=RowLedger)
    context: list[int] = field(default_factory=list)  # tokens of the committed rows
    next_id: int = 0
    hidden: torch.Tensor | None = None  # [1, H]: the last committed row, behind the final norm
    # Guesses that were run, so have a row in the cache:
    row_of_guess: dict[int, int] = field(default_factory=dict)
    child_rows: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent row, token)
    row_hidden: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)  # rows, offset
    tree: _Tree | None = None

    def take_ids(self, count: int) -> IntArray:
        """The next `count` row ids."""
        first = self.next_id
        self.next_id += count
        return np.arange(first, first + count, dtype=np.int64)

    def forget_rows(self) -> None:
        """Forget the guesses' rows, once the ledger has."""
        self.row_of_guess, self.child_rows, self.row_hidden = {}, {}, {}


class IndependentDraft:
    """A DraftSource (see drafting.base) that runs a whole small model beside the ring.

    Its cache holds the context and the guesses that were run; of these, the ones that turn out
    right are committed instead of computed again.
    """

    name = "independent"
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
    ) -> None:
        """Load the draft model. `vocab_size`: tokens that the base model knows; no others are
        guessed (embeddings may be padded to different sizes). Raises ModelError."""
        self._block = Block(checkpoint, 0, checkpoint.layers, dtype, device)
        self._head = OutputHead(checkpoint, dtype, device, share=self._block)
        self._max_rows = int(checkpoint.config.max_position_embeddings)
        self._vocab_size = min(vocab_size or self._head.vocab_size, self._head.vocab_size)
        self._requests: dict[int, _Request] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request; its guesses are ranked with the request's shared noise."""
        self._requests[request] = _Request(sampling, self._block.new_cache(_RESERVE))

    def refresh(self, request: int, context: Sequence[int], depth: int, width: int) -> DraftedTree:
        """Grow a fresh tree below the last token of `context` (see drafting.base).

        Empty if the context is longer than the draft model's, or holds a token that the draft
        model lacks. Raises LocalProtocolError if the request is not open or its context did not
        grow from the last one.
        """
        state = self._state(request)
        known = len(state.context)
        if not context or list(context[:known]) != state.context:
            raise LocalProtocolError(f"the context of request {request} did not only grow")
        news = [int(token) for token in context[known:]]
        if len(context) > self._max_rows or max(news, default=0) >= self._block.vocab_size:
            state.tree = None
            return DraftedTree.empty()
        self._catch_up(state, news)
        state.tree = _Tree(root_position=len(context) - 1)
        return self._grow(state, state.tree, depth, width)

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        """Grow the last tree by `levels` more; return all of it. Empty if there is none."""
        state = self._state(request)
        if state.tree is None:
            return DraftedTree.empty()
        return self._grow(state, state.tree, levels, width)

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""
        self._requests.pop(request, None)

    def _state(self, request: int) -> _Request:
        if request not in self._requests:
            raise LocalProtocolError(f"request {request} is not open on this draft source")
        return self._requests[request]

    def _catch_up(self, state: _Request, news: list[int]) -> None:
        """Commit new certain tokens: from the cached guesses while they match, the rest by
        running it. Drops all other guesses' rows."""
        accepted: list[int] = []
        row = state.ledger.last_committed
        while len(accepted) < len(news) and (row, news[len(accepted)]) in state.child_rows:
            row = state.child_rows[row, news[len(accepted)]]
            accepted.append(row)
        start = state.ledger.committed
        keep = RetainSet(state.ledger.epoch + 1, state.next_id - 1, tuple(accepted), frozenset())
        order = state.ledger.retain(keep)
        if order is not None:
            state.cache.gather(start, order)
        if accepted:
            rows_hidden, offset = state.row_hidden[row]
            state.hidden = rows_hidden[offset : offset + 1]
            state.context += news[: len(accepted)]
        state.forget_rows()
        for begin in range(len(accepted), len(news), _CHUNK):
            self._commit(state, news[begin : begin + _CHUNK])

    def _commit(self, state: _Request, tokens: list[int]) -> None:
        """Run certain tokens behind the committed rows."""
        ids, before = state.take_ids(len(tokens)), state.ledger.committed
        parents = np.concatenate(([state.ledger.last_committed], ids[:-1]))
        positions = np.arange(before, before + len(tokens))
        rows = Rows(ids, parents, np.asarray(tokens, np.int64), positions)
        state.ledger.commit(rows)
        hidden = self._run(state, rows, before, np.tri(len(tokens), dtype=np.bool_))
        state.context += tokens
        state.hidden = hidden[-1:].clone()  # not a view, which would keep the whole chunk

    def _run(self, state: _Request, rows: Rows, committed: int, sees: BoolArray) -> torch.Tensor:
        device = self._block.device
        hidden = self._block.forward(
            torch.from_numpy(rows.tokens).to(device),
            torch.from_numpy(rows.positions).to(device),
            state.cache,
            tree_mask(committed, sees, device),
        )
        assert hidden is not None  # nobody stops a draft
        return hidden

    def _grow(self, state: _Request, tree: _Tree, levels: int, width: int) -> DraftedTree:
        """Grow `levels` levels, or as many as the draft model's context has room for."""
        for _ in range(levels if width > 0 else 0):
            position = tree.root_position + tree.levels  # of the rows whose children come now
            if position >= self._max_rows:
                break
            if tree.levels == 0:
                assert state.hidden is not None  # a context has at least one token
                parents, hidden = np.asarray([FROM_ROOT]), state.hidden
                above = np.zeros(1)
            else:
                parents = self._frontier(tree, width)
                if not len(parents):
                    break
                hidden = self._run_guesses(state, tree, parents, position)
                above = tree.scores[-1][parents - (tree.size - len(tree.scores[-1]))]
            child_positions = np.full(len(parents), position + 1)
            logits = self._head.logits(hidden)[:, : self._vocab_size]
            # A log score is never above 0, up to rounding: a child must not outrank its parent.
            scores = np.minimum(guess_log_scores(logits, child_positions, state.sampling), 0.0)
            rows, tokens = best_columns(scores, width)
            tree.add(parents[rows], tokens, above[rows] + scores[rows, tokens])
        return tree.drafted()

    def _frontier(self, tree: _Tree, width: int) -> IntArray:
        """The `width` best guesses of the last level, in order; ties go to the smaller index."""
        newest = tree.scores[-1]
        best = np.argsort(-newest, kind="stable")[:width]
        return np.sort(best) + (tree.size - len(newest))

    def _run_guesses(
        self, state: _Request, tree: _Tree, guesses: IntArray, position: int
    ) -> torch.Tensor:
        """Run guesses of the last level, all at `position`; returns hidden rows [R, H]."""
        base = tree.size - len(tree.tokens[-1])
        ids = state.take_ids(len(guesses))
        row_of = state.row_of_guess
        root = state.ledger.last_committed
        parents = [
            root if guess == FROM_ROOT else row_of[guess]
            for guess in tree.parents[-1][guesses - base].tolist()
        ]
        tokens = tree.tokens[-1][guesses - base]
        positions = np.full(len(guesses), position)
        rows = Rows(ids, np.asarray(parents, np.int64), tokens, positions)
        sees = state.ledger.append(rows)
        hidden = self._run(state, rows, state.ledger.committed, sees)
        for offset, (row, parent, token, guess) in enumerate(
            zip(ids.tolist(), parents, tokens.tolist(), guesses.tolist(), strict=True)
        ):
            row_of[guess] = row
            state.child_rows[parent, token] = row
            state.row_hidden[row] = hidden, offset
        return hidden


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
