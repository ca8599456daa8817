"""Training corpus: rows of a text file and of the base's own texts, some of them held out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.errors import ConfigError
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.teacher import Teacher, own_texts
from edgespec.training.texts import TextRows, documents, encoded, is_held_out, packed

_CHECKED_ROWS = 48
_PROMPT = 32  # tokens of a document that the base continues


@dataclass(frozen=True, slots=True)
class Corpus:
    """Where rows come from: the file, the run's folder, the seed of the order, tokens of a row, and
    how many rows at most are of the file, and of the base's own greedy text."""

    text: Path
    out: Path
    seed: int
    row_length: int
    text_rows: int
    own_rows: int


def prepared(
    corpus: Corpus, tokenizer: Tokenizer, teacher: Teacher, say: Callable[[str], None]
) -> tuple[TextRows, TextRows]:
    """Rows to train on, and the base's own texts to measure on, after held-out documents.

    Raises ConfigError for a file that is too short, or rows that the base cannot read.
    """
    texts = list(documents(corpus.text))
    random.Random(corpus.seed).shuffle(texts)
    end = min(tokenizer.eos_ids) if tokenizer.eos_ids else 0
    length = corpus.row_length
    limit = int(getattr(teacher.config, "max_position_embeddings", length))
    if not _PROMPT < length <= limit:
        raise ConfigError(f"rows of {length} tokens: give {_PROMPT + 1} to {limit}")
    say(f"reading {corpus.text}")
    kept = [text for text in texts if not is_held_out(text)]
    rows = packed(encoded(kept, tokenizer, end), length, corpus.text_rows)
    prompts = _beginnings(encoded(kept, tokenizer, end), length, corpus.own_rows)
    held_out = (text for text in texts if is_held_out(text))
    checks = _beginnings(encoded(held_out, tokenizer, end), length, _CHECKED_ROWS)
    if not len(rows) or not len(checks):
        raise ConfigError(
            f"{corpus.text} is too short: it has {len(rows)} rows of {length} tokens to train on "
            f"and {len(checks)} documents of {_PROMPT} tokens held out; give more text"
        )
    own = _own(corpus.out, teacher, prompts.joined(checks), end, say)
    checked = own.take(torch.arange(len(prompts), len(own)))
    return rows.joined(own.take(torch.arange(len(prompts)))), checked


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
    """The base's own texts, from the run before if it got as far as that."""
    file = out / "own_texts.pt"
    if file.exists():
        known = torch.load(file, weights_only=True)
        if torch.equal(known["prompts"], prompts.tokens):
            return TextRows(known["tokens"], known["starts"], known["ends"])
    own = own_texts(
        teacher, prompts, _PROMPT, end, lambda n: say(f"own texts: {n} of {len(prompts)}")
    )
    state = {"prompts": prompts.tokens, "tokens": own.tokens, "starts": own.starts}
    partial = file.with_suffix(".part")
    torch.save({**state, "ends": own.ends}, partial)
    os.replace(partial, file)
    return own
