"""Random trees of models that keep a state, each row against plain decoding; run by name.

    python tests/benchmarks/trees.py TREES [--seed 0] [--journal FILE] [--families NAME ...]
        [--dtypes NAME ...]

Plays (tests/support/live_trees.py) come from hypothesis, EXAMPLES of a seed. Each seed is of one
family and dtype, in turns, on one to five stages with borders between any layers. A row whose bits
are not those of its path run one row at a time ends it with status 1 and the smallest play that
shows it. What passed is a line of JSON in the journal; run again with the same one, it goes on
behind those. Behind the last seed it says how many trees and rows were compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, seed, settings

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.checkpoints import FAMILY_SETTINGS, FOLDING
from support.live_trees import Counts, LiveTrees, Model, Play, plays

DTYPES = ("float32", "bfloat16", "float16")
FAMILIES = (*FOLDING, *(name for name in FAMILY_SETTINGS if name.startswith("lfm2")))
EXAMPLES = 50
"""Plays of a seed."""


def main(arguments: Sequence[str]) -> int:
    """Play until there are so many trees; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    given_ = parser.parse_args(arguments)
    torch.set_num_threads(1)
    done = {line["seed"]: line for line in _read(given_.journal)}
    total, number = Counts(), given_.seed
    with tempfile.TemporaryDirectory() as root:
        while total.trees < given_.trees:
            turn, name = divmod(number - given_.seed, len(given_.families))
            pair = given_.families[name], given_.dtypes[(name + turn) % len(given_.dtypes)]
            told = {"seed": number, "family": pair[0], "dtype": pair[1]}
            if number not in done:
                try:
                    found = compared(Path(root) / pair[0], *pair, number)
                except AssertionError as problem:
                    print(f"{told}: {problem}", *getattr(problem, "__notes__", ()), sep="\n")
                    return 1
                done[number] = told | vars(found)
                _write(given_.journal, done[number])
            elif not told.items() <= done[number].items():
                parser.error(f"{given_.journal} is of another run: give another file")
            total.add(Counts(**{name: done[number][name] for name in vars(total)}))
            number += 1
    words = ", ".join(f"{count} {name}" for name, count in vars(total).items())
    print(f"0 rows differ: {words}; seeds {given_.seed} to {number - 1}")
    return 0


def compared(folder: Path, name: str, dtype: str, number: int) -> Counts:
    """What the plays of one seed compared. Raises AssertionError for a row that differs."""
    model, counts = Model(folder, name, dtype), Counts()
    model.check_trunk()

    @seed(number)
    @settings(
        max_examples=EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(plays())
    def play(one: Play) -> None:
        counts.add(LiveTrees(model, one).run())

    play()
    return counts


def _read(journal: Path | None) -> list[dict[str, str | int]]:
    if journal is None or not journal.is_file():
        return []
    return [json.loads(line) for line in journal.read_text("utf-8").splitlines()]


def _write(journal: Path | None, line: dict[str, str | int]) -> None:
    text = json.dumps(line)
    print(text, flush=True)
    if journal is not None:
        with journal.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
