"""What a token costs on the stages of a model, beside llama.cpp on the same file.

    python tests/benchmarks/peer_llamacpp.py --model FILE.gguf --peer PYTHON --json

`--peer` names a llama.cpp that is here already; nothing is built or fetched. It is either the
python of an environment in which llama-cpp-python is installed (its path), or a llama-bench.
The token ids of one prompt of 16 tokens, then one token after the other: by turns, round by round,
edgespec's stages, loaded from block files, with the output head, and the peer, one thread each.
Milliseconds of CPU time for a token, the least of the rounds' means; and for so many rows in one
pass over the same context. llama-bench tells time, not CPU time, and is to have a core to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from stage import PROMPT, block_files, steps

from edgespec.config import Quantisation
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.sources import open_source

ROWS = (1, 4, 16)

# What the peer's interpreter runs: a round for each line on its input, answered in JSON.
_BINDING = """
import json, sys, time
import llama_cpp
path, tokens, rows = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
model = llama_cpp.Llama(path, n_threads=1, n_threads_batch=1, n_ctx=512, verbose=False)
def taken(work):
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)
def chain():
    for token in range(tokens):
        model.eval([100 + token])
for line in sys.stdin:
    prompt = json.loads(line)
    model.reset()
    model.eval(prompt)
    found = {"1": taken(chain) / tokens}
    for count in rows:
        if count > 1:
            model.reset()
            model.eval(prompt)
            found[str(count)] = taken(lambda: model.eval([7] * count))
    print(json.dumps(found), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument(
        "--peer", help="a python with llama_cpp, or a llama-bench; none if left out"
    )
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(asked, Path(folder))
    if asked.json:
        print(json.dumps(found))
        return
    for name, times in found.items():
        print(name, "  ".join(f"{rows} rows {value:.2f} ms" for rows, value in times.items()))


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """By system, and by rows of a pass, the least CPU milliseconds."""
    quantisation = Quantisation.parse("file")
    source = open_source(asked.model, quantisation)
    head = OutputHead(source, asked.dtype)
    runs = {}
    for stages in asked.stages:
        files = block_files(source, quantisation, stages, folder)
        runs[f"edgespec, {stages} stage(s)"] = [Block(*file, asked.dtype) for file in files]
    prompt = np.random.default_rng(0).integers(0, source.config.vocab_size, PROMPT)
    best: dict[str, dict[str, float]] = {}
    with peer(asked) if asked.peer else nullcontext() as theirs:
        for _ in range(asked.rounds):
            round_ = {name: ours(blocks, head, prompt, asked) for name, blocks in runs.items()}
            if theirs is not None:
                round_["llama.cpp"] = theirs.round(prompt)
            for name, times in round_.items():
                kept = best.setdefault(name, times)
                for rows, value in times.items():
                    kept[rows] = min(kept[rows], value)
    return best


def ours(
    blocks: list[Block], head: OutputHead, prompt: np.ndarray, asked: argparse.Namespace
) -> dict[str, float]:
    """One round: a chain of tokens, and a pass of each number of rows."""
    found = {}
    for count in ROWS:
        work = steps(blocks, head, prompt, count)
        next(work)
        began = time.process_time()
        repeats = asked.tokens if count == 1 else 1
        for _ in range(repeats):
            next(work)
        found[str(count)] = 1e3 * (time.process_time() - began) / repeats
    return found


class Binding:
    """llama-cpp-python in a process of its own."""

    def __init__(self, asked: argparse.Namespace) -> None:
        command = [asked.peer, "-c", _BINDING, asked.model, str(asked.tokens), json.dumps(ROWS)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Binding:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def round(self, prompt: np.ndarray) -> dict[str, float]:
        """CPU milliseconds by rows."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(prompt.tolist()) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args} ended; is llama-cpp-python installed there?")
        found: dict[str, float] = json.loads(line)
        return found


class Bench:
    """A llama-bench, run once a round."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._command = [asked.peer, "-m", asked.model, "-t", "1", "-r", "1", "-o", "json"]
        self._command += ["-n", str(asked.tokens)]
        for count in ROWS[1:]:
            self._command += ["-p", str(count)]

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None: ...

    def round(self, prompt: np.ndarray) -> dict[str, float]:
        """Milliseconds by rows; its context is its own."""
        run = subprocess.run(self._command, capture_output=True, text=True, check=True)
        found = {}
        for test in json.loads(run.stdout):
            if test["n_gen"]:
                found["1"] = 1e-6 * test["avg_ns"] / test["n_gen"]
            else:
                found[str(test["n_prompt"])] = 1e-6 * test["avg_ns"]
        return found


def peer(asked: argparse.Namespace) -> Binding | Bench:
    """What `--peer` names."""
    return Binding(asked) if "python" in os.path.basename(asked.peer) else Bench(asked)


if __name__ == "__main__":
    main()
