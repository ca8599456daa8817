"""Training an EAGLE head: losses, steps, and a checkpoint from which a stopped run goes on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss

from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.shape import HeadShape
from edgespec.errors import ModelError
from edgespec.training.muon import Muon
from edgespec.training.start import begin
from edgespec.training.teacher import Teacher
from edgespec.training.texts import Rows
from edgespec.training.unrolled import unrolled

DECAY = 0.8
"""What a level of the tree counts against the one above it (EAGLE-3's code)."""

FEATURE_SHARE = 0.1
"""Of the loss on features against that on tokens, for EAGLE-1 and EAGLE-2."""


_FIRST_ROWS = 128  # from which a head begins
_MOST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train. `batch` rows a step; `unroll` levels; `rate`: the peak of the learning rate;
    `low`: whether to compute in bfloat16 where that pays."""

    steps: int
    batch: int
    unroll: int
    rate: float
    low: bool
    seed: int = 0
    warmup: int = 20
    save_seconds: float = 60.0

    def rate_at(self, step: int) -> float:
        """A straight line up, then a half cosine down to a fiftieth."""
        rising = min(1.0, (step + 1) / self.warmup)
        falling = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps)))
        return self.rate * rising * max(0.02, falling)


class Student(nn.Module):
    """A head in training, with the output matrix if it has one of its own."""

    def __init__(self, shape: HeadShape, kept: torch.Tensor | None) -> None:
        """`kept` int64 [vocab]: the base's tokens that the head scores, None for all of them."""
        super().__init__()
        self.head = EagleHead(shape)
        self.kept = kept
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False) if shape.own_head else None

    def logits(self, features: torch.Tensor, teacher: Teacher) -> torch.Tensor:
        """Logits [.., vocab] behind features that came out of the layer."""
        rows = self.head.outgoing(features)
        return teacher.logits(rows) if self.lm_head is None else self.lm_head(rows)

    def start(self, teacher: Teacher, rows: Rows, batch: int) -> None:
        """Begin with what `rows` say at once (see start.begin)."""
        begin(self.head, teacher, rows, batch)
        if self.lm_head is not None:
            with torch.no_grad():
                matrix = teacher.weights["lm_head.weight"]
                self.lm_head.weight.copy_(matrix if self.kept is None else matrix[self.kept])


class Trainer:
    """The loop over rows of text, and its checkpoint in the output folder."""

    def __init__(self, teacher: Teacher, student: Student, settings: Settings, out: Path) -> None:
        self.teacher, self.student, self.settings = teacher, student, settings
        self.step = 0
        self._file = out / "checkpoint.pt"
        self._optimizers = self._made_optimizers()

    def resume(self, rows: Rows) -> bool:
        """Take up the checkpoint, or begin with `rows` where there is none.

        Raises ModelError for a checkpoint of another run.
        """
        if not self._file.exists():
            self._begin(rows)
            return False
        try:
            state = torch.load(self._file, map_location=self.teacher.device, weights_only=True)
            self.student.load_state_dict(state["student"])
            for optimizer, known in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(known)
            self.step = int(state["step"])
        except Exception as error:  # torch raises many kinds for a file that does not fit
            raise ModelError(
                f"cannot go on from {self._file} ({error}); it is damaged or of another run: "
                "delete it, or choose another --out"
            ) from error
        return True

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        partial = self._file.with_suffix(".part")
        state = {
            "student": self.student.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.step,
        }
        torch.save(state, partial)
        os.replace(partial, self._file)

    def run(self, rows: Rows, say: Callable[[int, float, float], None]) -> None:
        """Train to the last step, saving now and then and at the end, also when interrupted.

        `say` hears the step, the loss, and the share of first guesses that are the base's.
        """
        saved = time.monotonic()
        try:
            while self.step < self.settings.steps:
                loss, right = self._one_step(rows)
                self.step += 1
                say(self.step, loss, right)
                if time.monotonic() - saved > self.settings.save_seconds:
                    self.save()
                    saved = time.monotonic()
        finally:
            self.save()

    def _one_step(self, rows: Rows) -> tuple[float, float]:
        settings = self.settings
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.rate_at(self.step)
        batch = rows.take(_chosen(len(rows), self.step, settings))
        with torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=settings.low):
            loss, right = self._losses(batch)
        self.student.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), _MOST_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.detach()), right

    def _begin(self, rows: Rows) -> None:
        first = rows.take(torch.arange(min(len(rows), _FIRST_ROWS)))
        self.student.start(self.teacher, first, self.settings.batch)

    def _made_optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizers(self.student, self.settings.rate)

    def _losses(self, batch: Rows) -> tuple[torch.Tensor, float]:
        return losses(self.student, self.teacher, batch, self.settings.unroll)


