"""Mutated model files: none may end in a signal, a traceback or a hang, or take much memory.

    python tests/benchmarks/fuzz_models.py SEED N [--only INDEX] [--keep FOLDER]

Takes N mutations of small models of every form that is read: GGUF files of several families and
types, folders, packed folders, draft heads, prompt tokens. Each is opened, loaded and run
in a child with 20 s of CPU time and 1 GiB of memory beside the file. It prints a line for each
finding of a new kind, with what shows it again, and the counts; ends with status 1 if there is a
finding.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from support.model_fuzz import Models, keep, outcomes, remove, size_of
from support.model_mutations import mutated

BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--only", type=int, help="this mutation alone")
    parser.add_argument("--keep", type=Path, help="where the files of findings stay")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(1 if fuzz(chosen, Path(folder)) else 0)


class _Mutation:
    """One of a seed, written."""

    def __init__(self, root: Path, models: Models, seed: int, number: int) -> None:
        chance = random.Random(f"{seed} {number}")
        self.seed = chance.choice(models.seeds)
        self.path = root / f"{number}{self.seed.path.suffix}"
        what = mutated(self.seed.path, self.path, chance)
        self._told = f"{seed} {number} ({self.seed.name}, {what})"

    def __str__(self) -> str:
        """What shows it again, and what was done."""
        return self._told


def fuzz(chosen: argparse.Namespace, root: Path) -> int:
    """How many findings there are."""
    os.environ["XDG_CACHE_HOME"] = str(root / "cache")
    models = Models(root / "seeds")
    for seed in models.seeds:  # a seed works as it is; all that is imported is imported before
        models.use(seed.kind, seed.path)
    gc.freeze()
    counts: Counter[str] = Counter()
    shown: set[tuple[str, str]] = set()
    began = time.monotonic()
    numbers = range(chosen.count) if chosen.only is None else [chosen.only]
    for begin in range(0, len(numbers), BATCH):
        batch = [_Mutation(root, models, chosen.seed, n) for n in numbers[begin : begin + BATCH]]
        works = [(partial(models.use, one.seed.kind, one.path), size_of(one.path)) for one in batch]
        for one, found in zip(batch, outcomes(works), strict=True):
            counts[found.kind] += 1
            place = found.detail.partition(" ")[0] if found.kind == "traceback" else one.seed.kind
            if chosen.only is not None or not (found.is_fine or (found.kind, place) in shown):
                shown.add((found.kind, place))
                print(f"{found.kind}: {one}: {found.detail}", flush=True)
            if not found.is_fine and chosen.keep:
                chosen.keep.mkdir(exist_ok=True)
                keep(one.path, chosen.keep / f"{chosen.seed}-{one.path.name}")
            remove(one.path)
        if (root / "cache").exists():
            remove(root / "cache")
        if not (done := begin + BATCH) % 1000:
            print(f"{done} in {time.monotonic() - began:.0f} s: {dict(counts)}", flush=True)
    print(f"all {sum(counts.values())} in {time.monotonic() - began:.0f} s: {dict(counts)}")
    return sum(count for kind, count in counts.items() if kind not in ("ok", "refused"))


if __name__ == "__main__":
    main()
