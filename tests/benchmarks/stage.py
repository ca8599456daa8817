"""What a token costs on the stages of a model, beside transformers' own generate.

    python tests/benchmarks/stage.py --model MODEL --stages 3 --json

One prompt of 16 tokens, then one token after the other, greedily: all stages, loaded from block
files as a ring's are, and the output head, in this process, without sockets. In turns with them,
token by token, `apart`: the same stages with layers run one by one, not several in a call of
compiled code; and, for each round, `reference`: transformers' generate of so many tokens, its
weights plain in the same dtype.
Milliseconds of CPU time of one thread for a token: the least of the rounds' means.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from edgespec.config import Quantisation
from edgespec.model import block as block_module
from edgespec.model.block import Block
from edgespec.model.block_file import BlockFile, write_block
from edgespec.model.ends import OutputHead
from edgespec.model.source import EMBEDDING, TensorSource
from edgespec.model.sources import open_source
from edgespec.model.tree_attention import tree_mask
from edgespec.planning.partition import split_layers

PROMPT = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, a GGUF file, or a hub id")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--quant", default="file", help="how matrices are held; default: file")
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
    else:
        print("  ".join(f"{name} {value:.2f}" for name, value in found.items()))


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The figures by their names."""
    quantisation = Quantisation.parse(asked.quant)
    source = open_source(asked.model, quantisation)
    head = OutputHead(source, asked.dtype)
    files = block_files(source, quantisation, asked.stages, folder)
    runs = {"": [Block(*file, asked.dtype) for file in files]}
    with mock.patch.object(block_module, "layer_plan", return_value=None):
        runs["apart_"] = [Block(*file, asked.dtype) for file in files]
    whole = reference(open_source(asked.model), getattr(torch, asked.dtype))
    tokens = np.random.default_rng(0).integers(0, source.config.vocab_size, PROMPT)
    spent: dict[str, list[float]] = {}
    for _ in range(asked.rounds):
        answers = {name: steps(blocks, head, tokens) for name, blocks in runs.items()}
        taken = dict.fromkeys(answers, 0.0)
        for answer in answers.values():
            next(answer)  # the prompt
        for _ in range(asked.tokens):
            for name, answer in answers.items():
                began = time.thread_time()
                next(answer)
                taken[name] += time.thread_time() - began
        began = time.thread_time()
        generate(whole, tokens, 1)
        prompt = time.thread_time() - began
        began = time.thread_time()
        generate(whole, tokens, 1 + asked.tokens)
        taken["reference_"] = time.thread_time() - began - prompt
        for name, seconds in taken.items():
            spent.setdefault(name, []).append(1e3 * seconds / asked.tokens)
    return {f"{name}cpu_ms_per_token": min(times) for name, times in spent.items()}


def block_files(
    source: TensorSource, quantisation: Quantisation, stages: int, folder: Path
) -> list[tuple[BlockFile, int, int]]:
    """The model's layers in files for so many stages, each with its first layer and its end."""
    files = []
    for number, (first, end) in enumerate(split_layers(source.layers, stages)):
        path = folder / f"{stages}-{number}.safetensors"
        write_block(source, first, end, path)
        files.append((BlockFile(path, source.config, quantisation), first, end))
    return files


def steps(
    blocks: list[Block], head: OutputHead, tokens: np.ndarray, count: int = 1
) -> Iterator[None]:
    """These tokens, then `count` rows at a time, of the greedy token after the last row; with the
    logits of so many rows."""
    caches = [block.new_cache(256) for block in blocks]
    new, before = torch.from_numpy(tokens), 0
    while True:
        rows = new
        positions = torch.arange(before, before + len(rows))
        mask = tree_mask(before, np.tri(len(rows), dtype=np.bool_))
        for block, cache in zip(blocks, caches, strict=True):
            out = block.forward(rows, positions, cache, mask)
            assert out is not None
            rows = out
        before += len(rows)
        new = head.logits(rows[-count:]).argmax(1)[-1:].expand(count)
        yield


def reference(source: TensorSource, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model of these numbers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config.library, dtype=dtype)
    state = {name: source.tensor(name).to(dtype) for name in source.names}
    state.setdefault("lm_head.weight", state[EMBEDDING])
    model.load_state_dict(state, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(source.config.library)
    return model.eval()


@torch.inference_mode()
def generate(model: PreTrainedModel, tokens: np.ndarray, count: int) -> None:
    """Exactly `count` tokens behind these."""
    model.generate(
        torch.from_numpy(tokens)[None],
        attention_mask=torch.ones((1, len(tokens)), dtype=torch.int64),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )


if __name__ == "__main__":
    main()
