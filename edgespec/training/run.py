"""One training run of a draft head: text, the base's own texts, steps, figures, and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.dspark.format import is_head
from edgespec.drafting.dspark.format import read_head as read_one_pass
from edgespec.drafting.eagle.shape import Kind
from edgespec.errors import ConfigError
from edgespec.files import write_whole
from edgespec.model.hub_cache import model_of
from edgespec.model.model_config import ModelConfig
from edgespec.training.corpus import Corpus, TrainingPlan, loaded, prepared
from edgespec.training.dspark import (
    DSparkStudent,
    DSparkTrainer,
    taps_of,
)
from edgespec.training.dspark import shape_for as shape_for_dspark
from edgespec.training.eagle import EagleTrainer, Student, chosen_vocabulary, shape_for
from edgespec.training.evaluate import (
    RANKS,
    Agreement,
    dspark_agreement,
    eagle_agreement,
    ppd_agreement,
)
from edgespec.training.loop import Trainer
from edgespec.training.ppd import PPDTrainer, PPDVectors
from edgespec.training.teacher import KeptRows
from edgespec.training.texts import TextRows, counted_tokens

_LEVELS_MEASURED = 5
_FIRST_TEXT = "Next {} word"  # whose vectors prompt tokens begin as (PPD's code), from 2 on


@dataclass(frozen=True, slots=True)
class EaglePlan(TrainingPlan):
    """A run of an EAGLE head; `vocab`: tokens that an EAGLE-3 head scores, 0 for all."""

    kind: Kind
    vocab: int = 0


@dataclass(frozen=True, slots=True)
class DSparkPlan(TrainingPlan):
    """A run of a one-pass head: `layers` with MLPs of `intermediate` (0: the base's), a block of
    `block` slots, a Markov head of `rank`, `vocab` tokens that it scores (0: all); `anchors`
    blocks in a row of a step. `start`: the folder of a head to begin with, whose shape counts."""

    layers: int
    block: int
    rank: int
    intermediate: int
    vocab: int
    anchors: int
    start: Path | None = None


@dataclass(frozen=True, slots=True)
class PPDPlan(TrainingPlan):
    """A run of prompt tokens: `depth` tokens ahead, `copies` vectors for each, `chains` of them in
    every row of a step."""

    depth: int
    copies: int
    chains: int


def train_eagle(plan: EaglePlan, say: Callable[[str], None], dtype: torch.dtype) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the head; return its figures."""
    teacher, tokenizer = loaded(plan, say, dtype)
    corpus = prepared(plan, tokenizer, teacher, say)
    whole = int(teacher.config.vocab_size)
    kept = None
    if plan.kind == "eagle3" and plan.vocab:
        kept = chosen_vocabulary(corpus.trained, plan.vocab, whole)
    shape = shape_for(plan.kind, teacher.config, whole if kept is None else len(kept))
    student = Student(shape, kept).to(teacher.device)
    trainer = EagleTrainer(teacher, student, plan.settings, plan.out)
    trainer.run(corpus.trained, say)

    def measured(rows: TextRows) -> Agreement:
        return eagle_agreement(student, teacher, rows, _LEVELS_MEASURED, say)

    return _figures(plan, trainer, corpus, plan.kind, {}, measured)


def train_dspark(
    plan: DSparkPlan, say: Callable[[str], None], dtype: torch.dtype
) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the head; return its figures."""
    teacher, tokenizer = loaded(plan, say, dtype)
    config = teacher.config
    taps = taps_of(int(config.num_hidden_layers))
    # A GPU computes rows sooner than a disk gives them.
    kept_rows = None
    if teacher.device.type == "cpu":
        kept_rows = KeptRows(plan.out, plan.row_length, taps, int(config.hidden_size))
    corpus = prepared(plan, tokenizer, teacher, say, kept_rows)
    student = _one_pass(plan, config, corpus).to(teacher.device)
    is_new = plan.start is None
    trainer = DSparkTrainer(
        teacher, student, plan.settings, plan.out, plan.anchors, is_new, kept_rows
    )
    trainer.run(corpus.trained, say)

    def measured(rows: TextRows) -> Agreement:
        with torch.autocast(teacher.device.type, torch.bfloat16, enabled=plan.settings.low):
            return dspark_agreement(student, teacher, rows, student.head.shape.depths, say)

    has = student.head.shape
    shape = {"layers": has.layers, "block": has.block, "rank": has.markov_rank, "vocab": has.vocab}
    shape |= {"anchors": plan.anchors, "started": plan.start is not None}
    return _figures(plan, trainer, corpus, "dspark", shape, measured)


def _one_pass(plan: DSparkPlan, config: ModelConfig, corpus: Corpus) -> DSparkStudent:
    """A new head, or that of the folder to begin with."""
    if plan.start is not None:
        return _written(plan.start, config)
    whole = int(config.vocab_size)
    kept = chosen_vocabulary(corpus.trained, plan.vocab or whole, whole)
    kept = torch.arange(whole) if kept is None else kept
    sizes = (plan.layers, plan.block, plan.rank, plan.intermediate)
    return DSparkStudent(shape_for_dspark(config, len(kept), *sizes), kept)


def _written(folder: Path, config: ModelConfig) -> DSparkStudent:
    """A head that `edgespec train` wrote."""
    none = ConfigError(
        f"{folder} is no head that edgespec train wrote; begin with one of those, or without "
        "--start"
    )
    if not is_head(folder):
        raise none
    whole = int(config.vocab_size)
    files = read_one_pass(folder, int(config.hidden_size), whole, int(config.num_hidden_layers))
    shape = files.shape
    if shape.windows:
        raise none
    kept = torch.arange(whole) if files.tokens is None else files.tokens
    student = DSparkStudent(shape, kept, whole)
    weights = {f"head.{name}": weight for name, weight in files.weights.items()}
    for name, matrix in (("embed_tokens", files.embedding), ("lm_head", files.matrix)):
        if matrix is not None:
            weights[f"{name}.weight"] = matrix
    student.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return student


def train_ppd(plan: PPDPlan, say: Callable[[str], None], dtype: torch.dtype) -> dict[str, Any]:
    """Train, or go on with a run that was stopped; write the folder; return its figures."""
    teacher, tokenizer = loaded(plan, say, dtype)
    teacher.require_vectors()
    corpus = prepared(plan, tokenizer, teacher, say)
    text = " ".join(_FIRST_TEXT.format(ahead + 2) for ahead in range(plan.depth))
    first = teacher.embedded(torch.tensor(tokenizer.encode(text), device=teacher.device))
    vectors = PPDVectors(plan.depth, plan.copies, first).to(teacher.device)
    name = model_of(plan.base)
    trainer = PPDTrainer(teacher, vectors, plan.settings, plan.out, plan.chains, name)
    trainer.run(corpus.trained, say)

    def measured(rows: TextRows) -> Agreement:
        return ppd_agreement(vectors, teacher, rows, say)

    shape = {"depth": plan.depth, "copies": plan.copies, "chains": plan.chains}
    return _figures(plan, trainer, corpus, "ppd", shape, measured)


def _figures(
    plan: TrainingPlan,
    trainer: Trainer,
    corpus: Corpus,
    kind: str,
    shape: dict[str, int],
    measured: Callable[[TextRows], Agreement],
) -> dict[str, Any]:
    """The figures of a run, as training.json, which is written, and --json have them; `shape`: of
    what was trained, and what else only its kind has."""
    at_zero, at_one = measured(corpus.greedy), measured(corpus.sampled)
    figures = {
        "kind": kind,
        "base": model_of(plan.base),
        **shape,
        "settings": asdict(plan.settings),
        "row_length": plan.row_length,
        "own_rows": plan.own_rows,
        "rows": len(corpus.trained),
        "tokens": len(counted_tokens(corpus.trained)),
        "steps": trainer.step,
        "rate_lowered_to": trainer.factor,
        **_shares(at_zero),
        "at_temperature_1": _shares(at_one),
    }
    # What the clock says is in the file alone: the same run gives the same figures.
    text = json.dumps({**figures, "seconds": round(trainer.seconds)}, indent=2) + "\n"
    write_whole(plan.out / "training.json", text)
    return figures


def _shares(found: Agreement) -> dict[str, Any]:
    return {
        "held_out_tokens": found.tokens,
        "agreement_by_level": {
            f"top{rank}": [round(share, 4) for share in found.by_level[rank]] for rank in RANKS
        },
        "tokens_per_trip": {f"top{rank}": round(found.trip[rank], 3) for rank in RANKS},
        **({} if found.shown is None else {"shown": _shares(found.shown)}),
    }
