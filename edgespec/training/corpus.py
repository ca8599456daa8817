"""Training corpus: the base, its own answers and rows of a text file, some of them held out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.errors import ConfigError
from edgespec.model.hub import local_folder
from edgespec.model.template_process import render_apart
from edgespec.model.tensors import best_device
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.answers import OwnAnswers, rows_of
from edgespec.training.loop import Remaining, TrainingSettings
from edgespec.training.teacher import KeptRows, Teacher
from edgespec.training.texts import Document, TextRows, documents, encoded, is_held_out, packed

_CHECKED_ROWS = 96
_PROMPT = 32  # tokens of a document that the base continues
_LEAST_ANSWER = 16


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to train on: the base's folder, the text file, the folder to write, tokens of a row, and
    how many rows at most are of the file, and of the base's own answers."""

    base: Path
    text: Path
    out: Path
    settings: TrainingSettings
    row_length: int
    text_rows: int
    own_rows: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows to train on; and the base's own answers after held-out documents, to measure on: greedy
    ones, and sampled ones."""

    trained: TextRows
    greedy: TextRows
    sampled: TextRows


def loaded(
    plan: TrainingPlan, say: Callable[[str], None], dtype: torch.dtype
) -> tuple[Teacher, Tokenizer]:
    """The base of a run and its tokenizer; what follows draws by the plan's seed."""
    torch.manual_seed(plan.settings.seed)
    say("loading the base")
    teacher, tokenizer = (
        Teacher(plan.base, best_device(), dtype),
        Tokenizer(local_folder(plan.base)),
    )
    render_apart(tokenizer)
    return teacher, tokenizer


def prepared(
    plan: TrainingPlan,
    tokenizer: Tokenizer,
    teacher: Teacher,
    say: Callable[[str], None],
    kept_rows: KeptRows | None = None,
) -> Corpus:
    """The rows of a run; the base's own are made first, where they are not there yet. `kept_rows`:
    where what the base computes meanwhile is kept.

    The base answers conversations by its chat template, from the whole prompt on, and continues
    the beginnings of other texts; half of that greedily, half sampled. Raises ConfigError for a
    file that is too short, or rows that the base cannot read.
    """
    texts = list(documents(plan.text))
    random.Random(plan.settings.seed).shuffle(texts)
    end = min(tokenizer.eos_ids) if tokenizer.eos_ids else 0
    length = plan.row_length
    limit = int(getattr(teacher.config, "max_position_embeddings", length))
    if not _PROMPT < length <= limit:
        raise ConfigError(f"rows of {length} tokens: give {_PROMPT + 1} to {limit}")
    say(f"reading {plan.text}")
    kept = [document for document in texts if not is_held_out(document.text)]
    plain = [document.text for document in kept if not document.messages]
    rows = packed(encoded(plain, tokenizer, end), length, plan.text_rows)
    prompts = _openings(kept, tokenizer, length, plan.own_rows, say)
    held_out = [document for document in texts if is_held_out(document.text)]
    checks = _openings(held_out, tokenizer, length, _CHECKED_ROWS, say)
    if not len(rows) + len(prompts) or len(checks) < 2:
        raise ConfigError(
            f"{plan.text} is too short: it has {len(rows)} rows of {length} tokens and "
            f"{len(prompts)} prompts to train on, and {len(checks)} documents of {_PROMPT} tokens "
            "held out; give more text"
        )
    file, seed = plan.out / "answers.jsonl", plan.settings.seed
    answers = OwnAnswers(file, teacher, length, end, seed, kept_rows)
    checked = answers.to(checks, say)
    own = answers.to(prompts, say) if prompts else []
    trained = rows.joined(rows_of(own, length, end)) if own else rows
    measured = (rows_of([a for a in checked if a.sampled == one], length, end) for one in (0, 1))
    return Corpus(trained, *measured)


def _openings(
    texts: Sequence[Document],
    tokenizer: Tokenizer,
    length: int,
    most: int,
    say: Callable[[str], None],
) -> list[list[int]]:
    """What the base answers: conversations up to there, and the first tokens of texts that are
    long enough; none twice."""
    found: dict[tuple[int, ...], None] = {}
    left = Remaining(min(most, len(texts)))
    for document in texts:
        if len(found) == most:
            break
        say(f"reading prompts: {left}")
        if document.messages:
            ids = tokenizer.encode_chat(document.messages)
            fits = len(ids) <= length - _LEAST_ANSWER
        else:
            ids = tokenizer.encode(document.text)[:_PROMPT]
            fits = len(ids) == _PROMPT
        if fits and tuple(ids) not in found:
            found[tuple(ids)] = None
            left.done(1)
    return [list(ids) for ids in found]
