"""PPD guesser: what the rows of PPD tokens below the last right token say about the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.ppd.format import PPDTokens
from edgespec.drafting.ranking import Ranking
from edgespec.drafting.steps import Steps, at_once, call
from edgespec.errors import RemoteProtocolError
from edgespec.model.ends import OutputHead
from edgespec.model.tensors import compute_dtype, from_torch, to_torch
from edgespec.tree.drafted import Children
from edgespec.tree.ledger import IntArray
from edgespec.types.features import DraftNeeds, Features, PPDTable
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling


@dataclass(slots=True)
class _ChainLogits:
    """One request: how many tokens are committed, and what its newest chain says: `logits` [k, V]
    of the tokens at positions `first`, `first` + 1, …"""

    length: int = 0
    first: int = 0
    logits: torch.Tensor = field(default_factory=lambda: torch.zeros((0, 0)))


class PPDGuesser(Guesser):
    """A Guesser without a model: PPD tokens ran on the ring, below a row whose next token is
    committed by now. Only the base's output matrix is left to be applied to them.

    What is guessed for a position is the same whatever guesses lie before it, so that a tree of
    them is the product of its levels (as Medusa's; PPD §4.1).
    """

    def __init__(self, trained: PPDTokens, head: OutputHead) -> None:
        """`trained`: for the base that `head` is of (see drafting.ppd.format)."""
        dtype = compute_dtype(str(head.dtype).removeprefix("torch."))
        table = from_torch(trained.table.to(dtype).contiguous())
        needs = DraftNeeds(ppd_tokens=PPDTable(trained.depth, trained.copies, table))
        super().__init__("ppd", needs)
        self._copies = trained.copies
        self._head = head
        self._ranking = Ranking(self.ranked, self.allowed)
        self._requests: dict[int, _ChainLogits] = {}

    def open(self, request: int, sampling: Sampling) -> None:
        self._requests[request] = _ChainLogits()
        self._ranking.open(request, sampling)

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Take what the newest chain of PPD tokens became; False if none reaches beyond the
        context."""
        state = self._requests[request]
        if features.ppd_rows is not None:
            rows = self._checked(features.ppd_rows)
            state.logits = yield from call(self._logits, rows)
            state.first = features.anchor + 2
        if not state.first <= len(context) < state.first + len(state.logits):
            return False
        self._ranking.read(request, context[state.length :])
        state.length = len(context)
        return True

    @at_once
    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """The best tokens for the position after each path; none where no PPD token reaches."""
        state = self._requests[request]
        shift = state.length - state.first
        depths = np.array([len(path) + shift for path in paths], np.int64)
        # The first path of a depth stands for all: they are asked about in falling score.
        levels = [d for d in np.unique(depths).tolist() if 0 <= d < len(state.logits)]
        if not levels:
            return Children.none()
        firsts = [paths[int(np.flatnonzero(depths == level)[0])] for level in levels]
        positions = np.array(levels) + state.first
        found = self._ranking.children(request, firsts, state.logits[levels], positions, width)
        return _for_all(found, levels, depths)

    def close(self, request: int) -> None:
        self._requests.pop(request, None)
        self._ranking.close(request)

    def _checked(self, rows: Tensor) -> torch.Tensor:
        """A chain's rows where the head is."""
        head = self._head
        if rows.shape[1:] != (head.hidden_size,) or f"torch.{rows.dtype}" != str(head.dtype):
            raise RemoteProtocolError(
                f"the head takes prompt rows of {head.dtype}[{head.hidden_size}], the last stage "
                f"sent {rows.dtype}{list(rows.shape)}; give all stages the same model and dtype"
            )
        return to_torch(rows, head.device)

    def _logits(self, every: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the rows of each request's chain say, [k, V], copies averaged."""
        logits = self._head.logits(torch.cat(list(every)) if len(every) > 1 else every[0])
        shares = logits.split([len(rows) for rows in every])
        return [own.reshape(-1, self._copies, own.shape[1]).mean(1) for own in shares]


def _for_all(found: Children, levels: Sequence[int], depths: IntArray) -> Children:
    """Children of every path, as found for the paths' depths `levels`."""
    ends = np.searchsorted(found.parents, np.arange(len(levels) + 1))
    parents: list[IntArray] = []
    index: list[IntArray] = []
    for path, depth in enumerate(depths.tolist()):
        if depth in levels:
            at = levels.index(depth)
            here = np.arange(ends[at], ends[at + 1])
            index.append(here)
            parents.append(np.full(len(here), path, np.int64))
    columns = np.concatenate(index)
    return Children(np.concatenate(parents), found.tokens[columns], found.scores[columns])
