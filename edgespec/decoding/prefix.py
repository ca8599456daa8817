"""Prefix: the committed tokens that a request begins with on one ring, on their way in chunks."""

from __future__ import annotations

import numpy as np

from edgespec.decoding.prefix_cache import ReusedPrefix
from edgespec.tree.ledger import Rows


class Prefix:
    """`tokens`: all of them. `reused`: what the stages hold of another request's rows already.
    `chunk`: rows that travel together."""

    def __init__(self, tokens: tuple[int, ...], reused: ReusedPrefix | None = None) -> None:
        self.tokens = tokens
        self.reused = reused
        self.reused_rows = len(reused.ids) if reused else 0
        self.sent = self.reused_rows
        self.chunk = len(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def has_begun(self) -> bool:
        """Whether any of its rows is on its way."""
        return self.sent > self.reused_rows

    @property
    def is_sent(self) -> bool:
        """Whether all of it is on its way."""
        return self.sent == len(self.tokens)

    def next_rows(self, most: int) -> Rows:
        """The rows that travel next, `most` at most."""
        first, self.sent = self.sent, min(self.sent + most, len(self.tokens))
        ids = np.arange(first, self.sent, dtype=np.int64)
        return Rows(ids, ids - 1, np.array(self.tokens[first : self.sent], np.int64), ids)
