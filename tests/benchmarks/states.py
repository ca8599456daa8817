"""What a row costs in layers that keep a state, beside one in layers that attend.

    python tests/benchmarks/states.py --quant int4 --context 512

Layers of Granite 4-h-micro (hidden 2048), random: as many of either kind, held alike, in blocks of
their own, in one process, pass by pass in turns. Milliseconds of CPU time of one thread for a layer
and pass: the least of the rounds' means, each of so many passes that all folding is in them; and
the ratio, also to that of an attention layer with as many weights.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from edgespec.config import Quantisation
from edgespec.model.block import Block
from edgespec.model.layers import layers_of
from edgespec.model.model_config import ModelConfig
from edgespec.model.sources import QuantisingSource
from edgespec.model.tree_attention import tree_mask
from edgespec.types.boundaries import STRIDE

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
    """A block of one kind, and a request of so many tokens."""

    def __init__(self, kind: str, asked: argparse.Namespace) -> None:
        source = RandomSource(kind, asked.layers)
        quantised = QuantisingSource(source, Quantisation.parse(asked.quant))  # type: ignore[arg-type]
        self.block = Block(quantised, 0, asked.layers, asked.dtype)
        self.cache = self.block.new_cache(asked.context + 64)
        held = (s for n, s in source.shapes.items() if n.startswith("model.layers.0."))
        self.weights = sum(s.numel() for s in held if len(s) == 2)
        self.at, self.rows = 0, asked.rows
        while self.at < asked.context:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quant", default="int4", help="how matrices are held; default: int4")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1, help="of a pass")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    runs = {kind: Run(kind, asked) for kind in KINDS}
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(asked.rounds):
        spent = dict.fromkeys(KINDS, 0.0)
        for _ in range(STRIDE):
            for kind, run in runs.items():
                spent[kind] += 1e3 * run.step(asked.rows) / asked.layers / STRIDE
        for kind, taken in spent.items():
            means[kind].append(taken)
    found = {kind: min(taken) for kind, taken in means.items()}
    found["ratio"] = found["state"] / found["attention"]
    weights = runs["state"].weights / runs["attention"].weights
    found["ratio_by_weights"] = found["ratio"] / weights
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
