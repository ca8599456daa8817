"""Independent draft: any causal language model with the base's tokenizer guesses by itself;
and what all guessers have in common that run a whole small model on text and guesses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from edgespec.drafting.base import PASS_ROWS, Guesser, TokenPath
from edgespec.drafting.launches import Launches
from edgespec.drafting.ranking import Ranking, Unranked
from edgespec.drafting.steps import Steps, call
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.families import folds
from edgespec.model.joint import CachedPart
from edgespec.model.kv_cache import TwoRegionCache
from edgespec.model.source import TensorSource
from edgespec.model.tree_attention import tree_mask
from edgespec.tree.drafted import Children
from edgespec.tree.ledger import BoolArray, IntArray, RetainSet, RowLedger, Rows
from edgespec.types.boundaries import AHEAD
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
        most_ahead: int | None = None,
    ) -> None:
        """`new_rows` begins a request, given its number. `head`: the draft model's own; `known`:
        tokens that it can read; `most_rows`: its context. `vocab_size`: tokens that the base model
        knows; no others are guessed (embeddings may be padded to different sizes). `most_ahead`:
        guesses stand at most so many positions behind the context."""
        super().__init__(name)
        self._most_ahead = most_ahead or most_rows
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
        draft model's context, or farther ahead, or has a token that the draft model lacks."""
        rows = self._rows[request]
        room = min(self._max_rows - len(rows.context), self._most_ahead)
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
        super().close(request)
        self._rows.pop(request, None)
        self._ranking.close(request)

    def between_layers(self) -> bool:
        self._launches.keep_near()
        return super().between_layers()

    def _knows(self, tokens: TokenPath) -> bool:
        return max(tokens, default=0) < self._known


class NextRows(NamedTuple):
    """Rows that a request needs of the next pass: `tokens` and `positions` int64 [R], and of its
    cache the first `committed` slots and those after them where `sees` is true (see BlockPart)."""

    request: int
    tokens: IntArray
    positions: IntArray
    kv: TwoRegionCache
    committed: int
    sees: BoolArray


class JointPasses:
    """Passes of a draft model over the rows of one or several requests."""

    def __init__(
        self, block: Block, ran: Callable[..., None], between_layers: Callable[[], bool]
    ) -> None:
        """`ran` is told the rows of every pass, and whose they were."""
        self.block = block
        self._ran = ran
        self._between_layers = between_layers

    def run(self, every: Sequence[NextRows]) -> Sequence[torch.Tensor]:
        """The hidden rows [R, H] of each request; their slots are taken."""
        device = self.block.device
        parts = [
            CachedPart(one.request, one.kv, tree_mask(one.committed, one.sees, device))
            for one in every
        ]
        hidden = self.block.forward_joint(
            torch.from_numpy(np.concatenate([one.tokens for one in every])).to(device),
            torch.from_numpy(np.concatenate([one.positions for one in every])).to(device),
            parts,
            stop=lambda request=None: request is None and self._between_layers(),
        )
        assert hidden is not None  # a draft is never stopped
        self._ran(len(hidden), *(one.request for one in every))
        return list(hidden.split([len(one.tokens) for one in every]))


