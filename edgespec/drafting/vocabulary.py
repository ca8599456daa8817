"""Draft vocabulary: of many tokens those that a head guesses, the ones that answers had most.

The output matrix of a large vocabulary is most of what its guess takes. It scores a part of that:
the base's ids, so that nothing else knows of it. What it never guesses costs a trip where the base
says it, and never a word.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from edgespec.config import DRAFT_VOCABULARY
from edgespec.files import write_whole

LAST = 1024
"""So many of the last tokens are always guessed: those that end a turn are among them."""

SAVE_TOKENS = 4096
"""So many tokens of answers come between two writes of their counts."""

Counts = npt.NDArray[np.uint32]

log = logging.getLogger(__name__)


def guessed_tokens(vocab: int, counts: Counts | None = None) -> torch.Tensor | None:
    """The tokens that a head guesses, int64, ascending; None: all.

    Of more than DRAFT_VOCABULARY those with the largest `counts`, and among equals the first, as
    byte pairs are learnt by how frequent they are; and the last ones.
    """
    if vocab <= DRAFT_VOCABULARY:
        return None
    seen = np.zeros(vocab, np.int64) if counts is None else counts.astype(np.int64)
    seen[-LAST:] = np.iinfo(np.int64).max
    return torch.from_numpy(np.sort(np.argsort(-seen, kind="stable")[:DRAFT_VOCABULARY]))


class AnswerTokens:
    """How often each token came in a base's answers, in a file: little-endian uint32 [V]."""

    def __init__(self, file: Path, vocab: int) -> None:
        """A file that cannot be read, or has another size, is begun anew."""
        self._file, self._unsaved = file, 0
        try:
            kept = np.fromfile(file, "<u4", vocab + 1)
        except OSError:
            kept = np.zeros(0, "<u4")
        self.counts: Counts = kept if len(kept) == vocab else np.zeros(vocab, "<u4")

    def add(self, tokens: Sequence[int], *, idle: bool) -> None:
        """An answer had these tokens. `idle`: nobody would wait for the disk, so that counts are
        written if many came."""
        np.add.at(self.counts, np.array(tokens, np.int64), 1)
        self._unsaved += len(tokens)
        if idle and self._unsaved >= SAVE_TOKENS:
            self.save()

    def save(self) -> None:
        """Write them, if any came; what cannot be written is logged, and begun anew next time."""
        if not self._unsaved:
            return
        self._unsaved = 0
        try:
            write_whole(self._file, self.counts.tobytes(), 0o600)
        except OSError as problem:
            log.warning("cannot keep which tokens answers have in %s: %s", self._file, problem)
