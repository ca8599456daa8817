"""Token rows: what the layers of a Gemma 4 are told of each row's token, beside the row.

A table a layer has numbers of each token, to which come those that a matrix makes of the token's
embedding. Tables and embedding stay on the host, in the file where they can: few rows are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import embedding

from edgespec.model.families import embedding_scale, layer_embedding
from edgespec.model.gguf.block_types import NAMED_TYPES
from edgespec.model.gguf.unpacking import numbers_of
from edgespec.model.matrices import Product, plain_product
from edgespec.model.row_math import Norm, RowMath
from edgespec.model.source import EMBEDDING, TensorSource, check_shape, load_parameter

TABLE = "embed_tokens_per_layer.weight"
"""The table, within a layer's names."""
_FROM_EMBEDDING, _NORM = "per_layer_model_projection.weight", "per_layer_projection_norm.weight"


def table_shapes(tokens: int, told: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """A layer's tensors of this kind, none of which is ever packed. `told`: numbers of a token."""
    return {TABLE: (tokens, told), _FROM_EMBEDDING: (told, hidden), _NORM: (told,)}


class Table:
    """A matrix of which rows are looked up, where it lies: on the host, in its file if it can."""

    def __init__(self, source: TensorSource, name: str, shape: torch.Size) -> None:
        """Raises ModelError for another shape."""
        kind, self._stored = source.table(name)
        self._blocks = NAMED_TYPES[kind] if kind else None
        columns = shape[1] if self._blocks is None else self._blocks.row_bytes(shape[1])
        check_shape(source, name, self._stored.shape, torch.Size((shape[0], columns)))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [R, columns] of tokens int64 [R]."""
        rows = embedding(tokens, self._stored)
        return rows if self._blocks is None else numbers_of(self._blocks, rows)


class TokenRows:
    """What the layers of a block are told of tokens: numbers of each token alone, of a table and of
    the model's embedding.

    Tables and embedding stay on the host, in the file where they can: a row is looked up there.
    """

    def __init__(
        self,
        source: TensorSource,
        layers: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        math: RowMath,
        look_up: Product,
    ) -> None:
        """`look_up`: the embedded rows [R, H] of tokens, where they are computed."""
        config = source.config
        self._told, self._look_up, self._math = layer_embedding(config), look_up, math
        self._dtype, self._device = dtype, device
        tokens, hidden = int(config.vocab_size_per_layer_input), int(config.hidden_size)
        sizes = table_shapes(tokens, self._told, hidden).items()
        shapes = {name: torch.Size(size) for name, size in sizes}

        def read(index: int, name: str) -> torch.Tensor:
            full = f"model.layers.{index}.{name}"
            return load_parameter(source, full, shapes[name], dtype, device).data

        self._tables = [Table(source, f"model.layers.{n}.{TABLE}", shapes[TABLE]) for n in layers]
        self._product = plain_product(torch.cat([read(n, _FROM_EMBEDDING) for n in layers]))
        gain = [read(n, _NORM) for n in layers][-1]  # one for all, of which each has a copy
        self._norm = Norm(gain, float(config.rms_norm_eps), above_one=False)
        self._scale = float(torch.tensor(self._told**0.5, dtype=dtype))
        self._shrink = hidden**-0.5

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows [R, layers, told] of `tokens` int64 [R]. What stands for a PPD token, below 0, is
        told of token 0."""
        tokens = tokens.clamp(min=0)
        rows = self._product(self._look_up(tokens)) * self._shrink
        rows = self._math.norm(rows.view(-1, self._told), self._norm)
        here = tokens.cpu()
        found = torch.stack([table(here) for table in self._tables], 1)
        found = found.to(self._device, self._dtype).view(-1, self._told) * self._scale
        both: torch.Tensor = (rows + found) * 2.0**-0.5
        return both.view(len(tokens), len(self._tables), self._told)


def embedded_by(source: TensorSource, dtype: torch.dtype, device: torch.device) -> Product:
    """Looks up rows [R, hidden_size] of the model's embedding, scaled as the model scales it, for
    tokens int64 [R]. Raises ModelError if the source has none."""
    config = source.config
    shape = torch.Size((int(config.vocab_size), int(config.hidden_size)))
    table, scale = Table(source, EMBEDDING, shape), embedding_scale(config, dtype)

    def look_up(tokens: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = table(tokens.cpu()).to(device, dtype)
        return rows if scale is None else rows * scale

    return look_up
