"""Gemma 4's decoder layers: keys of two shapes, keys of an earlier layer, what each layer is told
of a row's token, and a mixture of experts beside the MLP.

After transformers' Gemma4TextDecoderLayer; names of tensors are those of a layer in its
checkpoints, and what these have for all layers together is cut by layer (see model.loader).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from edgespec.errors import ModelError
from edgespec.kernels.rows import ACTIVATIONS
from edgespec.model.families import key_owners, layer_embedding
from edgespec.model.joint import JointCache, RowCache
from edgespec.model.kv_cache import RowForm
from edgespec.model.matrices import MatrixReader, Product, plain_product
from edgespec.model.mixture import sum_of_experts
from edgespec.model.model_config import FULL, ModelConfig
from edgespec.model.rope import Angles, Rotary, head_dim_of
from edgespec.model.row_math import HeadNorm, Norm, RowMath
from edgespec.model.source import TensorSource, load_parameter
from edgespec.model.token_rows import table_shapes
from edgespec.model.tree_attention import AttentionForm, Seen

_ROUTER = "router.proj.weight"
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_EXPERT_NORMS = tuple(
    f"{name}_{number}"
    for name, number in (
        ("post_feedforward_layernorm", 1),
        ("pre_feedforward_layernorm", 2),
        ("post_feedforward_layernorm", 2),
    )
)


@dataclass(frozen=True, slots=True)
class Gemma4Form:
    """What one layer computes.

    `owner`: the layer whose keys it reads; None if it has its own. `values`: whether it has a
    matrix of values, which else are its keys before they are normed and turned. `told`: numbers
    that it is told of a row's token. `experts`, `active`, `expert_inner`: 0 without a mixture.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: str
    biased: bool
    window: int | None
    owner: int | None
    values: bool
    tokens: int
    told: int
    experts: int
    active: int
    expert_inner: int

    @property
    def rows(self) -> RowForm:
        """What the cache holds of each row."""
        return RowForm(0, 0) if self.owner is not None else RowForm(self.kv_heads, self.head_dim)

    def shapes(self) -> dict[str, torch.Size]:
        """All tensors of the layer, by their names in it; matrices [out, in], all else flat."""
        hidden, wide, narrow = (
            self.hidden,
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
        )
        own_keys = self.owner is None
        projections = {"q": wide}
        if own_keys:
            projections |= {"k": narrow} | ({"v": narrow} if self.values else {})
        found: dict[str, tuple[int, ...]] = {}
        for name, out in projections.items():
            found[f"self_attn.{name}_proj.weight"] = (out, hidden)
            if self.biased:
                found[f"self_attn.{name}_proj.bias"] = (out,)
        found["self_attn.o_proj.weight"] = (hidden, wide)
        if self.biased:
            found["self_attn.o_proj.bias"] = (hidden,)
        found |= {
            f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"[: 1 + own_keys]
        }
        found |= _mlp_shapes("mlp.", hidden, self.inner)
        found |= {f"{name}.weight": (hidden,) for name in _NORMS}
        found["layer_scalar"] = (1,)
        if self.told:
            found |= table_shapes(self.tokens, self.told, hidden)
            found["per_layer_input_gate.weight"] = (self.told, hidden)
            found["per_layer_projection.weight"] = (hidden, self.told)
            found["post_per_layer_input_norm.weight"] = (hidden,)
        if self.experts:
            found |= {_ROUTER: (self.experts, hidden), "router.scale": (hidden,)}
            found["router.per_expert_scale"] = (self.experts,)
            for expert in range(self.experts):
                found |= _mlp_shapes(f"experts.{expert}.", hidden, self.expert_inner)
            found |= {f"{name}.weight": (hidden,) for name in _EXPERT_NORMS}
        return {name: torch.Size(shape) for name, shape in found.items()}


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{prefix}{name}_proj.weight": shape for name, shape in shapes.items()}


