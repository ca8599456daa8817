"""Evaluation of a head on the base's own texts: agreement by level, and tokens per trip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgespec.training.eagle import Student
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows
from edgespec.training.unrolled import unrolled

RANKS = (1, 4, 8)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a head is worth on `tokens` tokens of greedy text. For each of RANKS: `by_level`, how
    often the base's token is among so many best guesses, by level of the tree (the guesses above
    it being right); `trip`, tokens that one trip would yield if so many children of every guess
    travelled."""

    tokens: int
    by_level: dict[int, tuple[float, ...]]
    trip: dict[int, float]


@torch.no_grad()
def agreement(
    student: Student, teacher: Teacher, rows: TextRows, levels: int, batch: int = 16
) -> Agreement:
    """Measure on rows of the base's own greedy text (see Teacher.continued)."""
    found = {rank: torch.zeros(levels) for rank in RANKS}
    runs = {rank: torch.zeros(levels) for rank in RANKS}
    total = 0
    for first in range(0, len(rows), batch):
        part = rows.take(torch.arange(first, min(first + batch, len(rows))))
        hits, counts = _hits(student, teacher, part, levels)
        total += int(counts.sum())
        for rank in RANKS:
            alive = counts
            for level in range(levels):
                # What hangs below the same root: one pair further on at every level.
                here = torch.zeros_like(counts)
                width = counts.shape[1] - level
                here[:, :width] = hits[rank][level][:, level:]
                found[rank][level] += (here & counts).sum().cpu()
                alive = alive & here
                runs[rank][level] += alive.sum().cpu()
    share = max(total, 1)
    return Agreement(
        total,
        {rank: tuple((found[rank] / share).tolist()) for rank in RANKS},
        {rank: 1 + float(runs[rank].sum()) / share for rank in RANKS},
    )


def _hits(
    student: Student, teacher: Teacher, rows: TextRows, levels: int
) -> tuple[dict[int, list[torch.Tensor]], torch.Tensor]:
    """By rank and level: which pairs [B, T - 1] guess the row's own next token; the roots' pairs.

    A root counts if all levels below it lie in the row's text.
    """
    device = teacher.device
    tokens = rows.tokens.to(device, torch.int64)
    lesson = teacher.read(tokens, student.head.shape.aux_hidden)
    given = lesson.hidden if lesson.aux_hidden is None else lesson.aux_hidden
    wanted = torch.cat([tokens[:, 2:], tokens[:, -1:]], 1)
    hits: dict[int, list[torch.Tensor]] = {rank: [] for rank in RANKS}
    for features in unrolled(student.head, given[:, :-1], teacher.embedded(tokens[:, 1:]), levels):
        best = student.logits(features, teacher).topk(max(RANKS), -1).indices
        if student.kept is not None:
            best = student.kept.to(device)[best]
        for rank in RANKS:
            hits[rank].append((best[..., :rank] == wanted[..., None]).any(-1))
    pairs = torch.arange(tokens.shape[1] - 1)
    counts = pairs >= (rows.starts - 1).clamp(min=0)[:, None]
    counts &= pairs + 1 + levels < rows.ends[:, None]
    return hits, counts.to(device)
