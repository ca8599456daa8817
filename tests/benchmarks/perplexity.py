"""Perplexity of the bundled base model under each quantisation, on held-out text, as a table.

    python tests/benchmarks/perplexity.py

Every question and answer of edgespec/bench/prompts/gsm8k-test-40.jsonl, which the model was not
trained on, is one sequence; each token is predicted from those before it. float32, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from importlib import resources

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from edgespec.config import QUANTISATIONS
from edgespec.daemon.bundled_models import bundled
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.source import QuantisingSource
from edgespec.model.source import TensorSource
from edgespec.model.tokenizer import Tokenizer
from edgespec.model.tree_attention import tree_mask


def sequences(checkpoint: Checkpoint) -> list[list[int]]:
    """The held-out texts as token ids, cut to what the model can read at once."""
    tokenizer = Tokenizer(checkpoint.path)
    longest = int(checkpoint.config.max_position_embeddings)
    lines = (resources.files("edgespec") / "bench/prompts/gsm8k-test-40.jsonl").read_text("utf-8")
    records = [json.loads(line) for line in lines.splitlines()]
    # The model was trained on answers without the calculator's notes, which stand in << >>.
    texts = [
        f"Question: {record['question']}\nAnswer: {re.sub('<<.*?>>', '', record['answer'])}"
        for record in records
    ]
    return [tokenizer.encode(text)[:longest] for text in texts]


def perplexity(source: TensorSource, head: OutputHead, texts: list[list[int]]) -> float:
    """exp of the mean cross-entropy of every token behind the first of its text."""
    block = Block(source, 0, source.layers)
    loss, count = 0.0, 0
    for text in texts:
        tokens, length = torch.tensor(text), len(text)
        mask = tree_mask(0, np.tri(length, dtype=np.bool_))
        hidden = block.forward(tokens, torch.arange(length), block.new_cache(length), mask)
        assert hidden is not None
        logits = torch.from_numpy(head.logits(hidden[:-1])).double()
        loss += float(cross_entropy(logits, tokens[1:], reduction="sum"))
        count += length - 1
    return math.exp(loss / count)


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    checkpoint = Checkpoint(bundled("base"))
    texts, head = sequences(checkpoint), OutputHead(checkpoint)
    plain = perplexity(checkpoint, head, texts)
    predicted = sum(len(text) - 1 for text in texts)
    print(f"{predicted} tokens of {len(texts)} texts")
    print(f"{'quantisation':<12} {'perplexity':>10} {'loss':>8}")
    print(f"{'none':<12} {plain:>10.4f} {0:>8.2%}")
    for name, quantisation in QUANTISATIONS.items():
        if quantisation.kind == "none":
            continue
        try:
            found = perplexity(QuantisingSource(checkpoint, quantisation), head, texts)
        except ModelError as error:
            print(f"{name:<12} {error}")
            continue
        print(f"{name:<12} {found:>10.4f} {found / plain - 1:>8.2%}", flush=True)


if __name__ == "__main__":
    main()
