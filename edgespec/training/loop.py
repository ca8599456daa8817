"""Training loop: steps over rows of text, and a checkpoint from which a stopped run goes on."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgespec.errors import ModelError
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

DECAY = 0.8
"""What a level counts against the one above it (EAGLE-3's code; PPD §3.4)."""

_MOST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class TrainingSettings:
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


class Trainer(ABC):
    """The loop over rows of text, and its checkpoint in the output folder."""

    def __init__(
        self,
        teacher: Teacher,
        student: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        settings: TrainingSettings,
        out: Path,
    ) -> None:
        """`student`: what is trained, by `optimizers`."""
        self.teacher, self.settings = teacher, settings
        self.step = 0
        self._student, self._optimizers = student, optimizers
        self._file = out / "checkpoint.pt"

    @abstractmethod
    def begin(self, rows: TextRows) -> None:
        """Set the student to what `rows` say at once, before the first step."""

    @abstractmethod
    def losses(self, batch: TextRows) -> tuple[torch.Tensor, float]:
        """The loss of a step, and the share of first guesses that are the base's."""

    def _resume(self) -> None:
        try:
            state = torch.load(self._file, map_location=self.teacher.device, weights_only=True)
            self._student.load_state_dict(state["student"])
            for optimizer, known in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(known)
            self.step = int(state["step"])
        except Exception as error:  # torch raises many kinds for a file that does not fit
            raise ModelError(
                f"cannot go on from {self._file} ({error}); it is damaged or of another run: "
                "delete it, or choose another --out"
            ) from error

    def _save(self) -> None:
        state = {
            "student": self._student.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.step,
        }
        write_state(state, self._file)

    def run(self, rows: TextRows, say: Callable[[str], None]) -> None:
        """Train to the last step, from the checkpoint on if there is one. Saves now and then and at
        the end, also when interrupted. Raises ModelError for a checkpoint of another run."""
        if self._file.exists():
            self._resume()
            say(f"going on behind step {self.step}")
        else:
            self.begin(rows)
            say("beginning")
        saved, steps = time.monotonic(), self.settings.steps
        try:
            while self.step < steps:
                loss, right = self._one_step(rows)
                self.step += 1
                say(f"step {self.step} of {steps}: loss {loss:.3f}, first guess right {right:.3f}")
                if time.monotonic() - saved > self.settings.save_seconds:
                    self._save()
                    saved = time.monotonic()
        finally:
            self._save()

    def _one_step(self, rows: TextRows) -> tuple[float, float]:
        settings = self.settings
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.rate_at(self.step)
        batch = rows.take(_chosen(len(rows), self.step, settings))
        with torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=settings.low):
            loss, right = self.losses(batch)
        self._student.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), _MOST_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()
        return float(loss.detach()), right


def _chosen(count: int, step: int, settings: TrainingSettings) -> torch.Tensor:
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


def write_state(state: dict[str, Any], file: Path) -> None:
    """Write a checkpoint, whole or not at all."""
    partial = file.with_suffix(".part")
    torch.save(state, partial)
    os.replace(partial, file)