class GuessCache:
    """What was run for one request: committed rows of the context, and after them guesses.

    A row is run once: it stays, with its hidden row, until the context grows in another direction.
    """

    def __init__(self, request: int, passes: JointPasses) -> None:
        """An empty cache."""
        self.request = request
        self.context: list[int] = []
        self._passes = passes
        self._kv = passes.block.new_cache(0)
        self._ledger = RowLedger()
        self._next_id = 0
        # Rows of guesses by (row before, token), in the order of their ids: ancestors come first.
        self._row_behind: dict[tuple[int, int], int] = {}
        # [1 + S, H] after the final norm: of the last committed row, then of the ledger's
        # speculative rows in slot order. One tensor of its own, as views would keep whole passes.
        self._hidden: torch.Tensor | None = None

    def catch_up(self, news: TokenPath) -> Steps[None]:
        """Commit the new tokens that were guessed and run; run the rest. Drop guesses elsewhere."""
        if not news:
            return
        accepted: list[int] = []
        row = self._ledger.last_committed
        for token in news:
            if (row, token) not in self._row_behind:
                break
            row = self._row_behind[row, token]
            accepted.append(row)
        run = list(news[len(accepted) :])
        self._keep(accepted, {} if run else self._rows_below(row))
        self.context += news[: len(accepted)]
        for begin in range(0, len(run), PASS_ROWS):
            yield from self._commit(run[begin : begin + PASS_ROWS])

    def rewind(self, rows: int) -> None:
        if not self._kv.goes_on(rows):
            rows, self._kv = 0, self._passes.block.new_cache(0)
        self.context = self.context[:rows]
        ids = np.arange(len(self.context))
        self._kv.gather(len(ids), np.zeros(0, np.int64))
        self._ledger = RowLedger()
        self._ledger.commit(Rows(ids, ids - 1, np.array(self.context, np.int64), ids))
        self._next_id = len(ids)
        self._row_behind, self._hidden = {}, None

    def copy(self, other: GuessCache, rows: int) -> None:
        if other._kv.goes_on(rows):
            self.context = other.context[:rows]
            self._kv = other._kv.fork(0, len(self.context))
            self.rewind(rows)

    def hidden_behind(self, paths: Sequence[TokenPath]) -> Steps[torch.Tensor]:
        """One forward pass runs the rows that are missing, ancestors included; needs a context."""
        parents: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        fresh: dict[tuple[int, int], int] = {}
        ends: list[int] = []
        for path in paths:
            row = self._ledger.last_committed
            for position, token in enumerate(path, start=len(self.context)):
                place = row, token
                known = self._row_behind.get(place, fresh.get(place))
                if known is None:
                    known = fresh[place] = self._next_id + len(fresh)
                    parents.append(row)
                    tokens.append(token)
                    positions.append(position)
                row = known
            ends.append(row)
        if fresh:
            yield from self._run_guesses(np.array(parents), np.array(tokens), np.array(positions))
            self._row_behind |= fresh
        assert self._hidden is not None
        at = {row: slot for slot, row in enumerate(self._ledger.speculative, start=1)}
        at[self._ledger.last_committed] = 0
        return self._hidden_at([at[row] for row in ends])

    def _rows_below(self, root: int) -> dict[tuple[int, int], int]:
        """The part of `_row_behind` below a row."""
        below: dict[tuple[int, int], int] = {}
        inside = {root}
        for (parent, token), row in self._row_behind.items():
            if parent in inside:
                below[parent, token] = row
                inside.add(row)
        return below

    def _keep(self, accepted: list[int], below: dict[tuple[int, int], int]) -> None:
        """Commit rows, and drop all others that are not in `below`."""
        start, kept = self._ledger.committed, frozenset(below.values())
        keep = RetainSet(self._ledger.epoch + 1, self._next_id - 1, tuple(accepted), kept)
        order = self._ledger.retain(keep)
        self._row_behind = below
        if order is not None and self._hidden is not None:
            self._kv.gather(start, order)
            # The accepted rows come first; the last of them takes the committed row's place.
            self._hidden = self._hidden_at([0, *(order + 1).tolist()][len(accepted) :])

    def _commit(self, tokens: list[int]) -> Steps[None]:
        """Run committed tokens after the committed rows."""
        ids, before = self._take_ids(len(tokens)), self._ledger.committed
        parents = np.concatenate(([self._ledger.last_committed], ids[:-1]))
        positions = np.arange(before, before + len(tokens))
        rows = Rows(ids, parents, np.array(tokens), positions)
        self._ledger.commit(rows)
        hidden = yield from self._run(rows, before, np.tri(len(tokens), dtype=np.bool_))
        self.context += tokens
        self._hidden = hidden[-1:].clone()

    def _run_guesses(self, parents: IntArray, tokens: IntArray, positions: IntArray) -> Steps[None]:
        """Run guesses, ancestors first, and remember their hidden rows."""
        rows = Rows(self._take_ids(len(tokens)), parents, tokens, positions)
        sees = self._ledger.append(rows)
        hidden = yield from self._run(rows, self._ledger.committed, sees)
        assert self._hidden is not None  # guesses lie after a context
        self._hidden = torch.cat([self._hidden, hidden])

    def _run(self, rows: Rows, committed: int, sees: BoolArray) -> Steps[torch.Tensor]:
        given = NextRows(self.request, rows.tokens, rows.positions, self._kv, committed, sees)
        return call(self._passes.run, given)

    def _hidden_at(self, index: list[int]) -> torch.Tensor:
        """A copy of these rows of `_hidden`."""
        assert self._hidden is not None
        return self._hidden.index_select(0, torch.tensor(index, device=self._hidden.device))

    def _take_ids(self, count: int) -> IntArray:
        first = self._next_id
        self._next_id += count
        return np.arange(first, first + count, dtype=np.int64)


class IndependentGuesser(WholeModelGuesser[GuessCache]):
    """A Guesser (see drafting.base) that runs a whole small model beside the ring.

    Its caches hold the context and the guesses that were run; of these, the ones that turn out
    right are committed, and what lies after them stays, instead of being computed again.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
        ends: TensorSource | None = None,
    ) -> None:
        """Load the draft model. `vocab_size`: tokens that the base model knows; no others are
        guessed (embeddings may be padded to different sizes). `ends`: the same model with its
        output head as it is to be held; None: as `source` has it. Raises ModelError."""
        block = Block(source, 0, source.layers, dtype, device)
        passes = JointPasses(block, self.ran, self.between_layers)
        super().__init__(
            "independent",
            lambda request: GuessCache(request, passes),
            OutputHead(ends or source, dtype, device, share=block),
            known=block.vocab_size,
            most_rows=int(source.config.max_position_embeddings),
            vocab_size=vocab_size,
            most_ahead=AHEAD if folds(source.config) else None,
        )
