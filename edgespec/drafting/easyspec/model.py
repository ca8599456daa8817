"""Grouped model: Llama-like layers with one storage, run one after the other or group by group.

In a fuzzy run (EasySpec Alg. 2) all layers of a group read the group's input in attention; their
MLPs follow one after the other, each with its own layer's attention added. Together on one device
that is one product for the queries, keys and values of the group, one attention over its layers as
a batch, one batched product of outputs. The normed input is the same for all but for each layer's
gains, which are folded into the columns of its matrices. A precise run takes slices of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from edgespec.errors import ModelError
from edgespec.model.kv_cache import RowForm, TwoRegionCache
from edgespec.model.rope import Angles, apply_rotary
from edgespec.model.source import EMBEDDING, TensorSource, load_parameter
from edgespec.model.tensors import compute_dtype

KINDS = ("llama", "qwen2", "qwen3")
"""Model types whose layers are what GroupedModel computes."""


@dataclass(frozen=True, slots=True)
class Projections:
    """Attention's matrices of N layers.

    `inner` [N · (heads + 2 · kv_heads) · head_dim, H]: by layer, queries, keys, values; `outer` [N,
    heads · head_dim, H]. The biases have a row for each row, [N, 1, H] for `outer_bias`.
    `query_gain` and `key_gain` [N, 1, 1, head_dim]: of norms over each head, where there are any.
    """

    layers: int
    inner: torch.Tensor
    inner_bias: torch.Tensor | None
    outer: torch.Tensor
    outer_bias: torch.Tensor | None
    query_gain: torch.Tensor | None
    key_gain: torch.Tensor | None

    def slice(self, index: int) -> Projections:
        """One layer's, counted within these; no copies."""
        rows = len(self.inner) // self.layers
        flat, one = slice(index * rows, (index + 1) * rows), slice(index, index + 1)
        return Projections(
            1,
            self.inner[flat],
            None if self.inner_bias is None else self.inner_bias[flat],
            self.outer[one],
            None if self.outer_bias is None else self.outer_bias[one],
            None if self.query_gain is None else self.query_gain[one],
            None if self.key_gain is None else self.key_gain[one],
        )


@dataclass(frozen=True, slots=True)
class Mlp:
    """One layer's gated MLP: `inner` [2 · intermediate, H], gate and up, and `outer`."""

    inner: torch.Tensor
    inner_bias: torch.Tensor | None
    outer: torch.Tensor
    outer_bias: torch.Tensor | None


