"""What a row costs in layers that keep a state, beside one in layers that attend.

    python tests/benchmarks/states.py --quant int4 --context 512 2048 --rows 1 16
    python tests/benchmarks/states.py --sizes qwen3.5-4b lfm2-1.2b

Layers of Granite 4-h-micro (hidden 2048), random: as many of either kind, held alike, in blocks of
their own, in one process, pass by pass in turns. Milliseconds of CPU time of one thread for a layer
and pass: the least of the rounds' means, each of so many passes that all folding is in them; and
the ratio, also to that of an attention layer with as many weights. Or what requests take.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from itertools import product

import numpy as np
import torch

from edgespec.config import Quantisation
from edgespec.model.block import Block
from edgespec.model.layers import layers_of
from edgespec.model.model_config import ModelConfig
from edgespec.model.sources import QuantisingSource
from edgespec.model.tree_attention import tree_mask
from edgespec.planning.cost_model import ARCHITECTURES
from edgespec.types.boundaries import AHEAD, STRIDE

SIZES = {
    "model_type": "granitemoehybrid",
    "num_local_experts": 0,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 96,
    "mamba_n_heads": 64,
    "mamba_d_state": 128,
    "attention_multiplier": 0.0156,
    "residual_multiplier": 0.22,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
KINDS = {"attention": "full_attention", "state": "linear_attention"}


class RandomSource:
    """Such a model's tensors, made when asked for."""

    def __init__(self, kind: str, layers: int) -> None:
        types = [KINDS[kind]] * layers
        self.config = ModelConfig(SIZES | {"layer_types": types, "num_hidden_layers": layers})
        self.path, self.layers, self.mapped = f"random {kind}", layers + 1, False
        self.quantisation = Quantisation()
        self.shapes: dict[str, torch.Size] = {}

    @property
    def names(self) -> frozenset[str]:
        every = layers_of(self.config, 0, self.layers - 1)
        for index in range(self.layers - 1):
            own = every.shapes(index).items()
            self.shapes |= {f"model.layers.{index}.{name}": shape for name, shape in own}
        self.shapes["model.embed_tokens.weight"] = torch.Size((96, 2048))
        return frozenset(self.shapes)

    def form(self, name: str) -> Quantisation:
        return self.quantisation

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.shapes:
            _ = self.names
        return (0.02 * torch.randn(self.shapes[name])).bfloat16()

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        return "", self.tensor(name)

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        raise AssertionError("all is plain")


class Run:
    """A request of so many tokens, and passes of so many rows behind them."""

    def __init__(self, block: Block, context: int, rows: int) -> None:
        self.block, self.rows, self.at = block, rows, 0
        self.cache = block.new_cache(context + 64)
        while self.at < context:
            self.step(64)

    def step(self, rows: int) -> float:
        """Seconds of one pass, whose rows stay."""
        positions = torch.arange(self.at, self.at + rows)
        mask = tree_mask(self.at, np.tri(rows, dtype=np.bool_))
        hidden = torch.randn(rows, 2048).bfloat16().to(self.block.dtype)
        began = time.thread_time()
        self.block.forward(hidden, positions, self.cache, mask)
        taken = time.thread_time() - began
        self.at += rows
        if self.cache.folded is not None:
            self.cache.folded.follow(self.at, self.at)
        return taken


def sizes(name: str) -> dict[str, float | str]:
    """KiB of a known model's state, of a row in a layer that has one, in 16 bit and in 32, of a
    token in all others; MiB of all that a request has however long it is, at most, and behind an
    answer."""
    of = ARCHITECTURES[name]
    keys, inner = of.state_groups * of.state_key, of.state_heads * of.state_value
    state, terms = 4 * inner * of.state_key, 4 * (keys + inner + of.state_heads)
    rows = [terms + each * (2 * keys + inner) for each in (2, 4)]
    held = of.states * (state + (AHEAD + STRIDE) * rows[1])
    found = {"state": state, "row_16": rows[0], "row_32": rows[1], "token": of.kv_bytes * of.layers}
    large = {"planned": of.request_bytes * of.layers, "kept": held}
    return (
        {"model": name}
        | {key: round(count / 2**10, 1) for key, count in found.items()}
        | {key: round(count / 2**20, 1) for key, count in large.items()}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quant", default="int4", help="how matrices are held; default: int4")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="of a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=ARCHITECTURES, help="of known models instead")
    asked = parser.parse_args()
    if asked.sizes:
        for name in asked.sizes:
            print(json.dumps(sizes(name)))
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks, weights = {}, {}
    for kind in KINDS:
        source = RandomSource(kind, asked.layers)
        quantised = QuantisingSource(source, Quantisation.parse(asked.quant))  # type: ignore[arg-type]
        blocks[kind] = Block(quantised, 0, asked.layers, asked.dtype)
        held = (s for n, s in source.shapes.items() if n.startswith("model.layers.0."))
        weights[kind] = sum(s.numel() for s in held if len(s) == 2)
    cases = list(product(asked.context, asked.rows))
    runs = {(*case, kind): Run(blocks[kind], *case) for case in cases for kind in KINDS}
    least = dict.fromkeys(runs, math.inf)
    for _ in range(asked.rounds):
        spent = dict.fromkeys(runs, 0.0)
        for _ in range(STRIDE):
            for key, run in runs.items():
                spent[key] += 1e3 * run.step(run.rows) / asked.layers / STRIDE
        least = {key: min(least[key], taken) for key, taken in spent.items()}
    for context, rows in cases:
        found = {kind: least[context, rows, kind] for kind in KINDS}
        found["ratio"] = found["state"] / found["attention"]
        found["ratio_by_weights"] = found["ratio"] / weights["state"] * weights["attention"]
        told = {name: round(value, 3) for name, value in found.items()}
        print(json.dumps({"context": context, "rows": rows} | told))


if __name__ == "__main__":
    main()
