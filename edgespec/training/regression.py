"""How a one-pass head with direct maps begins: as the best linear guess of the base's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from edgespec.drafting.dspark.head import DSparkHead
from edgespec.training.blocks import blocks_at
from edgespec.training.teacher import Lesson, Teacher
from edgespec.training.texts import TextRows

_RIDGE = 3e-2  # of the mean square of what is read
_EVERY = 2  # tokens from one anchor to the next
_ROWS = 4  # read at a time
_TOGETHER = 4  # slots for which the fused rows are to be of use

LessonOf = Callable[[TextRows, torch.Tensor], Lesson]


class _Seen(NamedTuple):
    """Anchors of some text: the base's tapped rows before them [N, taps · H], the anchors embedded
    [N, H], and what the base's final norm gives before its gains for the block's tokens,
    [N, block, H], which counts where `counts` [N, block]."""

    given: torch.Tensor
    anchors: torch.Tensor
    wanted: torch.Tensor
    counts: torch.Tensor


@torch.no_grad()
def fit_direct(
    head: DSparkHead, teacher: Teacher, rows: TextRows, lesson_of: LessonOf, sizes: torch.Tensor
) -> None:
    """Fit `fc` and the direct maps by ridge regression; `sizes` [taps · H]: the spread of what is
    tapped. The final norm's gains are the base's."""
    shape, maps = head.shape, head.direct_maps
    together = min(_TOGETHER, shape.block)
    first = Regression(shape.fused_width + shape.hidden, together * shape.hidden)
    for seen in _seen(head, teacher, rows, lesson_of):
        whole = seen.counts[:, together - 1]
        read = torch.cat([seen.given / sizes, _alike(seen.anchors)], -1)
        first.add(read[whole], seen.wanted[:, :together].flatten(1)[whole])
    fused = first.narrowed(shape.hidden)[0][:, : shape.fused_width]
    head.fc.weight.copy_(fused / sizes)
    slots = [Regression(2 * shape.hidden, shape.hidden) for _ in range(shape.block)]
    for seen in _seen(head, teacher, rows, lesson_of):
        read = head.direct_input(head.context(seen.given), seen.anchors)
        for slot, fit in enumerate(slots):
            # The anchor's slot holds its token already.
            wanted = seen.wanted[:, slot] - (seen.anchors if slot == 0 else 0)
            fit.add(read[seen.counts[:, slot]], wanted[seen.counts[:, slot]])
    maps.anchor.weight.copy_(slots[0].solved().T)
    narrow = [fit.narrowed(shape.direct) for fit in slots[1:]]
    maps.down.weight.copy_(torch.cat([down for down, _ in narrow]))
    maps.up.weight.copy_(torch.cat([up for _, up in narrow]))


class Regression:
    """Least squares from what is read to what is wanted, a little towards zero."""

    def __init__(self, wide: int, out: int, ridge: float = _RIDGE) -> None:
        """`ridge`: how much towards zero, of the mean square of what is read."""
        self._ridge = ridge
        self._squares = torch.zeros((wide, wide), dtype=torch.float64)
        self._products = torch.zeros((wide, out), dtype=torch.float64)

    def add(self, read: torch.Tensor, wanted: torch.Tensor) -> None:
        self._squares += (read.T @ read).cpu()
        self._products += (read.T @ wanted).cpu()

    def solved(self) -> torch.Tensor:
        """The map, float32 [wide, out]."""
        return self._solved().float()

    def _solved(self) -> torch.Tensor:
        ridge = self._ridge * self._squares.diagonal().mean()
        found: torch.Tensor = torch.linalg.solve(
            self._squares + ridge * torch.eye(len(self._squares)), self._products
        )
        return found

    def narrowed(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The map as [rank, wide] and, behind it, [out, rank]: the nearest of that rank, in what
        comes out."""
        best = self._solved()
        directions = torch.linalg.eigh(best.T @ self._squares @ best).eigenvectors[:, -rank:]
        return (best @ directions).T.float(), directions.float()


def _alike(anchors: torch.Tensor) -> torch.Tensor:
    return anchors / anchors.square().mean(-1, keepdim=True).sqrt()


def _seen(
    head: DSparkHead, teacher: Teacher, rows: TextRows, lesson_of: LessonOf
) -> Iterator[_Seen]:
    """What stands at every second token of the base's own."""
    shape, gains = head.shape, teacher.weights["model.norm.weight"].float()
    for part in torch.arange(len(rows)).split(_ROWS):
        text = rows.take(part).trimmed()
        tokens = text.tokens.to(teacher.device, torch.int64)
        lesson = lesson_of(text, tokens)
        assert lesson.aux_hidden is not None
        for at in range(len(text)):
            first, end = max(int(text.starts[at]), 0) + 1, int(text.ends[at])
            anchors = torch.arange(first, max(first + 1, end - 1), _EVERY).clamp(max=end - 1)
            blocks = blocks_at(
                anchors[None], torch.zeros_like(anchors)[None], text.take(torch.tensor([at])), shape
            )
            wanted = lesson.hidden[at][blocks.sources[0]].float() / gains
            yield _Seen(
                lesson.aux_hidden[at][anchors - 1].float(),
                teacher.embedded(tokens[at][anchors]).float(),
                wanted.unflatten(0, (-1, shape.block)),
                (blocks.weights[0] > 0).unflatten(0, (-1, shape.block)),
            )
