"""Training corpus: rows of a text file and of the base's own texts, some of them held out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.errors import ConfigError
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.loop import TrainingSettings, write_state
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows, documents, encoded, is_held_out, packed

_CHECKED_ROWS = 48
_PROMPT = 32  # tokens of a document that the base continues
_BATCH = 64


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What to train on: the base's folder, the text file, the folder to write, tokens of a row, and
    how many rows at most are of the file, and of the base's own greedy text (as many at least as
    are held out)."""

    base: Path
    text: Path
    out: Path
    settings: TrainingSettings
    row_length: int
    text_rows: int
    own_rows: int


def prepared(
    plan: TrainingPlan, tokenizer: Tokenizer, teacher: Teacher, say: Callable[[str], None]
) -> tuple[TextRows, TextRows]:
    """Rows to train on, and the base's own texts to measure on, after held-out documents.

    Raises ConfigError for a file that is too short, or rows that the base cannot read.
    """
    texts = list(documents(plan.text))
    random.Random(plan.settings.seed).shuffle(texts)
    end = min(tokenizer.eos_ids) if tokenizer.eos_ids else 0
    length = plan.row_length
    limit = int(getattr(teacher.config, "max_position_embeddings", length))
    if not _PROMPT < length <= limit:
        raise ConfigError(f"rows of {length} tokens: give {_PROMPT + 1} to {limit}")
    say(f"reading {plan.text}")
    kept = [text for text in texts if not is_held_out(text)]
    rows = packed(encoded(kept, tokenizer, end), length, plan.text_rows)
    prompts = _beginnings(encoded(kept, tokenizer, end), length, plan.own_rows)
    held_out = (text for text in texts if is_held_out(text))
    checks = _beginnings(encoded(held_out, tokenizer, end), length, _CHECKED_ROWS)
    if not len(rows) or not len(checks):
        raise ConfigError(
            f"{plan.text} is too short: it has {len(rows)} rows of {length} tokens to train on "
            f"and {len(checks)} documents of {_PROMPT} tokens held out; give more text"
        )
    own = _own(plan.out, teacher, prompts.joined(checks), end, say)
    index = torch.arange(len(own))
    return rows.joined(own.take(index[: len(prompts)])), own.take(index[len(prompts) :])


def _beginnings(encodings: Iterable[torch.Tensor], length: int, most: int) -> TextRows:
    """One row a document that is long enough, its first tokens; the rest is filled up with 0."""
    rows: list[torch.Tensor] = []
    for document in encodings:
        if len(rows) == most:
            break
        if len(document) > _PROMPT:
            row = torch.zeros(length, dtype=torch.int32)
            row[:_PROMPT] = document[:_PROMPT]
            rows.append(row)
    return packed(rows, length, most)


def _own(
    out: Path, teacher: Teacher, prompts: TextRows, end: int, say: Callable[[str], None]
) -> TextRows:
    """The base's own continuations of the beginnings of `prompts`, as long as these; from the run
    before if it got as far as that."""
    file = out / "own_texts.pt"
    if file.exists():
        known = torch.load(file, weights_only=True)
        if torch.equal(known.pop("prompts"), prompts.tokens):
            return TextRows(**known)
    parts: list[TextRows] = []
    for tokens in prompts.tokens.split(_BATCH):
        say(f"own texts: {len(parts) * _BATCH} of {len(prompts)}")
        parts.append(teacher.continued(tokens[:, :_PROMPT], tokens.shape[1], end))
    own = parts[0].joined(*parts[1:])
    state = {"tokens": own.tokens, "starts": own.starts, "ends": own.ends}
    write_state({"prompts": prompts.tokens, **state}, file)
    return own
