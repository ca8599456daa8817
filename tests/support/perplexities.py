"""Perplexity of a model, from any source of its tensors, on GSM8K's problems with their answers."""

from __future__ import annotations

import json
import math
import re
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.hub import local_folder
from edgespec.model.source import TensorSource
from edgespec.model.tokenizer import Tokenizer
from edgespec.model.tree_attention import tree_mask

BUNDLED_TEXTS = resources.files("edgespec") / "bench/prompts/gsm8k-test-40.jsonl"


def texts_of(file: Path | None) -> list[str]:
    """One text for each line of a JSON lines file with `question` and `answer`; None: bundled."""
    lines = (file or BUNDLED_TEXTS).read_text("utf-8").splitlines()
    # Answers are without the calculator's notes, which stand in << >>.
    return [
        f"Question: {record['question']}\nAnswer: {re.sub('<<.*?>>', '', record['answer'])}"
        for record in map(json.loads, lines)
    ]


def sequences(model: str, texts: list[str], longest: int, tokens: int) -> list[list[int]]:
    """Texts as token ids, each cut to `longest`, until `tokens` can be predicted; 0: all."""
    tokenizer, count = Tokenizer(local_folder(model)), 0
    made: list[list[int]] = []
    for text in texts:
        if tokens and count >= tokens:
            break
        made.append(tokenizer.encode(text)[:longest])
        count += len(made[-1]) - 1
    return made


def perplexity(
    source: TensorSource,
    ends: TensorSource,
    dtype: str,
    texts: list[list[int]],
    cache_dtype: str = "",
) -> float:
    """exp of the mean cross-entropy of every token behind the first of its text.

    `source` has the layers as they are to be held, `ends` the output head of the same model.
    """
    block = Block(source, 0, source.layers, dtype, cache_dtype=cache_dtype)
    head = OutputHead(ends, dtype)
    loss, count = 0.0, 0
    for text in texts:
        tokens, length = torch.tensor(text), len(text)
        mask = tree_mask(0, np.tri(length, dtype=np.bool_))
        hidden = block.forward(tokens, torch.arange(length), block.new_cache(length), mask)
        assert hidden is not None, "it is never stopped"
        logits = head.logits(hidden[:-1]).double()
        loss += float(cross_entropy(logits, tokens[1:], reduction="sum"))
        count += length - 1
    return math.exp(loss / count)
