"""How far ahead draft sources see: right guesses by depth, on the base's own text; run by name.

    python tests/benchmarks/horizon.py [--depth 12] [--every 4] [--new-tokens 64] [--sources A,B]

The bundled base answers the bundled prompts at temperatures 0 and 1. At every fourth committed
token each source guesses behind the tokens that really came, level by level: how often is the next
one its first guess, and among its first 8? At temperature 1 guesses are ranked with the shared
noise. A source may have weights of its own: --sources independent,dspark:FOLDER.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
from drafts import WORKLOADS, Case, setup_of

from edgespec.bench.simulated import play
from edgespec.daemon.bundled_models import bundled
from edgespec.drafting.base import Guesser
from edgespec.drafting.choice import parse_draft
from edgespec.drafting.registry import BUILDERS, BaseParts
from edgespec.model.aux_hidden import packed
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.teacher import Lesson, Teacher
from edgespec.types.features import NO_FEATURES, NO_NEEDS, Features
from edgespec.verify.sampling import Sampling

RANKS = (1, 8)
COMPARED = ("independent", "eagle", "eagle3", "dspark", "ngram")


@dataclass(frozen=True)
class Text:
    """A prompt of `prompt` tokens, with the base's answer behind it."""

    tokens: tuple[int, ...]
    prompt: int
    sampling: Sampling


@cache
def teacher() -> Teacher:
    """The bundled base."""
    return Teacher(Path(bundled("base")), torch.device("cpu"), torch.float32)


def texts(temperature: float, new_tokens: int) -> Iterator[Text]:
    """What plain decoding makes of the prompts."""
    tokenizer = Tokenizer(bundled("base"))
    for workload in WORKLOADS:
        setup = setup_of(Case(workload, temperature, "none", "autoregressive"), new_tokens)
        answers = play(setup, "autoregressive", lambda count: None).answers
        for prompt, answer in zip(setup.prompts, answers, strict=True):
            ids = tuple(tokenizer.encode(prompt.text))
            yield Text((*ids, *answer.token_ids), len(ids), setup.sampling)


def guesser_of(source: str) -> Guesser:
    """That source with its bundled weights, or those of its folder."""
    base = Checkpoint(bundled("base"))
    parts = BaseParts(bundled("base"), base, OutputHead(base, "float32"), "float32", "cpu")
    (one,) = parse_draft(source, bundled).members
    return BUILDERS[one.name](one.folder, parts)


@lru_cache(maxsize=1)
def lesson_of(text: Text, layers: tuple[int, ...]) -> Lesson:
    """What the base says of a text."""
    return teacher().read(torch.tensor([text.tokens]), layers)


def features(guesser: Guesser, text: Text, first: int, end: int) -> Features:
    """What the base gives for these rows."""
    layers = guesser.needs.aux_layers
    if guesser.needs == NO_NEEDS or end <= first:
        return NO_FEATURES
    lesson = lesson_of(text, layers)
    if not layers:
        return Features(from_torch(lesson.hidden[0, first:end].contiguous()))
    assert lesson.aux_hidden is not None
    aux_hidden = lesson.aux_hidden[0, first:end].chunk(len(layers), -1)
    return Features(aux_hidden=packed(list(aux_hidden)), aux_layers=layers)


def right(source: str, whole: Sequence[Text], depth: int, every: int) -> np.ndarray:
    """Share of right guesses, [ranks, depth]."""
    hits, asked = np.zeros((len(RANKS), depth)), np.zeros(depth)
    guesser = guesser_of(source)
    for number, text in enumerate(whole):
        for end in range(text.prompt + 1, len(text.tokens), every):
            # A request of its own each time: the guesses of the last one would stay, and be of use.
            guesser.open(number, text.sampling)
            given = features(guesser, text, 0, end - 1)
            behind = text.tokens[end : end + depth]
            paths = [behind[:level] for level in range(len(behind))]
            if guesser.read(number, text.tokens[:end], given):
                found = guesser.guess(number, paths, max(RANKS))
                for level, token in enumerate(behind):
                    guesses = found.tokens[found.parents == level].tolist()
                    for at, rank in enumerate(RANKS):
                        hits[at, level] += token in guesses[:rank]
            asked[: len(behind)] += 1
            guesser.close(number)
    return hits / asked


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sources", default=",".join(COMPARED))
    chosen = parser.parse_args()
    shown = [level for level in (1, 2, 4, 6, 8, 12) if level <= chosen.depth]
    levels = ", ".join(map(str, shown))
    columns = (f"among the first {rank}, levels {levels}" for rank in RANKS)
    print("| source | T | " + " | ".join(columns) + " |")
    print("| --- " * (2 + len(RANKS)) + "|")
    for temperature in (0.0, 1.0):
        whole = list(texts(temperature, chosen.new_tokens))
        for source in chosen.sources.split(","):
            shares = right(source, whole, chosen.depth, chosen.every)
            cells = (" ".join(f"{row[level - 1]:.2f}" for level in shown) for row in shares)
            print(f"| `{source}` | {temperature:g} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
