"""What D0 does outside its models, at a real vocabulary: sampling, and ranking of guesses.

    python tests/benchmarks/d0.py --vocab 128256 --rows 16 --json

Rows are random logits (Zipf-like, float32), four a position, as in a tree. `guess_ms`: the ten best
guesses of each row, with the making of the noise, which choosing then shares. `choose_ms`: the walk
of a result of so many rows, of which the first of every position is right. `choose_all_ms`: the
target tokens after all rows, which no product code asks for. `topk_ms`: torch.topk(10) over the
same rows. `together_ms`: the output matrix [vocab, hidden] and the ten best guesses for the rows of
all `--requests`, so many rows each, by one product; `apart_ms`: the same for one request after the
other. Medians of interleaved rounds, milliseconds of CPU time of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import linear

from edgespec.drafting.guess_scores import best_guesses
from edgespec.drafting.ranking import Ranking, Unranked
from edgespec.tree.ledger import Rows
from edgespec.verify.sampling import Sampling, choose, choose_along

LEVEL = 4
GUESSES = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(asked.vocab, asked.rows, asked.temperature, asked.top_p, asked.rounds)
    sampling = Sampling(asked.temperature, top_p=asked.top_p)
    found |= several(asked.vocab, asked.hidden, asked.requests, asked.rows, sampling, asked.rounds)
    if asked.json:
        print(json.dumps(found))
    else:
        print("  ".join(f"{name} {value:.2f}" for name, value in found.items()))


def measure(
    vocab: int, rows: int, temperature: float, top_p: float, rounds: int
) -> dict[str, float]:
    """Milliseconds by name, see above."""
    random = np.random.default_rng(0)
    base = -1.5 * np.log(np.arange(1, vocab + 1)) + random.standard_normal((rows, vocab))
    logits = np.ascontiguousarray(base[:, random.permutation(vocab)], np.float32)
    levels = np.arange(rows) // LEVEL
    spent: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        before = time.thread_time()
        work()
        spent.setdefault(f"{name}_ms", []).append((time.thread_time() - before) * 1e3)

    parents = np.maximum((levels - 1) * LEVEL, 0)
    for number in range(rounds + 1):
        # New positions in each round: the noise is made once for each.
        play(timed, logits, levels + 1000 * number, parents, Sampling(temperature, top_p=top_p))
    return {name: statistics.median(values[1:]) for name, values in spent.items()}


def several(
    vocab: int, hidden: int, requests: int, rows: int, sampling: Sampling, rounds: int
) -> dict[str, float]:
    """Milliseconds of D0's work on the guesses of several requests, together and one by one."""
    torch.manual_seed(0)
    matrix = torch.randn(vocab, hidden)
    ranking = Ranking(lambda positions, sampling, product=None: None)
    spent: dict[str, list[float]] = {"together_ms": [], "apart_ms": []}
    paths = [(0,) * (row // LEVEL) for row in range(rows)]
    for number in range(requests):
        ranking.open(number, replace(sampling, seed=number))
    for turn in range(2 * (rounds + 1)):
        positions = np.arange(rows) // LEVEL + 1000 * turn  # new ones: noise is made once for each
        asked = [
            Unranked(number, paths, torch.randn(rows, hidden), positions, GUESSES)
            for number in range(requests)
        ]
        jobs = [asked] if turn % 2 else [[one] for one in asked]
        before = time.thread_time()
        for job in jobs:
            ranking.together(job, lambda every: linear(every, matrix))
        took = (time.thread_time() - before) * 1e3
        spent["together_ms" if turn % 2 else "apart_ms"].append(took)
    return {name: statistics.median(values[1:]) for name, values in spent.items()}


def play(
    timed: Callable[[str, Callable[[], object]], None],
    logits: np.ndarray,
    positions: np.ndarray,
    parents: np.ndarray,
    sampling: Sampling,
) -> None:
    """One round of each."""
    tensor = torch.from_numpy(logits)
    timed("topk", lambda: torch.topk(tensor, GUESSES))
    timed("guess", lambda: best_guesses(tensor, positions, sampling, GUESSES))
    timed("choose_all", lambda: choose(logits, positions, sampling))
    tokens = choose(logits, positions, sampling).tokens[parents]
    tokens[np.arange(len(tokens)) % LEVEL > 0] = -1
    rows = Rows(np.arange(len(tokens)), parents, tokens, positions - 1)
    timed("choose", lambda: choose_along(logits.__getitem__, rows, sampling))


if __name__ == "__main__":
    main()
