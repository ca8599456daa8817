"""Pair rows: what an EAGLE head ran for one request, committed pairs first, then guesses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from edgespec.drafting.base import PASS_ROWS, TokenPath
from edgespec.drafting.eagle.head import EagleHead, RopeAngles, attention, rope_at
from edgespec.drafting.eagle.shape import Rope
from edgespec.drafting.held_head import GuesserParts, HeadPasses
from edgespec.drafting.steps import Steps, call
from edgespec.model.kv_cache import RowForm, TwoRegionCache

_FAITHFUL = 3
"""So many imitations in a row are as good as the truth: heads are trained over several."""


class NextPairs(NamedTuple):
    """Pairs that a request needs of the next pass: `features` [R, hidden], the `tokens` and
    `positions` of R pairs, and which slots of the cache each of them sees, its own included, bool
    [R, T]."""

    request: int
    features: torch.Tensor
    tokens: Sequence[int]
    positions: Sequence[int]
    rope: Rope
    kv: TwoRegionCache
    sees: torch.Tensor


class PairPasses(HeadPasses):
    """Passes of a head over the pairs of one or several requests."""

    @abstractmethod
    def run(self, every: Sequence[NextPairs]) -> Sequence[torch.Tensor]:
        """What comes out [R, hidden] for each request's pairs; their slots are taken."""


class EaglePasses(PairPasses):
    """Those of an EAGLE head."""

    def __init__(self, head: EagleHead, parts: GuesserParts) -> None:
        shape = self._shape = head.shape
        super().__init__(parts, shape.hidden, [RowForm(shape.kv_heads, shape.head_dim)])
        self._head = head

    @torch.inference_mode()
    def run(self, every: Sequence[NextPairs]) -> Sequence[torch.Tensor]:
        self._between_layers()  # there is one
        device, counts = self.device, [len(one.tokens) for one in every]
        tokens = [token for one in every for token in one.tokens]
        embedded = self._embed(torch.tensor(tokens, device=device))
        angles = [self._angles(one, embedded.dtype) for one in every]
        masks = [one.sees.to(device) for one in every]

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            shares = [list(rows.split(counts, 2)) for rows in (query, key, value)]
            seen = []
            for one, mask, queries, keys, values in zip(every, masks, *shares, strict=True):
                held_keys, held_values = one.kv.update(keys, values, 0)
                seen.append(attention(queries, held_keys, held_values, mask))
            return _rows_of_all(seen)

        features = torch.cat([one.features for one in every])
        turns = RopeAngles(*(torch.cat(part) for part in zip(*angles, strict=True)))
        out: torch.Tensor = self._head(features[None], embedded[None], turns, attend)[0]
        for one in every:
            one.kv.advance(len(one.tokens))
        self._ran(len(tokens), *(one.request for one in every))
        return list(out.split(counts))

    def _angles(self, one: NextPairs, dtype: torch.dtype) -> RopeAngles:
        places = torch.tensor(one.positions, device=self.device)
        return rope_at(places, one.rope, self._shape.head_dim, dtype)


