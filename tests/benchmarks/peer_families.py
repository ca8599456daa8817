"""An independent reader of small files of each family: llama.cpp's log-probabilities beside ours.

    python tests/benchmarks/peer_families.py --server BINARY [FAMILY ...]

For each family a random model is written as a GGUF file with its real names, plain numbers and a
tokenizer. `BINARY`, a llama-server, reads it and tells the five likeliest tokens behind a prompt of
ten; so does a block of ours with its head. Ends with 1 if some log-probability differs by more than
0.001, or llama.cpp does not read a file.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from peer_llamacpp import is_healthy
from support.checkpoints import write_family
from support.commands import Command
from support.ggufs import all_as, in_blocks, tokenizer_values, write_gguf
from support.served import free_port

from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.sources import open_source
from edgespec.model.tree_attention import tree_mask

MOST = 1e-3
PATIENCE_S = 60.0
PROMPT = [5, 9, 90, 33, 7, 60, 61, 62, 100]
_EVERY_FOURTH = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_key_head_dim": 32,
}
"""What llama.cpp takes for given: which layers attend, and that keys are as wide as values."""
_PLAIN = ("lfm2", "lfm2_moe", "granitemoehybrid-mamba", "granitemoehybrid-experts", "falcon_h1")
_PLAIN += ("nemotron_h", "qwen2_moe", "qwen3_moe", "glm4_moe", "hunyuan_v1_moe")
_PLAIN += ("deepseek_v3",)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: ({}, {}) for name in _PLAIN},
    "nemotron_h-experts": ({"n_group": 1, "topk_group": 1}, {}),
    **{name: (_EVERY_FOURTH, {}) for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
    "qwen3_next, an older file": (_EVERY_FOURTH, {"gates_apart": False}),
}
"""By name, settings of the model, and how its file is written."""


def ours(block: Block, head: OutputHead, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities [V] of the token behind a prompt."""
    mask = tree_mask(0, np.tri(len(prompt), dtype=np.bool_))
    places = torch.arange(len(prompt))
    rows = block.forward(torch.tensor(prompt), places, block.new_cache(64), mask)
    assert rows is not None
    return torch.log_softmax(head.logits(rows[-1:])[0], -1)


@contextlib.contextmanager
def served(binary: str, file: Path) -> Iterator[httpx.Client]:
    """A llama-server that has read the file. Raises RuntimeError with its last words if it ends."""
    port = free_port()
    command = [binary, "-m", str(file), "--port", str(port), "-c", "256", "-t", "1", "-np", "1"]
    command += ["-ngl", "0", "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--no-warmup"]
    url = f"http://127.0.0.1:{port}"
    with Command(command=command) as server, httpx.Client(base_url=url, timeout=PATIENCE_S) as asks:
        end = time.monotonic() + PATIENCE_S
        while not is_healthy(url):
            if server.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(server.err[-400:])
            time.sleep(0.2)
        yield asks


def difference(binary: str, root: Path, name: str) -> float:
    """The largest one of five log-probabilities of a family."""
    settings, how = CASES[name]
    tokens = tokenizer_values(root)
    names = tokens["tokenizer.ggml.tokens"]
    family = name.partition(",")[0]
    sizes = {"vocab_size": len(names), "initializer_range": 0.2}
    folder = write_family(root / "m", family, **in_blocks(family) | sizes | settings)
    file = root / "it.gguf"
    write_gguf(folder, file, all_as("F32"), tokens, **how)
    source = open_source(file)
    model = Block(source, 0, source.layers, "float32"), OutputHead(source, "float32")
    # A token that is a part of a character is not told before the character is whole.
    for last in range(40, len(names)):
        mine = ours(*model, [*PROMPT, last])
        if names[int(mine.argmax())].isalnum() and names[int(mine.argmax())].isascii():
            break
    asked = {"prompt": [*PROMPT, last], "n_predict": 1, "temperature": 0, "n_probs": 5}
    with served(binary, file) as client:
        told = client.post("/completion", json=asked).raise_for_status().json()
    top = told["completion_probabilities"][0]["top_logprobs"]
    return max(abs(float(mine[one["id"]]) - one["logprob"]) for one in top)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--server", required=True)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(CASES))
    asked = parser.parse_args()
    failed = False
    cache = tempfile.TemporaryDirectory()  # of kernels, compiled once, and of what files say
    os.environ["XDG_CACHE_HOME"] = cache.name
    for name in asked.families or CASES:
        with tempfile.TemporaryDirectory() as root:
            try:
                found = difference(asked.server, Path(root), name)
            except (RuntimeError, httpx.HTTPError) as error:
                found, told = float("inf"), f"not read: {error}"
            else:
                told = f"{found:.6f}"
        failed |= found > MOST
        print(f"{name:26} {told}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends its processes
    main()
