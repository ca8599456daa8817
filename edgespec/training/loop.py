"""Training loop: steps over rows of text, and a checkpoint from which a stopped run goes on."""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgespec.errors import ConfigError, ModelError
from edgespec.files import part_of, settle
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

DECAY = 0.8
"""What a level counts against the one above it (EAGLE-3's code; PPD §3.4)."""

_MOST_GRADIENT = 1.0
_ALIKE = 32  # batches whose rows are sorted by length together
_LEAST_FACTOR = 2.0**-8
_FEW = 5  # steps by which a course is judged at first
_SURE = 40  # steps by which a course is judged after the rate was lowered
_KEPT_OF_MEAN = 0.98


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


@dataclass(slots=True)
class LossCourse:
    """How the loss goes: its means over about the last ten and the last fifty steps, and the lowest
    that the latter was, once there were `sure` steps. Rows are not equally hard: the lowest mean of
    few steps is luck."""

    mean: float = math.nan
    slow_mean: float = math.nan
    lowest: float = math.inf
    steps: int = 0
    sure: int = _FEW

    def took(self, loss: float) -> None:
        self.steps += 1
        self.mean = self._moved(self.mean, loss, 0.1)
        self.slow_mean = self._moved(self.slow_mean, loss, 0.02)
        # From these steps on the course is judged by less: not by what was luck before.
        lowest = math.inf if self.steps in (_FEW, self.sure) else self.lowest
        self.lowest = min(lowest, self.slow_mean)

    def _moved(self, mean: float, loss: float, share: float) -> float:
        """The first few count alike; then an old one fades."""
        return loss if self.steps == 1 else mean + max(share, 1 / self.steps) * (loss - mean)

    @property
    def is_good(self) -> bool:
        """Whether a checkpoint is worth keeping."""
        few = self.steps < _FEW
        return math.isfinite(self.mean) and (few or not self.mean > 1.1 * self.lowest)

    @property
    def has_diverged(self) -> bool:
        """Whether the steps lead away: no number any more, or a quarter above the lowest mean, or
        much more while there are few steps."""
        most = 1.25 if self.steps >= self.sure else 1.5 if self.steps >= _FEW else 4.0
        return not math.isfinite(self.mean) or self.mean > most * self.lowest


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
        """`student`: what is trained, by `optimizers`, each of which keeps its groups' own share of
        the rate under "share" (1 if it is not there)."""
        self.teacher, self.settings = teacher, settings
        self.step = 0
        self.factor = 1.0
        """What the rate is lowered to after steps that led away."""
        self.seconds = 0.0
        """Of all steps so far, those of earlier runs too."""
        self._student, self._optimizers = student, optimizers
        self._mean: dict[str, torch.Tensor] = {}
        """The weights' running mean over about fifty steps: what is written is of the quality that
        the last, smallest steps give, wherever the run is."""
        self._course = LossCourse()
        self._file, self._log = out / "checkpoint.pt", out / "progress.jsonl"

    @abstractmethod
    def begin(self, rows: TextRows) -> None:
        """Set the student to what `rows` say at once, before the first step."""

    @abstractmethod
    def learn(self, batch: TextRows) -> tuple[float, float]:
        """Add a batch's gradients to the student's; the loss, and the share of first guesses that
        are the base's."""

    @abstractmethod
    def write(self) -> None:
        """Write the head as it is now."""

    def _resume(self) -> None:
        try:
            state = torch.load(self._file, map_location=self.teacher.device, weights_only=True)
            self._student.load_state_dict(state["student"])
            mean: dict[str, torch.Tensor] = state["mean"]
            self._mean = {name: mean[name] for name, _ in self._student.named_parameters()}
            for optimizer, known in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(known)
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            self.factor, self._course = float(state["factor"]), LossCourse(**state["course"])
        except Exception as error:  # torch raises many kinds for a file that does not fit
            raise ModelError(
                f"cannot go on from {self._file} ({error}); it is damaged or of another run: "
                "delete it, or choose another --out"
            ) from error

    def _save(self) -> None:
        """The checkpoint, and the head of it; not while the steps lead away."""
        if self.step and not self._course.is_good:
            return
        course = self._course
        state = {
            "student": self._student.state_dict(),
            "mean": self._mean,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "factor": self.factor,
            "course": {"mean": course.mean, "lowest": course.lowest, "steps": course.steps},
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_state(state, self._file)
        if self.step:
            self._write_mean()

    @torch.no_grad()
    def _average(self) -> None:
        """Count the weights of this step in their mean; the first steps count alike."""
        share = max(1 - _KEPT_OF_MEAN, 1 / (self.step + 1))
        for name, weight in self._student.named_parameters():
            self._mean[name].lerp_(weight, share)

    @torch.no_grad()
    def _take_mean(self) -> None:
        for name, weight in self._student.named_parameters():
            weight.copy_(self._mean[name])

    @torch.no_grad()
    def _write_mean(self) -> None:
        """Write the head with the mean weights."""
        newest = {name: weight.clone() for name, weight in self._student.named_parameters()}
        self._take_mean()
        self.write()
        for name, weight in self._student.named_parameters():
            weight.copy_(newest[name])

    def run(self, rows: TextRows, say: Callable[[str], None]) -> None:
        """Train to the last step, from the checkpoint on if there is one. Saves now and then and at
        the end, also when interrupted, and writes the head each time, with the weights' mean. That
        is what the student has in the end; if the last steps led away, that of the last checkpoint.

        Raises ModelError for a checkpoint of another run, and for steps that lead away at every
        rate.
        """
        if self._file.exists():
            self._resume()
            say(f"going on behind step {self.step}")
        else:
            self.begin(rows)
            named = self._student.named_parameters()
            self._mean = {name: weight.detach().clone() for name, weight in named}
            self._save()
            say("beginning")
        saved = began = time.monotonic()
        before, first = self.seconds, self.step
        order = RowOrder(rows, self.settings)
        try:
            while self.step < self.settings.steps:
                loss, right = self._one_step(rows.take(order.of(self.step)))
                self._course.took(loss)
                if self._course.has_diverged:
                    self._lower(say)
                    saved, first = time.monotonic(), min(first, self.step)
                    continue
                self.step += 1
                now = time.monotonic()
                self.seconds = before + now - began
                left = (now - began) / (self.step - first) * (self.settings.steps - self.step)
                self._note(loss, right)
                say(
                    f"step {self.step} of {self.settings.steps}: loss {loss:.3f}, first guess "
                    f"right {right:.3f}, {duration(left)} left"
                )
                if now - saved > self.settings.save_seconds:
                    self._save()
                    saved = time.monotonic()
        finally:
            self._save()
        if not self._course.is_good:
            self._resume()
            self._write_mean()
        self._take_mean()

    def _lower(self, say: Callable[[str], None]) -> None:
        """Go back to the checkpoint, and on with half the rate."""
        step, factor, seconds = self.step, self.factor / 2, self.seconds
        if factor < _LEAST_FACTOR:
            raise ModelError(
                f"the loss still rises at a rate of {self.settings.rate * self.factor:.1e} (step "
                f"{step + 1}); give a lower --rate, and check the text"
            )
        self._resume()
        self.factor, self.seconds = factor, seconds
        # Kept in the file: without it a run that is stopped now would lead away again.
        # The same rows come again: what was no more than their luck must not end the run.
        self._course = LossCourse(sure=_SURE)
        self._save()
        say(
            f"the loss rose at step {step + 1}: going on behind step {self.step} at "
            f"{self.settings.rate * factor:.1e}"
        )

    def _note(self, loss: float, right: float) -> None:
        """A line of progress.jsonl."""
        line = {"step": self.step, "seconds": round(self.seconds, 1)}
        line |= {"loss": round(loss, 4), "first_guess": round(right, 4)}
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _one_step(self, batch: TextRows) -> tuple[float, float]:
        settings = self.settings
        rate = settings.rate_at(self.step) * self.factor
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("share", 1.0)
        self._student.zero_grad()
        with torch.autocast(self.teacher.device.type, torch.bfloat16, enabled=settings.low):
            loss, right = self.learn(batch.trimmed())
        size = torch.nn.utils.clip_grad_norm_(self._student.parameters(), _MOST_GRADIENT)
        if not (math.isfinite(loss) and torch.isfinite(size)):
            return math.inf, right
        for optimizer in self._optimizers:
            optimizer.step()
        self._average()
        return loss, right


class RowOrder:
    """Which rows a step takes: every row once an epoch, those of a step about as long as each
    other, in an order that the seed alone decides."""

    def __init__(self, rows: TextRows, settings: TrainingSettings) -> None:
        self._lengths, self._batch, self._seed = rows.ends, settings.batch, settings.seed
        self._epoch, self._order = -1, torch.zeros(0, dtype=torch.int64)

    def of(self, step: int) -> torch.Tensor:
        """The rows of a step, int64 [batch]."""
        count = len(self._lengths)
        index = torch.arange(step * self._batch, (step + 1) * self._batch)
        return torch.stack([self._in_epoch(int(at) // count)[int(at) % count] for at in index])

    def _in_epoch(self, epoch: int) -> torch.Tensor:
        if epoch != self._epoch:
            dice = torch.Generator().manual_seed(self._seed * 100_003 + epoch)
            order = torch.randperm(len(self._lengths), generator=dice)
            parts = []
            for part in order.split(_ALIKE * self._batch):
                alike = part[self._lengths[part].argsort(stable=True)]
                batches = list(alike.split(self._batch))
                # The short one stays last, so that all others begin where a step begins.
                whole = len(batches) - (len(batches[-1]) < self._batch)
                mixed = torch.randperm(whole, generator=dice).tolist()
                parts += [batches[at] for at in mixed] + batches[whole:]
            self._epoch, self._order = epoch, torch.cat(parts)
        return self._order


def write_state(state: dict[str, Any], file: Path) -> None:
    """Write a checkpoint, whole or not at all."""
    torch.save(state, part_of(file))
    settle(part_of(file), file)


def muon(matrices: Iterable[torch.Tensor], rate: float) -> torch.optim.Optimizer:
    """Keller Jordan's optimiser of matrices, scaled to steps of AdamW's size (arXiv 2502.16982,
    §2.2). Raises ConfigError if torch has none."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"training needs torch 2.9 or newer, this is {torch.__version__}")
    return torch.optim.Muon(matrices, rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")


class Remaining:
    """Counts work, and says how far it is and how long the rest takes at the same speed."""

    def __init__(self, total: int, done: int = 0) -> None:
        """`total` pieces, `done` of which cost nothing: they were there."""
        self._total, self._done, self._given = total, done, done
        self._began = time.monotonic()

    def done(self, pieces: int) -> None:
        self._done += pieces

    @property
    def made(self) -> int:
        """Pieces that cost something."""
        return self._done - self._given

    def __str__(self) -> str:
        made = self.made
        said = f"{self._done} of {self._total}"
        if not made:
            return said
        seconds = (time.monotonic() - self._began) / made * (self._total - self._done)
        return f"{said}, {duration(seconds)} left"


def duration(seconds: float) -> str:
    """The time in words: 40 s, 12 min, 3 h 20 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