def optimizers(student: Student, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the layer's matrices, AdamW for all else."""
    named = list(student.named_parameters())
    inner = [w for name, w in named if w.dim() == 2 and not name.startswith("lm_head")]
    outer = [w for name, w in named if w.dim() != 2 or name.startswith("lm_head")]
    return [Muon(inner, rate), torch.optim.AdamW(outer, rate, betas=(0.9, 0.95), weight_decay=0.0)]


def losses(
    student: Student, teacher: Teacher, rows: Rows, unroll: int
) -> tuple[torch.Tensor, float]:
    """The loss over all levels, and the share of the first level's best guesses that are right."""
    device, shape = teacher.device, student.head.shape
    tokens = rows.tokens.to(device, torch.int64)
    lesson = teacher.read(tokens, shape.taps)
    given = lesson.hidden if lesson.taps is None else lesson.taps
    wanted = lesson.hidden[:, 1:]
    with torch.no_grad():
        truth = teacher.logits(wanted).float()
        truth = truth if student.kept is None else truth[..., student.kept]
        likely = torch.softmax(truth, -1)
    total = torch.zeros((), device=device)
    right = 0.0
    steps = unrolled(student.head, given[:, :-1], teacher.embedded(tokens[:, 1:]), unroll)
    for level, features in enumerate(steps):
        counts = counted(rows, level).to(device)
        logits = student.logits(features, teacher).float()
        surprise = -(likely * torch.log_softmax(logits, -1)).sum(-1)
        loss = (surprise * counts).sum() / counts.sum()
        if shape.kind == "eagle":
            apart = smooth_l1_loss(features.float(), wanted.float(), reduction="none").mean(-1)
            loss = loss + FEATURE_SHARE * (apart * counts).sum() / counts.sum()
        total = total + DECAY**level * loss
        if level == 0:
            hits = logits.argmax(-1) == truth.argmax(-1)
            right = float((hits * counts).sum() / counts.sum())
    return total, right


def counted(rows: Rows, level: int) -> torch.Tensor:
    """Which pairs [B, T - 1] of a level count: those whose guesses are of a row's text.

    Pair p of level i hangs below the root p + 1 - i, and guesses token p + 2; what follows the
    last token is guessed by nobody.
    """
    pairs = torch.arange(rows.tokens.shape[1] - 1)
    begins = torch.clamp(rows.starts, min=0)[:, None] + level - 1
    return (pairs >= torch.clamp(begins, min=level)) & (pairs + 2 < rows.ends[:, None])


def _chosen(count: int, step: int, settings: Settings) -> torch.Tensor:
    """The rows of a step: every row once an epoch, in an order that the seed alone decides."""
    first = step * settings.batch
    index = torch.arange(first, first + settings.batch)
    epochs = index // count
    chosen = torch.empty_like(index)
    for epoch in epochs.unique().tolist():
        order = torch.randperm(
            count, generator=torch.Generator().manual_seed(settings.seed * 100_003 + epoch)
        )
        here = epochs == epoch
        chosen[here] = order[index[here] % count]
    return chosen


def chosen_vocabulary(rows: Rows, size: int, vocab: int) -> torch.Tensor | None:
    """The `size` most frequent tokens of the text, ascending, int64; None if that is all."""
    if size >= vocab:
        return None
    frequent = torch.bincount(rows.tokens.flatten().long(), minlength=vocab)
    return frequent.argsort(descending=True, stable=True)[:size].sort().values
