"""SmolLM2's score on multiple choice, over a ring by lm-evaluation-harness' requests, and by
transformers.

    python tests/benchmarks/loglikelihood.py [--stages N] [--dtype D] [--limit N] [--url URL]

Asks what lm_eval's `local-completions` asks (echo, logprobs, one token, batches of token ids) of an
API that it starts beside a ring of processes on this machine, or of `--url`. The score of a choice
is the sum of its tokens' log-probabilities, `acc_norm` divides it by the choice's bytes. The
questions are tests/data/lm_eval/choices.jsonl. transformers has the numbers that the model's file
stands for in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.real_apis import real_api
from support.smollm2 import log_probs, smollm2_file, tokenizer

FILE = Path(__file__).parent.parent / "data" / "lm_eval" / "choices.jsonl"
BATCH = 8


def asked(limit: int) -> Iterator[tuple[int, str, list[int], int]]:
    """Of each choice: its question's right one, its text, the tokens of both, and how many of
    these are the question's."""
    for line in FILE.read_text(encoding="utf-8").splitlines()[:limit]:
        told = json.loads(line)
        context = f"Question: {told['question']}\nAnswer:"
        before = len(tokenizer().encode(context))
        for choice in told["choices"]:
            yield told["answer"], choice, tokenizer().encode(f"{context} {choice}"), before


def by_ring(url: str, prompts: Sequence[list[int]]) -> list[list[float]]:
    """The log-probabilities of each prompt's tokens from the second on."""
    found: list[list[float]] = []
    with httpx.Client(base_url=url, timeout=3600) as client:
        for first in range(0, len(prompts), BATCH):
            batch = [*prompts[first : first + BATCH]]
            more = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
            told = client.post("/v1/completions", json={"prompt": batch, **more})
            told.raise_for_status()
            choices = sorted(told.json()["choices"], key=lambda one: one["index"])
            found += [one["logprobs"]["token_logprobs"][1:-1] for one in choices]
    return found


def score(rows: Sequence[list[float]], items: Sequence[tuple[int, str, list[int], int]]) -> str:
    """Both figures of multiple choice, of questions with four choices each."""
    sums = [sum(row[before - 1 :]) for row, (_, _, _, before) in zip(rows, items, strict=True)]
    norms = [one / len(item[1].encode()) for one, item in zip(sums, items, strict=True)]
    right = [0, 0]
    for first in range(0, len(items), 4):
        for kind, values in enumerate((sums, norms)):
            four = values[first : first + 4]
            right[kind] += four.index(max(four)) == items[first][0]
    return ", ".join(
        f"{name} {count / (len(items) // 4):.3f}"
        for name, count in zip(("acc", "acc_norm"), right, strict=True)
    )


def main() -> None:
    """Print both scores, and by how much any log-probability differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--limit", type=int, default=40, help="questions")
    parser.add_argument("--url", default="", help="of an API that serves SmolLM2-135M already")
    told = parser.parse_args()
    torch.set_num_threads(1)
    items = [*asked(told.limit)]
    prompts = [tokens for _, _, tokens, _ in items]
    with contextlib.ExitStack() as stack:
        own = real_api(smollm2_file(), "", stages=told.stages, dtype=told.dtype)
        url = told.url or stack.enter_context(own)[0]
        ring = by_ring(url, prompts)
    plain = [log_probs(tokens) for tokens in prompts]
    pairs = [pair for rows in zip(ring, plain, strict=True) for pair in zip(*rows, strict=True)]
    print(f"{len(items) // 4} questions of 4 choices, {sum(map(len, prompts))} tokens")
    print(f"ring of {told.stages} stages in {told.dtype}: {score(ring, items)}")
    print(f"transformers in float64: {score(plain, items)}")
    print(f"largest difference of a log-probability: {max(abs(a - b) for a, b in pairs):.2e}")


if __name__ == "__main__":
    main()