class LayerReader:
    """Reads a checkpoint's layers into that form."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ModelError for layers of another kind, or packed ones."""
        config = source.config
        if config.model_type not in KINDS or "sliding_attention" in (
            getattr(config, "layer_types", None) or ()
        ):
            raise ModelError(
                f"{source.path} is a model of type {config.model_type!r}, or one with sliding "
                f"windows; easyspec runs {', '.join(KINDS)} without: draft with --draft "
                f"independent:{source.path}"
            )
        if config.hidden_act != "silu" or source.quantisation.kind != "none":
            raise ModelError(
                f"easyspec needs the matrices of {source.path} as they are, with silu between "
                "them; leave --draft-quant out, or draft with --draft independent"
            )
        self._source, self._dtype, self._device = source, dtype, device
        self.heads = int(config.num_attention_heads)
        self.kv_heads = int(config.num_key_value_heads)
        self.head_dim = config.head_dim

    def projections(self, first: int, end: int) -> Projections:
        """Attention's matrices of layers [first, end)."""
        inner, outer, biases, outer_biases, gains = [], [], [], [], []
        for layer in range(first, end):
            place = f"model.layers.{layer}."
            gain = self._tensor(place + "input_layernorm.weight")
            names = [f"{place}self_attn.{name}_proj" for name in "qkvo"]
            inner += [self._tensor(f"{name}.weight") * gain for name in names[:3]]
            biases += [self._optional(f"{name}.bias") for name in names[:3]]
            outer.append(self._tensor(f"{names[3]}.weight").T)
            outer_biases.append(self._optional(f"{names[3]}.bias"))
            gains.append([self._optional(f"{place}self_attn.{n}_norm.weight") for n in "qk"])
        outer_bias = _joined(outer_biases)
        query_gain, key_gain = (_joined([pair[i] for pair in gains]) for i in (0, 1))
        layers, dim = end - first, self.head_dim
        return Projections(
            layers,
            self._kept(torch.cat(inner)),
            _shaped(_joined(biases), (-1,)),
            self._kept(torch.stack(outer)),
            _shaped(outer_bias, (layers, 1, -1)),
            _shaped(query_gain, (layers, 1, 1, dim)),
            _shaped(key_gain, (layers, 1, 1, dim)),
        )

    def mlp(self, layer: int) -> Mlp:
        place = f"model.layers.{layer}."
        gain = self._tensor(place + "post_attention_layernorm.weight")
        names = [f"{place}mlp.{name}_proj" for name in ("gate", "up")]
        return Mlp(
            self._kept(torch.cat([self._tensor(f"{name}.weight") * gain for name in names])),
            _joined([self._optional(f"{name}.bias") for name in names]),
            self._kept(self._tensor(f"{place}mlp.down_proj.weight")),
            self._optional(f"{place}mlp.down_proj.bias"),
        )

    def _tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(name).to(self._device, self._dtype)

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._kept(self._tensor(name)) if name in self._source.names else None

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """In memory of its own: a mapped file may be gone later."""
        return tensor.clone(memory_format=torch.contiguous_format)


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    """Vectors one after the other; zeros stand for one that is absent, unless all are."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    if len(known) < len(parts):
        raise ModelError("some of a model's layers have biases and others none: draft with another")
    return torch.cat(known)


def _shaped(tensor: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(shape)


USUAL_SIZE = 4
"""Layers of a group, the best of most models tried (EasySpec §4.1)."""

_FIRST_SIZE = 3  # no group after layer 0 is longer (EasySpec Appendix B)


def layer_groups(layers: int, size: int = USUAL_SIZE) -> tuple[tuple[int, int], ...]:
    """Groups [first, end) of all layers in order, as EasySpec's Appendix B has them.

    The first and the last layer are alone: what enters the first, an embedding, stands for nothing
    else. The next group has three layers at most, those after it `size`, and what is left is one.
    """
    bounds = [0, 1]
    while bounds[-1] < layers - 1:
        longest = min(size, _FIRST_SIZE) if len(bounds) == 2 else size
        bounds.append(min(bounds[-1] + longest, layers - 1))
    if layers > 1:
        bounds.append(layers)
    return tuple(pairwise(bounds))


class GroupedPart(NamedTuple):
    """The R rows of one request: its cache, of which they take slots from its length on, and which
    slots each of them sees, its own included, bool [R, cache.length + R]."""

    cache: TwoRegionCache
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Pass:
    """What all layers of one run share: cosines and signed sines of its rows' angles [R, head_dim],
    and whose they are."""

    cosines: torch.Tensor
    sines: torch.Tensor
    parts: Sequence[GroupedPart]

    @property
    def rows(self) -> list[int]:
        """How many each part has."""
        return [len(part.mask) for part in self.parts]


class GroupedModel:
    """A whole draft model without its output head."""

    def __init__(
        self,
        source: TensorSource,
        size: int,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        """Read it, with groups of `size` layers. Raises ModelError for layers of another kind."""
        self.device = torch.device(device)
        self.dtype = compute_dtype(dtype)
        self._layers = source.layers
        self.groups = layer_groups(source.layers, size)
        reader = LayerReader(source, self.dtype, self.device)
        config = source.config
        self._eps = float(config.rms_norm_eps)
        self._heads, self._kv_heads = reader.heads, reader.kv_heads
        self._dim = reader.head_dim
        shape = torch.Size((int(config.vocab_size), int(config.hidden_size)))
        self.embedding = load_parameter(source, EMBEDDING, shape, self.dtype, device)
        self._rotary = Angles(config, None, self.dtype, self.device)
        self._projections = [reader.projections(first, end) for first, end in self.groups]
        self._mlps = [reader.mlp(layer) for layer in range(source.layers)]
        self._gain = load_parameter(source, "model.norm.weight", shape[1:], self.dtype, device)

    @property
    def vocab_size(self) -> int:
        """Tokens that it embeds."""
        return int(self.embedding.shape[0])

    def new_cache(self) -> TwoRegionCache:
        # As the heads of one layer, so that those of a group lie side by side.
        return TwoRegionCache(
            first_layer=0,
            forms=[RowForm(self._layers * self._kv_heads, self._dim)],
            reserve=0,
            dtype=self.dtype,
            device=self.device,
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        parts: Sequence[GroupedPart],
        fuzzy: bool,
        between_layers: Callable[[], object] = lambda: None,
    ) -> torch.Tensor:
        """Run tokens int64 [R] at `positions` int64 [R], and append their keys and values.

        `parts`: whose the rows are, one request's after the other's. Returns hidden rows [R, H]
        after the final norm. `between_layers` is called before each layer, or group of layers that
        run together.
        """
        counts = [len(part.mask) for part in parts]
        for part, places in zip(parts, positions.split(counts), strict=True):
            part.cache.place(places)
        hidden = embedding(tokens, self.embedding)
        cosines, sines = self._rotary(positions)
        run = _Pass(cosines.squeeze(1), sines.squeeze(1), parts)
        for (first, end), projections in zip(self.groups, self._projections, strict=True):
            if fuzzy:
                between_layers()
                given = self._attended(projections, first, hidden, run)
                for layer, added in enumerate(given, start=first):
                    hidden = self._mlp(self._mlps[layer], hidden + added)
                continue
            for layer in range(first, end):
                between_layers()
                one = projections.slice(layer - first)
                added = self._attended(one, layer, hidden, run)[0]
                hidden = self._mlp(self._mlps[layer], hidden + added)
        for part, rows in zip(parts, counts, strict=True):
            part.cache.advance(rows)
        return self._normed(hidden) * self._gain

    def _attended(
        self, by: Projections, first: int, hidden: torch.Tensor, run: _Pass
    ) -> torch.Tensor:
        """What attention of the layers from `first` on adds, with the same input, [N, R, H]."""
        rows, layers = len(hidden), by.layers
        heads, kv_heads, dim = self._heads, self._kv_heads, self._dim
        mixed = linear(self._normed(hidden), by.inner, by.inner_bias)
        mixed = mixed.view(rows, layers, heads + 2 * kv_heads, dim).permute(1, 2, 0, 3)
        query, key, value = mixed.split([heads, kv_heads, kv_heads], 1)
        if by.query_gain is not None and by.key_gain is not None:
            query = self._normed(query) * by.query_gain
            key = self._normed(key) * by.key_gain
        apply_rotary(query, run.cosines, run.sines)
        apply_rotary(key, run.cosines, run.sines)
        shares = (every.split(run.rows, 2) for every in (query, key, value))
        seen = [
            self._looked_up(part, first, *share)
            for part, *share in zip(run.parts, *shares, strict=True)
        ]
        out = torch.cat(seen, 1) if len(seen) > 1 else seen[0]
        if by.outer_bias is None:
            return torch.bmm(out, by.outer)
        return torch.baddbmm(by.outer_bias, out, by.outer)

    def _looked_up(
        self,
        part: GroupedPart,
        first: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of the layers from `first` on for the rows of one request, [N, R, heads ·
        head_dim], of their queries, keys and values [N, heads, R, head_dim]."""
        layers, heads, rows, dim = query.shape
        length = part.cache.length
        store = part.cache.layer(0).unflatten(1, (self._layers, self._kv_heads))
        keys, values = store[:, first : first + layers, :, : length + rows]
        keys[:, :, length:] = key
        values[:, :, length:] = value
        # Queries that share a key head become rows of it, as in model.tree_attention.
        group = heads // self._kv_heads
        query = query.reshape(layers, self._kv_heads, group * rows, dim)
        mask = part.mask.repeat(group, 1)[None, None]
        out = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return out.reshape(layers, heads, rows, dim).transpose(1, 2).reshape(layers, rows, -1)

    def _mlp(self, mlp: Mlp, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = linear(self._normed(hidden), mlp.inner, mlp.inner_bias).chunk(2, -1)
        return hidden + linear(silu(gate) * up, mlp.outer, mlp.outer_bias)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows scaled to a mean square of 1, in float32 as transformers does it; no gains."""
        wide = hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        return (wide * scale).to(hidden.dtype)