def _rows_of_all(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows [1, heads, R, head_dim] of all requests, one after the other."""
    return torch.cat(list(parts), 2) if len(parts) > 1 else parts[0]


class PairRows:
    """Rows of pairs (features at p, token at p + 1) one after the other, and the trees below them.

    A committed pair has true features; a guess has its parent's output, an imitation. Guesses that
    become committed are run again with true features, in the same pass as the next guesses below
    them. Guesses in between are stale: they saw imitations of imitations. To run them all again
    would take a pass for every level of the tree after every committed token. Instead stale rows
    are recomputed one level per pass, once the features of their parent are closer to true ones.
    """

    def __init__(self, request: int, passes: PairPasses, rope: Rope) -> None:
        """No rows."""
        self.request = request
        self._passes, self._rope = passes, rope
        self._kv = passes.new_cache()
        hidden, dtype, device = passes.hidden, passes.dtype, passes.device
        self._device = device
        self._held = 0  # committed pairs in the cache
        # The newest committed pairs, while they wait for the next pass: features [n, hidden],
        # tokens.
        self._waiting = torch.zeros((0, hidden), dtype=dtype, device=device)
        self._waiting_tokens: list[int] = []
        # Guesses in the order of their slots: [1 + guesses, hidden] that came out, the last
        # committed pair's first (while that waits, what it gave out as a guess); for each its
        # ancestors' slots with its own, and how many imitations lie between the truth and what it
        # read; and where they are, by (slot of the row before, token). Slot 0 is the last committed
        # pair.
        self._out = torch.zeros((1, hidden), dtype=dtype, device=device)
        self._lines: list[list[int]] = [[]]
        self._imitated: list[int] = [0]
        self._slot_behind: dict[tuple[int, int], int] = {}

    @property
    def committed(self) -> int:
        """How many committed pairs there are."""
        return self._held + len(self._waiting_tokens)

    def add(self, features: torch.Tensor, tokens: Sequence[int]) -> Steps[None]:
        """Certain pairs come next, `features` [n, hidden] and `tokens` [n], n >= 1.

        Guesses that do not lie below them are dropped. Pairs that were run as guesses wait for the
        next pass; others run now.
        """
        root, known = self._followed(tokens)
        waiting = torch.cat([self._waiting, features]), [*self._waiting_tokens, *tokens]
        if known < len(tokens) or len(waiting[1]) > PASS_ROWS:
            self._waiting, self._waiting_tokens = self._waiting[:0], []
            yield from self.read(*waiting)
        else:
            self._keep_below(root)
            self._waiting, self._waiting_tokens = waiting

    def copy(self, other: PairRows, pairs: int) -> None:
        """Begin with the first `pairs` committed pairs of another request at most, as far as they
        were run."""
        self._held, self._rope = min(pairs, other._held), other._rope
        self._kv = other._kv.fork(0, self._held)

    def rewind(self, pairs: int) -> None:
        """Keep the first `pairs` committed pairs at most, as far as they were run, and no
        guesses."""
        self._waiting, self._waiting_tokens = self._waiting[:0], []
        self._held = min(pairs, self._held)
        self._drop_guesses()

    def read(self, features: torch.Tensor, tokens: Sequence[int]) -> Steps[torch.Tensor]:
        """Run committed pairs, none of which may wait, and drop all guesses; what comes out
        [n, hidden]."""
        self._drop_guesses()
        out: list[torch.Tensor] = []
        for first in range(0, len(tokens), PASS_ROWS):
            part = slice(first, first + PASS_ROWS)
            out.append((yield from self._pass(features[part], tokens[part], {})))
        return torch.cat(out)

    def behind(self, paths: Sequence[TokenPath]) -> Steps[torch.Tensor]:
        """What comes out [n, hidden] for the last token of each path after the committed pairs.

        The empty path stands for the last committed pair; there must be one. A guess needs what its
        parent gave: each pass runs all that is missing below what was run.
        """
        if not all(paths):
            yield from self._run_guesses({})
        while missing := self._missing(paths):
            yield from self._run_guesses(self._stale(paths) | missing)
        slots = [self._followed(path)[0] for path in paths]
        return self._out.index_select(0, torch.tensor(slots, device=self._device))

    def _missing(self, paths: Sequence[TokenPath]) -> dict[tuple[int, int], int]:
        """Where the next guess of each path that was not run belongs, and its position."""
        missing: dict[tuple[int, int], int] = {}
        for path in paths:
            slot, depth = self._followed(path)
            if depth < len(path):
                missing[slot, path[depth]] = self.committed + depth
        return missing

    def _stale(self, paths: Sequence[TokenPath]) -> dict[tuple[int, int], int]:
        """Guesses above those paths whose parents are nearer to the truth now than they were when
        these were run, as places with their positions."""
        stale: dict[tuple[int, int], int] = {}
        for path in paths:
            slot = 0
            for depth, token in enumerate(path):
                place = slot, token
                if (known := self._slot_behind.get(place)) is None:
                    break
                if self._imitated[known] > max(_FAITHFUL, self._imitated[slot] + 1):
                    stale[place] = self.committed + depth
                slot = known
        return stale

    def _followed(self, path: TokenPath) -> tuple[int, int]:
        """The slot of the last of these guesses that was run, each below the one before, and how
        many were."""
        slot = 0
        for depth, token in enumerate(path):
            if (slot, token) not in self._slot_behind:
                return slot, depth
            slot = self._slot_behind[slot, token]
        return slot, len(path)

    def _drop_guesses(self) -> None:
        self._kv.gather(self._held, np.zeros(0, np.int64))
        self._lines, self._imitated, self._slot_behind = [[]], [0], {}

    def _keep_below(self, root: int) -> None:
        """Keep what was run below the guess at the slot `root`, which is to be slot 0."""
        below = [s for s, line in enumerate(self._lines) if root in line and s != root]
        self._kv.gather(self._held, np.array(below, np.int64) - 1)
        kept = torch.tensor([root, *below], device=self._device)
        self._out = self._out.index_select(0, kept)
        new = {root: 0} | {slot: place for place, slot in enumerate(below, start=1)}
        lines = [self._lines[slot] for slot in below]
        self._lines = [[], *([new[s] for s in line if new.get(s)] for line in lines)]
        self._imitated = [self._imitated[slot] for slot in (root, *below)]
        self._slot_behind = {
            (new[parent], token): new[slot]
            for (parent, token), slot in self._slot_behind.items()
            if parent in new
        }

    def _run_guesses(self, places: dict[tuple[int, int], int]) -> Steps[None]:
        """Run the pairs that wait, and guesses at these places, with their positions, together."""
        features, tokens = self._waiting, self._waiting_tokens
        self._waiting, self._waiting_tokens = features[:0], []
        if tokens or places:
            yield from self._pass(features, tokens, places)

    def _pass(
        self, features: torch.Tensor, tokens: Sequence[int], places: dict[tuple[int, int], int]
    ) -> Steps[torch.Tensor]:
        """Run committed pairs, and guesses at these places, new ones or once more; what comes out
        of the pairs."""
        held, pairs, first = self._held, len(tokens), len(self._lines)
        before = held + first - 1  # columns of the cache; those of this pass come next
        sees = torch.zeros((pairs + len(places), before + pairs + len(places)), dtype=torch.bool)
        sees[:, :held] = True
        sees[:, before : before + pairs] = torch.ones((len(sees), pairs), dtype=torch.bool).tril()
        column = dict(enumerate(range(first - 1), start=1))  # of each slot, after the held pairs
        imitated = self._imitated[:]
        for row, place in enumerate(places, start=pairs):
            parent = place[0]
            line = self._lines[parent]
            sees[row, [held + slot - 1 for slot in line] + [before + row]] = True
            slot = self._slot_behind.setdefault(place, len(self._lines))
            if slot == len(self._lines):
                self._lines.append([*line, slot])
                imitated.append(0)
            imitated[slot] = self._imitated[parent] + 1
            column[slot] = first - 1 + row
        parents = torch.tensor([parent for parent, _ in places], dtype=torch.int64)
        given = NextPairs(
            self.request,
            torch.cat([features, self._out.index_select(0, parents.to(self._device))]),
            [*tokens, *(token for _, token in places)],
            [*range(held, held + pairs), *places.values()],
            self._rope,
            self._kv,
            sees,
        )
        out = yield from call(self._passes.run, given)
        self._kv.gather(held, np.array([*range(first - 1, first - 1 + pairs), *column.values()]))
        self._held += pairs
        self._imitated = [0 if pairs else imitated[0], *imitated[1:]]
        # Row r of `out` is row first + r of both together, as column first - 1 + r is its own.
        both = torch.cat([self._out[:first], out])
        kept = [first + pairs - 1 if pairs else 0, *(at + 1 for at in column.values())]
        self._out = both.index_select(0, torch.tensor(kept, device=self._device))
        return out[:pairs]
