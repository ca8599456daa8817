"""One training run of a draft head: text, the base's own texts, steps, figures, and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from edgespec.drafting.eagle.format import write_head
from edgespec.drafting.eagle.shape import Kind
from edgespec.drafting.ppd.format import PPDTokens, write_ppd_tokens
from edgespec.model.device import best_device
from edgespec.model.hub import local_folder
from edgespec.model.hub_cache import model_of
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.corpus import TrainingPlan, prepared
from edgespec.training.eagle import EagleTrainer, Student, chosen_vocabulary
from edgespec.training.evaluate import RANKS, Agreement, eagle_agreement, ppd_agreement
from edgespec.training.ppd import PPDTrainer, PPDVectors
from edgespec.training.start import shape_for
from edgespec.training.teacher import Teacher

_LEVELS_MEASURED = 5
_FIRST_TEXT = "Next {} word"  # whose vectors prompt tokens begin as (PPD's code), from 2 on


@dataclass(frozen=True, slots=True)
class EaglePlan(TrainingPlan):
    """A run of an EAGLE head; `vocab`: tokens that an EAGLE-3 head scores, 0 for all."""

    kind: Kind
    vocab: int = 0


@dataclass(frozen=True, slots=True)
class PPDPlan(TrainingPlan):
    """A run of prompt tokens: `depth` tokens ahead, `copies` vectors for each, `chains` of them in
    every row of a step."""

    depth: int
    copies: int
    chains: int


def train_eagle(plan: EaglePlan, say: Callable[[str], None], dtype: torch.dtype) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the head; return its figures."""
    teacher, tokenizer = _loaded(plan, say, dtype)
    trained, checked = prepared(plan, tokenizer, teacher, say)
    whole = int(teacher.config.vocab_size)
    kept = None
    if plan.kind == "eagle3" and plan.vocab:
        kept = chosen_vocabulary(trained, plan.vocab, whole)
    shape = shape_for(plan.kind, teacher.config, whole if kept is None else len(kept))
    student = Student(shape, kept).to(teacher.device)
    EagleTrainer(teacher, student, plan.settings, plan.out).run(trained, say)
    say("measuring on held-out text")
    measured = eagle_agreement(student, teacher, checked, _LEVELS_MEASURED)
    tensors = {name: weight.detach() for name, weight in student.head.state_dict().items()}
    if student.lm_head is not None:
        tensors["lm_head.weight"] = student.lm_head.weight.detach()
    positions = int(teacher.config.max_position_embeddings)
    write_head(plan.out, shape, tensors, student.kept, whole, positions)
    return _figures(plan, measured, plan.kind, {})


def train_ppd(plan: PPDPlan, say: Callable[[str], None], dtype: torch.dtype) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the folder; return its figures."""
    teacher, tokenizer = _loaded(plan, say, dtype)
    teacher.require_vectors()
    trained, checked = prepared(plan, tokenizer, teacher, say)
    text = " ".join(_FIRST_TEXT.format(ahead + 2) for ahead in range(plan.depth))
    first = teacher.embedded(torch.tensor(tokenizer.encode(text), device=teacher.device))
    vectors = PPDVectors(plan.depth, plan.copies, first).to(teacher.device)
    PPDTrainer(teacher, vectors, plan.settings, plan.out, plan.chains).run(trained, say)
    say("measuring on held-out text")
    measured = ppd_agreement(vectors, teacher, checked)
    tokens = PPDTokens(plan.depth, plan.copies, vectors.table.detach())
    write_ppd_tokens(plan.out, tokens, model_of(plan.base))
    shape = {"depth": plan.depth, "copies": plan.copies, "chains": plan.chains}
    return _figures(plan, measured, "ppd", shape)


def _loaded(
    plan: TrainingPlan, say: Callable[[str], None], dtype: torch.dtype
) -> tuple[Teacher, Tokenizer]:
    torch.manual_seed(plan.settings.seed)
    say("loading the base")
    return Teacher(plan.base, best_device(), dtype), Tokenizer(local_folder(plan.base))


def _figures(
    plan: TrainingPlan, measured: Agreement, kind: str, shape: dict[str, int]
) -> dict[str, Any]:
    """The figures of a run, as training.json, which is written, and --json have them."""
    figures = {
        "kind": kind,
        "base": model_of(plan.base),
        **shape,
        "settings": asdict(plan.settings),
        "row_length": plan.row_length,
        "own_rows": plan.own_rows,
        "held_out_tokens": measured.tokens,
        "agreement_by_level": {
            f"top{rank}": [round(share, 4) for share in measured.by_level[rank]] for rank in RANKS
        },
        "tokens_per_trip": {f"top{rank}": round(measured.trip[rank], 3) for rank in RANKS},
    }
    text = json.dumps(figures, indent=2) + "\n"
    (plan.out / "training.json").write_text(text, encoding="utf-8")
    return figures
