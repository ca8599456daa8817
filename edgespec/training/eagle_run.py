"""One training run of an EAGLE head: text, the base's own texts, steps, figures, and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.eagle.format import write_head
from edgespec.drafting.eagle.shape import HeadShape, Kind
from edgespec.model.device import best_device
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.corpus import Corpus, prepared
from edgespec.training.eagle import EagleTrainer, Student, chosen_vocabulary
from edgespec.training.evaluate import RANKS, Agreement, agreement
from edgespec.training.loop import TrainingSettings
from edgespec.training.start import shape_for
from edgespec.training.teacher import Teacher


@dataclass(frozen=True, slots=True)
class EaglePlan:
    """What to train. `own_rows`: rows of the base's own greedy text among those of the file, at
    least as many as are held out; `vocab`: tokens that an EAGLE-3 head scores, 0 for all."""

    base: Path
    text: Path
    out: Path
    kind: Kind
    settings: TrainingSettings
    row_length: int = 256
    text_rows: int = 20_000
    own_rows: int = 1024
    vocab: int = 0
    levels_measured: int = 5


def train(plan: EaglePlan, say: Callable[[str], None], dtype: torch.dtype) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the head; return its figures."""
    device = best_device()
    torch.manual_seed(plan.settings.seed)
    say("loading the base")
    teacher = Teacher(plan.base, device, dtype)
    corpus = Corpus(
        plan.text, plan.out, plan.settings.seed, plan.row_length, plan.text_rows, plan.own_rows
    )
    trained, checked = prepared(corpus, Tokenizer(plan.base), teacher, say)
    whole = int(teacher.config.vocab_size)
    kept = None
    if plan.kind == "eagle3" and plan.vocab:
        kept = chosen_vocabulary(trained, plan.vocab, whole)
    shape = shape_for(plan.kind, teacher.config, whole if kept is None else len(kept))
    student = Student(shape, kept).to(device)
    trainer = EagleTrainer(teacher, student, plan.settings, plan.out)
    say("beginning" if not trainer.resume(trained) else f"going on behind step {trainer.step}")
    trainer.run(trained, lambda step, loss, right: say(_line(plan, step, loss, right)))
    say("measuring on held-out text")
    measured = agreement(student, teacher, checked, plan.levels_measured)
    _write(plan, shape, student, teacher, measured)
    return figures(plan, measured)


def _line(plan: EaglePlan, step: int, loss: float, right: float) -> str:
    return f"step {step} of {plan.settings.steps}: loss {loss:.3f}, first guess right {right:.3f}"


def _write(
    plan: EaglePlan, shape: HeadShape, student: Student, teacher: Teacher, measured: Agreement
) -> None:
    tensors = {name: weight.detach() for name, weight in student.head.state_dict().items()}
    if student.lm_head is not None:
        tensors["lm_head.weight"] = student.lm_head.weight.detach()
    vocab, positions = teacher.config.vocab_size, teacher.config.max_position_embeddings
    write_head(plan.out, shape, tensors, student.kept, int(vocab), int(positions))
    text = json.dumps(figures(plan, measured), indent=2) + "\n"
    (plan.out / "training.json").write_text(text, encoding="utf-8")


def figures(plan: EaglePlan, measured: Agreement) -> dict[str, Any]:
    """The figures of a run, as training.json and --json have them."""
    return {
        "kind": plan.kind,
        "base": plan.base.name,
        "settings": asdict(plan.settings),
        "row_length": plan.row_length,
        "own_rows": plan.own_rows,
        "held_out_tokens": measured.tokens,
        "agreement_by_level": {
            f"top{rank}": [round(share, 4) for share in measured.by_level[rank]] for rank in RANKS
        },
        "tokens_per_trip": {f"top{rank}": round(measured.trip[rank], 3) for rank in RANKS},
    }