def gemma4_form(config: ModelConfig, index: int) -> Gemma4Form:
    """The form of layer `index` of a Gemma 4."""
    full = config.layer_types[index] == FULL
    owner = key_owners(config).get(index)
    wider = 2 if owner is not None and config.use_double_wide_mlp else 1
    experts = config.num_experts if config.enable_moe_block else 0
    kv_heads = config.num_global_key_value_heads if full else config.num_key_value_heads
    return Gemma4Form(
        hidden=int(config.hidden_size),
        inner=wider * int(config.intermediate_size),
        heads=int(config.num_attention_heads),
        kv_heads=int(kv_heads),
        head_dim=head_dim_of(config, FULL if full else None),
        eps=float(config.rms_norm_eps),
        activation=config.hidden_activation,
        biased=bool(config.attention_bias),
        window=None if full else int(config.sliding_window),
        owner=owner,
        values=not (full and config.attention_k_eq_v),
        tokens=int(config.vocab_size_per_layer_input),
        told=layer_embedding(config),
        experts=int(experts or 0),
        active=int(config.top_k_experts or 0),
        expert_inner=int(config.moe_intermediate_size or 0),
    )


class _LayerReader:
    """Reads what a layer is made of."""

    def __init__(
        self, index: int, form: Gemma4Form, source: TensorSource, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._prefix, self._shapes, self._eps = f"model.layers.{index}.", form.shapes(), form.eps
        self._source, self._dtype, self._device = source, dtype, device
        self._matrices = MatrixReader(source, dtype, device)

    def product(self, *names: str) -> Product:
        """By some matrices, whose results are one row."""
        of = [self._shapes[f"{name}.weight"] for name in names]
        biased = f"{names[0]}.bias" in self._shapes
        return self._matrices.product([self._prefix + name for name in names], of, biased)

    def plain(self, name: str) -> torch.Tensor:
        """A tensor that is never packed."""
        shape = self._shapes[name]
        full = self._prefix + name
        return load_parameter(self._source, full, shape, self._dtype, self._device).data

    def norm(self, name: str) -> Norm:
        return Norm(self.plain(f"{name}.weight"), self._eps, above_one=False)

    def ones(self, width: int) -> Norm:
        """The norm without a gain."""
        return Norm(torch.ones(width, dtype=self._dtype, device=self._device), self._eps, False)


class RoutedExperts:
    """A router, and the experts that it chooses of for each row."""

    def __init__(self, form: Gemma4Form, read: _LayerReader, math: RowMath) -> None:
        self._form, self._math = form, math
        self._router = plain_product(read.plain(_ROUTER))
        self._scale, self._each = read.plain("router.scale"), read.plain("router.per_expert_scale")
        self._norm = read.ones(form.hidden)
        self._experts = [
            (
                read.product(f"experts.{number}.gate_proj", f"experts.{number}.up_proj"),
                read.product(f"experts.{number}.down_proj"),
            )
            for number in range(form.experts)
        ]

    def __call__(self, routed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What the experts make of `rows` [R, H], each chosen by the same row of `routed`."""
        math = self._math
        normed = math.norm(routed, self._norm) * self._scale * self._form.hidden**-0.5
        chosen, shares = math.by_row(self._choose, self._router(normed))
        how = rows, self._form.activation, math
        return sum_of_experts(self._experts, chosen, shares, *how)

    def _choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of scores [R, experts] the best ones' numbers and shares [R, active]."""
        shares, chosen = scores.softmax(-1, dtype=torch.float32).topk(self._form.active, -1)
        shares /= shares.sum(-1, keepdim=True)
        return chosen, shares * self._each[chosen]


class Gemma4Layer:
    """One layer (see model.layers.Layer). `rotary` holds cosines and sines, and where layers are
    told of tokens what this one is told of each row's, [R, told]."""

    def __init__(self, index: int, form: Gemma4Form, read: _LayerReader, math: RowMath) -> None:
        """Raises ModelError for tensors that the source does not have so."""
        self._index, self.form, self._math = index, form, math
        names = ("q", "k", "v")[: 1 if form.owner is not None else 2 + form.values]
        self._qkv = read.product(*(f"self_attn.{name}_proj" for name in names))
        self._out = read.product("self_attn.o_proj")
        query = read.plain("self_attn.q_norm.weight")
        key = query if form.owner is not None else read.plain("self_attn.k_norm.weight")
        counts = form.heads, form.rows.heads
        self._head_norm = HeadNorm(query, key, *counts, form.eps, above_one=False)
        self._value_norm = read.ones(form.head_dim)
        self._gate_up = read.product("mlp.gate_proj", "mlp.up_proj")
        self._down = read.product("mlp.down_proj")
        self._enter, self._attended, self._middle, self._left = map(read.norm, _NORMS)
        self._attention = AttentionForm(1.0, None, form.window)
        self._scalar = read.plain("layer_scalar")
        self._mixture: RoutedExperts | None = None
        if form.experts:
            self._mixture = RoutedExperts(form, read, math)
            self._dense, self._chosen, self._sparse = map(read.norm, _EXPERT_NORMS)
        if form.told:
            self._told_gate = read.product("per_layer_input_gate")
            self._told = read.product("per_layer_projection")
            self._told_norm = read.norm("post_per_layer_input_norm")

    def __call__(
        self, hidden: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Hidden rows [R, H] to such rows, in new memory."""
        form, math = self.form, self._math
        added = self._attend(math.norm(hidden, self._enter), rotary[:2], cache, seen)
        hidden, entering = math.add_and_norm(hidden, added, 1.0, self._attended, self._middle)
        added = self._down(math.gated(self._gate_up(entering), form.activation))
        if self._mixture is not None:
            sparse = self._mixture(hidden, math.norm(hidden, self._chosen))
            added = math.add(math.norm(added, self._dense), sparse, 1.0, self._sparse)
        hidden = math.add(hidden, added, 1.0, self._left)
        if form.told:
            both = torch.cat((self._told_gate(hidden), rotary[2]), 1)
            added = self._told(math.gated(both, form.activation))
            hidden = math.add(hidden, added, 1.0, self._told_norm)
        return hidden.mul_(self._scalar)

    def _attend(
        self, rows: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        form, math = self.form, self._math
        count, heads, kv_heads = len(rows), form.heads, form.rows.heads
        qkv = self._qkv(rows).view(count, -1, form.head_dim)
        if form.owner is None:
            # Of a layer without a matrix of values the keys, before they are normed and turned.
            values = qkv.narrow(1, qkv.shape[1] - kv_heads, kv_heads).reshape(-1, form.head_dim)
            values = math.norm(values, self._value_norm).view(count, kv_heads, form.head_dim)
        math.rotate(qkv, heads, kv_heads, rotary, self._head_norm)
        if form.owner is None:
            kv = torch.stack((qkv.narrow(1, heads, kv_heads), values))

            keys, held = cache.append(kv.transpose(1, 2), self._index)
        else:
            keys, held = cache.held(count, form.owner)
        query = qkv.narrow(1, 0, heads)
        return self._out(math.attention(query, keys, held, seen, self._attention))


class Gemma4Layers:
    """Layers [first, end) of a Gemma 4 (see model.layers.ModelLayers)."""

    def __init__(self, config: ModelConfig, first: int, end: int, math: RowMath) -> None:
        """Raises ModelError if some read the keys of a layer that is not among them, and for an
        activation that is not known."""
        self._config, self._math = config, math
        if config.hidden_activation not in ACTIVATIONS:
            raise ModelError(
                f"hidden_activation in config.json is {config.hidden_activation!r}, edgespec "
                f"computes {', '.join(ACTIVATIONS)}; use the original release"
            )
        self._forms = {index: gemma4_form(config, index) for index in range(first, end)}
        self.has_experts = bool(config.enable_moe_block)
        for index, form in self._forms.items():
            if form.owner is not None and form.owner < first:
                raise ModelError(
                    f"layer {index} reads the keys of layer {form.owner}, which is not on the same "
                    f"stage: layers from {min(key_owners(config).values())} on have to be together"
                )

    def rows(self, index: int, held_as: torch.dtype) -> RowForm:
        return self._forms[index].rows

    def shapes(self, index: int) -> dict[str, torch.Size]:
        return self._forms[index].shapes()

    def matrices(self, index: int) -> frozenset[str]:
        plain = (*table_shapes(0, 0, 0), _ROUTER)
        shapes = self.shapes(index)
        return frozenset(n for n, shape in shapes.items() if len(shape) > 1 and n not in plain)

    def layer(
        self, index: int, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Gemma4Layer:
        form = self._forms[index]
        return Gemma4Layer(
            index, form, _LayerReader(index, form, source, dtype, device), self._math
        )

    def norm(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        form = next(iter(self._forms.values()))
        shape = torch.Size((form.hidden,))
        weight = load_parameter(source, "model.norm.weight", shape, dtype, device)
        return partial(self._math.norm, norm=Norm(weight.data, form.eps, above_one=False))

    def rotary(
        self, kind: str | None, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], Rotary]:
        return partial(self._math.angles, Angles(self._config, kind, dtype, device))
