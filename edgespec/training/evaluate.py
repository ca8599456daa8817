"""Evaluation of a head on the base's own texts: agreement by level, and tokens per trip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from edgespec.drafting.dspark.head import rows_of
from edgespec.training.blocks import blocks_at
from edgespec.training.dspark import DSparkStudent
from edgespec.training.eagle import Student, unrolled
from edgespec.training.loop import Remaining
from edgespec.training.ppd import PPDVectors
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

RANKS = (1, 4, 8)
_BATCH = 16
_EVERY = 3  # tokens from one block that is measured to the next


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a head is worth on `tokens` tokens of the base's own text. For each of RANKS:
    `by_level`, how often the base's token is among so many best guesses, by level of the tree (the
    guesses above it being right); `trip`, tokens that one trip would yield if so many children of
    every guess travelled. `shown`: the same of a head that may be shown guesses, behind those
    above."""

    tokens: int
    by_level: dict[int, tuple[float, ...]]
    trip: dict[int, float]
    shown: Agreement | None = None


def eagle_agreement(
    student: Student, teacher: Teacher, rows: TextRows, levels: int, say: Callable[[str], None]
) -> Agreement:
    """Measure on rows of the base's own text (see Teacher.continued)."""
    parts = _batches(rows, _BATCH, say)
    return _agreement((_eagle_hits(student, teacher, part, levels) for part in parts), levels)


def ppd_agreement(
    vectors: PPDVectors, teacher: Teacher, rows: TextRows, say: Callable[[str], None]
) -> Agreement:
    """Measure on rows of the base's own text: at every position, how good the guesses are
    that a chain there makes of the tokens after the next one."""
    parts = _batches(rows, 1, say)
    found = (hits for part in parts for hits in _ppd_hits(vectors, teacher, part))
    return _agreement(found, vectors.depth)


def _batches(rows: TextRows, size: int, say: Callable[[str], None]) -> Iterator[TextRows]:
    left = Remaining(len(rows))
    for index in torch.arange(len(rows)).split(size):
        say(f"measuring on held-out text: {left}")
        yield rows.take(index)
        left.done(len(index))


@torch.no_grad()
def _agreement(parts: Iterable[torch.Tensor], levels: int) -> Agreement:
    """`parts`: bool [roots, levels, ranks], whether the guess of a rank is the text's token."""
    found = {rank: torch.zeros(levels) for rank in RANKS}
    runs = {rank: torch.zeros(levels) for rank in RANKS}
    total = 0
    for part in parts:
        total += len(part)
        for rank in RANKS:
            hits = part[..., :rank].any(-1).cpu()
            found[rank] += hits.sum(0)
            runs[rank] += hits.long().cumprod(1).sum(0)
    share = max(total, 1)
    return Agreement(
        total,
        {rank: tuple((found[rank] / share).tolist()) for rank in RANKS},
        {rank: 1 + float(runs[rank].sum()) / share for rank in RANKS},
    )


def dspark_agreement(
    student: DSparkStudent,
    teacher: Teacher,
    rows: TextRows,
    levels: int,
    say: Callable[[str], None],
) -> Agreement:
    """Measure on rows of the base's own text: behind every third of its tokens, how good the
    guesses of a block there are, behind masks alone and where it is shown as many as it may be."""
    shape = student.head.shape

    def measured(revealed: int) -> Agreement:
        parts = _batches(rows, _BATCH, say)
        found = (_dspark_hits(student, teacher, part, levels, revealed) for part in parts)
        return _agreement(found, levels)

    return replace(measured(0), shown=measured(shape.revealed) if shape.shows else None)


def _dspark_hits(
    student: DSparkStudent, teacher: Teacher, rows: TextRows, levels: int, revealed: int
) -> torch.Tensor:
    rows, device, shape = rows.trimmed(), teacher.device, student.head.shape
    tokens = rows.tokens.to(device, torch.int64)
    first, wide = rows.starts.clamp(min=0) + 1, tokens.shape[1]
    anchors = first[:, None] + torch.arange(0, wide, _EVERY)
    fits = anchors + levels < rows.ends[:, None]
    anchors = anchors[:, : max(1, int(fits.sum(1).max()))].clamp(max=wide - 1)
    fits = fits[:, : anchors.shape[1]].to(device)
    shown = torch.full_like(anchors, revealed, device=device)
    blocks = blocks_at(anchors.to(device), shown, rows, shape)
    given = teacher.read(tokens, shape.aux_hidden).aux_hidden
    assert given is not None
    out = student.outputs(teacher, tokens, given, blocks).unflatten(1, (-1, shape.block))
    matrix = student.matrix(teacher).to(out.dtype)
    hits = []
    for level in range(levels):
        slot = shape.slot_of(level)
        sources = blocks.sources.unflatten(1, (-1, shape.block))[..., slot]
        before = tokens.gather(1, sources)
        logits = out[:, :, slot] @ matrix.T
        if shape.markov_rank:
            logits = logits + student.head.markov(rows_of(before, shape, student.kept))
        best = student.kept[logits.topk(min(max(RANKS), shape.vocab), -1).indices]
        wanted = tokens.gather(1, (sources + 1).clamp(max=wide - 1))
        hits.append(best == wanted[..., None])
    return torch.stack(hits, 2)[fits]


def _eagle_hits(student: Student, teacher: Teacher, rows: TextRows, levels: int) -> torch.Tensor:
    """A root counts if all levels below it lie in the row's text."""
    device = teacher.device
    tokens = rows.tokens.to(device, torch.int64)
    lesson = teacher.read(tokens, student.head.shape.aux_hidden)
    given = lesson.hidden if lesson.aux_hidden is None else lesson.aux_hidden
    wanted = torch.cat([tokens[:, 2:], tokens[:, -1:]], 1)[..., None]
    steps = unrolled(student.head, given[:, :-1], teacher.embedded(tokens[:, 1:]), levels)
    hits = []
    for level, features in enumerate(steps):
        best = student.logits(features, teacher).topk(max(RANKS), -1).indices
        if student.kept is not None:
            best = student.kept.to(device)[best]
        # What hangs below the same root: one pair further on at every level.
        hits.append((best == wanted).roll(-level, 1))
    pairs = torch.arange(tokens.shape[1] - 1)
    counts = pairs >= (rows.starts - 1).clamp(min=0)[:, None]
    counts &= pairs + 1 + levels < rows.ends[:, None]
    return torch.stack(hits, 2)[counts.to(device)]


def _ppd_hits(vectors: PPDVectors, teacher: Teacher, rows: TextRows) -> Iterator[torch.Tensor]:
    ahead = torch.arange(2, vectors.depth + 2, device=teacher.device)
    for index in range(len(rows)):
        tokens = rows.tokens[index].to(teacher.device, torch.int64)
        first = max(int(rows.starts[index]), 0)
        anchors = torch.arange(first, int(rows.ends[index]) - 1 - vectors.depth)
        if not len(anchors):
            continue
        anchors = anchors.to(teacher.device)
        _, said = vectors.logits(teacher, tokens[None], anchors[None])
        best = said[0].topk(max(RANKS), -1).indices
        yield best == tokens[anchors[:, None] + ahead][..., None]
