"""Perplexity of a model under each quantisation, on text that is given, as a table.

    python tests/benchmarks/perplexity.py [--model MODEL] [--texts FILE.jsonl] [--tokens N] ...

Without options: the bundled base model, and every question and answer of
edgespec/bench/prompts/gsm8k-test-40.jsonl, which it was not trained on. Each text is one sequence;
each token is predicted from those before it. One thread of the CPU. `loss` is against the first
figure: with `none`, the weights as the model has them, or as its file's codes stand for them.
`--head-quant` takes several names too: every one is tried with every `--quant`. `--dtypes` takes
float32+int8 too: computed in the one, with caches in the other.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from edgespec.config import NAMED
from edgespec.daemon.bundled_models import bundled
from edgespec.errors import ModelError
from edgespec.model.sources import open_source

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.perplexities import perplexity, sequences, texts_of


def measured(
    model: str, names: list[str], heads: list[str], dtypes: list[str], texts: list[list[int]]
) -> Iterator[list[str]]:
    """Lines of the table."""
    plain = 0.0
    for name, head in product(names, heads):
        cells = [name, head]
        try:
            for dtype in dtypes:
                ends = open_source(model, NAMED[head])
                computed, _, held = dtype.partition("+")
                found = perplexity(open_source(model, NAMED[name]), ends, computed, texts, held)
                plain = plain or found
                cells += [f"{found:.4f}", f"{found / plain - 1:.3%}"]
        except ModelError as error:
            cells.append(str(error))
        yield cells


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=bundled("base"), help="a folder, file or hub id")
    parser.add_argument("--texts", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--tokens", type=int, default=0, help="at least so many; 0: all texts")
    parser.add_argument("--quant", nargs="+", choices=list(NAMED), default=list(NAMED))
    parser.add_argument("--head-quant", nargs="+", choices=list(NAMED), default=["none"])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    longest = int(open_source(asked.model).config.max_position_embeddings)
    texts = sequences(asked.model, texts_of(asked.texts), longest, asked.tokens)
    print(f"{sum(len(text) - 1 for text in texts)} tokens of {len(texts)} texts")
    print("quantisation", "head", *(f"{dtype}\tloss" for dtype in asked.dtypes), sep="\t")
    for cells in measured(asked.model, asked.quant, asked.head_quant, asked.dtypes, texts):
        print(*cells, sep="\t", flush=True)


if __name__ == "__main__":
    main()
