"""Training an EAGLE head: what it begins as, its losses, and what learns by which rule."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss

from edgespec.drafting.eagle.format import write_head
from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.shape import HeadShape, Kind
from edgespec.training.loop import DECAY, Trainer, TrainingSettings, muon
from edgespec.training.start import begin
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows, counted_tokens
from edgespec.training.unrolled import unrolled

FEATURE_SHARE = 0.1
"""Of the loss on features against that on tokens, for EAGLE-1 and EAGLE-2."""

LEVELS: dict[Kind, int] = {"eagle": 4, "eagle3": 7}
"""Levels to train. A ring guesses up to a dozen tokens ahead. An EAGLE-2 head's features are held
to the base's: four levels teach it all twelve. An EAGLE-3 head's are its own: having learnt three
levels, the demo's named the right token first in 0.81 of the places at level 1 and 0.33 at 12."""

_FIRST_ROWS = 128  # from which a head begins
_AT_ONCE = 256  # rows whose logits are there at one time


class Student(nn.Module):
    """A head in training, with the output matrix if it has one of its own."""

    def __init__(self, shape: HeadShape, kept: torch.Tensor | None) -> None:
        """`kept` int64 [vocab]: the base's tokens that the head scores, None for all of them."""
        super().__init__()
        self.head = EagleHead(shape)
        self.kept = kept
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False) if shape.own_head else None

    def logits(self, features: torch.Tensor, teacher: Teacher) -> torch.Tensor:
        """Logits [.., vocab] of features that came out of the layer."""
        rows = self.head.outgoing(features)
        return teacher.logits(rows) if self.lm_head is None else self.lm_head(rows)


class EagleTrainer(Trainer):
    """The loop for an EAGLE head."""

    def __init__(
        self, teacher: Teacher, student: Student, settings: TrainingSettings, out: Path
    ) -> None:
        self.student, self._out = student, out
        super().__init__(teacher, student, optimizers(student, settings.rate), settings, out)

    def begin(self, rows: TextRows) -> None:
        first = rows.take(torch.arange(min(len(rows), _FIRST_ROWS)))
        begin(self.student.head, self.teacher, first, self.settings.batch)
        if self.student.lm_head is not None:
            matrix, kept = self.teacher.head_matrix, self.student.kept
            with torch.no_grad():
                self.student.lm_head.weight.copy_(matrix if kept is None else matrix[kept])

    def learn(self, batch: TextRows) -> tuple[float, float]:
        return learn(self.student, self.teacher, batch, self.settings.unroll)

    def write(self) -> None:
        student, config = self.student, self.teacher.config
        tensors = {name: weight.detach() for name, weight in student.head.state_dict().items()}
        if student.lm_head is not None:
            tensors["lm_head.weight"] = student.lm_head.weight.detach()
        vocab, positions = int(config.vocab_size), int(config.max_position_embeddings)
        write_head(self._out, student.head.shape, tensors, student.kept, vocab, positions)


def optimizers(student: Student, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layer's matrices, AdamW for all else."""
    named = list(student.named_parameters())
    inner = [w for name, w in named if w.dim() == 2 and not name.startswith("lm_head")]
    outer = [w for name, w in named if w.dim() != 2 or name.startswith("lm_head")]
    return [muon(inner, rate), torch.optim.AdamW(outer, rate, betas=(0.9, 0.95), weight_decay=0.0)]


def learn(student: Student, teacher: Teacher, rows: TextRows, unroll: int) -> tuple[float, float]:
    """Add the gradients over all levels; the loss, and the share of the first level's best guesses
    that are right.

    Logits of a few rows are there at a time, those of all levels one after the other: all of them
    would be most of the memory.
    """
    device, shape = teacher.device, student.head.shape
    tokens = rows.tokens.to(device, torch.int64)
    lesson = teacher.read(tokens, shape.aux_hidden)
    given = lesson.hidden if lesson.aux_hidden is None else lesson.aux_hidden
    wanted = lesson.hidden[:, 1:].flatten(0, 1)
    embedded = teacher.embedded(tokens[:, 1:])
    steps = list(unrolled(student.head, given[:, :-1], embedded, unroll))
    levels = [features.detach().requires_grad_() for features in steps]
    counts = [counted(rows, level).to(device).flatten() for level in range(unroll)]
    total, hits = 0.0, 0
    for part in torch.arange(len(wanted), device=device).split(_AT_ONCE):
        with torch.no_grad():
            truth = teacher.logits(wanted[part]).float()
            truth = truth if student.kept is None else truth[..., student.kept]
            likely = torch.softmax(truth, -1)
        for level, features in enumerate(levels):
            here, counts_here = features.flatten(0, 1)[part], counts[level][part]
            logits = student.logits(here, teacher).float()
            loss = -(likely * torch.log_softmax(logits, -1)).sum(-1)
            if shape.kind == "eagle":
                apart = smooth_l1_loss(here.float(), wanted[part].float(), reduction="none")
                loss = loss + FEATURE_SHARE * apart.mean(-1)
            loss = DECAY**level * (loss * counts_here).sum() / counts[level].sum()
            loss.backward()
            total += float(loss.detach())
            if level == 0:
                hits += int(((logits.argmax(-1) == truth.argmax(-1)) & counts_here).sum())
    torch.autograd.backward(steps, [features.grad for features in levels])
    return total, hits / max(1, int(counts[0].sum()))


def counted(rows: TextRows, level: int) -> torch.Tensor:
    """Which pairs [B, T - 1] of a level count: those whose guesses are of a row's text.

    Pair p of level i hangs below the root p + 1 - i, and guesses token p + 2; there is no guess
    of what follows the last token.
    """
    pairs = torch.arange(rows.tokens.shape[1] - 1)
    begins = torch.clamp(rows.starts, min=0)[:, None] + level - 1
    return (pairs >= torch.clamp(begins, min=level)) & (pairs + 2 < rows.ends[:, None])


def chosen_vocabulary(rows: TextRows, size: int, vocab: int) -> torch.Tensor | None:
    """The `size` most frequent tokens of the text, ascending, int64; None if that is all."""
    if size >= vocab:
        return None
    frequent = torch.bincount(counted_tokens(rows), minlength=vocab)
    return frequent.argsort(descending=True, stable=True)[:size].sort().values
