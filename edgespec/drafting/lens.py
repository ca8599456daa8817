"""Lens: a small trained map from rows between two layers to the tokens that may come after them.

A logit lens of low rank: `up` (`down` x + …) in place of all layers that are still to come and the
output matrix, x being the row scaled to a mean square of 1. A folder holds one for each layer from
three fifths of the way on; they share `up`. What one says is a guess, never a token of a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.drafting.weight_file import read_tensors, write_tensors
from edgespec.errors import ModelError
from edgespec.model.hub import model_files
from edgespec.model.model_config import ModelConfig
from edgespec.model.tensors import from_torch, to_torch
from edgespec.types.tensor import Layers
from edgespec.wire.hints import Lenses

FILE = "hints.safetensors"
MOST_RANK = 64
_EPSILON = 1e-6
_DOWN = "down."


def first_lens(layers: int) -> int:
    """The first layer of a model of so many, that rows enter which a lens may read: what they say
    before that is worth little (docs/policies.md)."""
    return -(-3 * layers // 5)


@dataclass(frozen=True)
class Lens:
    """The map of the rows that enter one layer: `down` [K, H], `up` [V, K] and `bias` [V]."""

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Of rows [.., H], [.., V] in the lens's number format."""
        rows = rows.float()
        scale = rows.square().mean(-1, keepdim=True).add(_EPSILON).rsqrt()
        rows = (rows * scale).to(self.down.dtype)
        return rows @ self.down.T @ self.up.T + self.bias


def write_lenses(
    folder: Path, up: torch.Tensor, bias: torch.Tensor, downs: Mapping[int, torch.Tensor]
) -> None:
    """Write a base's lenses in float16: `downs` by the layers that their rows enter."""
    tensors = {"up": up, "bias": bias, **{f"{_DOWN}{n}": down for n, down in downs.items()}}
    write_tensors(
        {name: tensor.detach().half().cpu() for name, tensor in tensors.items()}, folder / FILE
    )


def read_lenses(folder: str | Path, layers: int, config: ModelConfig) -> Lenses:
    """A base's lenses, as stages get them. Raises ModelError if they cannot be
    read or do not fit the base."""
    hidden_size, vocab_size = int(config.hidden_size), int(config.vocab_size)
    stored, file = read_tensors(model_files(folder), FILE, FILE, mapped=False)
    up, bias = stored.get("up"), stored.get("bias")
    known = {f"{_DOWN}{n}": n for n in range(first_lens(layers), layers)}
    if up is not None and bias is not None:
        rank = up.shape[-1]
        wanted = {"up": (vocab_size, rank), "bias": (vocab_size,)}
        wanted |= dict.fromkeys(known, (rank, hidden_size))
        shapes = all(tuple(t.shape) == wanted.get(name) for name, t in stored.items())
        if shapes and 0 < rank <= MOST_RANK and all(map(_is_usable, stored.values())):
            ends = Layers(tuple(sorted(known[n] for n in stored if n in known)))
            downs = torch.stack([stored[f"{_DOWN}{n}"] for n in ends])
            return Lenses(ends, from_torch(downs), from_torch(up), from_torch(bias))
    raise ModelError(
        f"{file} holds no lenses for a base of {layers} layers, {hidden_size} wide, with "
        f"{vocab_size} tokens; use those that `edgespec train hints` made for it"
    )


def lens_of(lenses: Lenses, layer: int, device: torch.device) -> Lens:
    """The lens of rows that enter that layer, which must be among those of `lenses`. On a CPU it is
    in float32, which is quicker there."""
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    down = to_torch(lenses.downs)[lenses.layers.index(layer)]
    parts = (down, to_torch(lenses.up), to_torch(lenses.bias))
    return Lens(*(part.to(device, dtype) for part in parts))


def _is_usable(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float16 and bool(tensor.isfinite().all())
