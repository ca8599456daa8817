"""What the base computed for its own answers, in a file: so that it reads none of them twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from edgespec.training.growing import LARGEST
from edgespec.training.teacher import Lesson

_MOST_BYTES = 12_000_000_000  # as the file's size is said; holes in it take nothing


class KeptRows:
    """Lessons of answers, by the answers' numbers, in float16. Of a file that is full, the answers
    with higher numbers are not kept."""

    def __init__(self, folder: Path, length: int, taps: tuple[int, ...], hidden: int) -> None:
        """Rows of at most `length` tokens; `taps`: the auxiliary layers. The file's name says both:
        rows of other ones do not fit."""
        self.taps, self._hidden = taps, hidden
        self._shape = (length, (len(taps) + 1) * hidden)
        self._bytes = 2 * self._shape[0] * self._shape[1]
        self._most = _MOST_BYTES // self._bytes
        name = "-".join(map(str, (*taps, length)))
        self._file = folder / f"rows-{name}.f16"
        self._file.touch()

    def keep(self, number: int, rows: torch.Tensor) -> None:
        """Keep what the base computed, [T, (1 + taps) · H]: hidden rows, and those of the taps."""
        if not 0 <= number < self._most:
            return
        stored = torch.zeros(self._shape[1] * len(rows), dtype=torch.float16)
        stored.copy_(rows.flatten().clamp(-LARGEST, LARGEST))
        data = stored.numpy().tobytes()
        # The first row last, once the others are on the disk: it tells that they are there.
        first = self._shape[1] * 2
        with self._file.open("r+b", buffering=0) as file:
            for begin, part in ((first, data[first:]), (0, data[:first])):
                file.seek(number * self._bytes + begin)
                file.write(part)
                os.fsync(file.fileno())

    def lesson(self, numbers: Sequence[int], length: int, dtype: torch.dtype) -> Lesson | None:
        """The first `length` rows of these answers; None if one is not there."""
        found = torch.zeros((len(numbers), length, self._shape[1]), dtype=torch.float16)
        with self._file.open("rb", buffering=0) as file:
            for number, rows in zip(numbers, found, strict=True):
                if number < 0:
                    return None
                file.seek(number * self._bytes)
                file.readinto(memoryview(rows.numpy()).cast("B"))
                if not rows[0].any():
                    return None
        wide = found.to(dtype)
        return Lesson(wide[..., : self._hidden], wide[..., self._hidden :] if self.taps else None)
