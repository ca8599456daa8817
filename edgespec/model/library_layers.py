"""Library layers: transformers' own decoder layers, for families that edgespec's layer lacks, those
with mixtures of experts among them.

Importing this imports transformers' modelling code, which takes seconds: do so where it is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.activations import ACT2CLS, ACT2FN

from edgespec.errors import ModelError
from edgespec.model.joint import JointCache, RowCache
from edgespec.model.kv_cache import AnyHeld, RowForm
from edgespec.model.model_config import ModelConfig
from edgespec.model.quantised.exact import ExactLinear, row_product
from edgespec.model.quantised.linear import linear_from
from edgespec.model.rope import Rotary
from edgespec.model.row_math import RowMath
from edgespec.model.source import TensorSource, load_parameter
from edgespec.model.tree_attention import AttentionForm, Seen

Gate = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Makes one row from what the gate's and the up matrix make of it."""


class Expert(nn.Module):
    """One gated feed-forward network."""

    def __init__(self, hidden: int, inner: int, gate: Gate, bias: bool) -> None:
        """Matrices of `hidden` to `inner` columns and back."""
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)
        self.gate = gate

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.gate(self.gate_proj(rows), self.up_proj(rows)))
        return out


class Experts(nn.ModuleList):
    """Takes the place of transformers' experts, whose matrices are fused into one tensor each.

    So they can be loaded and quantised one by one.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        """The experts of a layer, with biases and a clamped gate in gpt-oss."""
        clamped = config.model_type == "gpt_oss"
        inner = getattr(config, "moe_intermediate_size", config.intermediate_size)
        gate = _clamped(config) if clamped else _plain(config)
        super().__init__(
            Expert(config.hidden_size, inner, gate, bias=clamped) for _ in range(config.num_experts)
        )

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """The sum of what each row's experts make of it, by their shares.

        `rows` [n, hidden]; `chosen` int64 [n, k]: the experts of each row; `shares` [n, k].
        Returns [n, hidden]. An expert that no row chose is not touched.
        """
        out = torch.zeros_like(rows)
        # In the order of the experts, so that sums are rounded as transformers rounds them.
        for number in torch.unique(chosen).tolist():
            row, rank = torch.where(chosen == number)
            made = self[number](rows[row]) * shares[row, rank, None]
            out.index_add_(0, row, made.to(out.dtype))
        return out


class Scores(nn.Module):
    """Takes the place of a router's linear layer, which is to be read as it is, never packed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight)


def separate_experts(layer: nn.Module, config: PretrainedConfig) -> None:
    """Replace the fused experts of a decoder layer, if it has any, by `Experts`."""
    mlp = getattr(layer, "mlp", None)
    if mlp is not None and hasattr(mlp, "experts"):
        mlp.experts = Experts(config)
        linear = getattr(getattr(mlp, "gate", None), "wg", None)  # Hunyuan's
        if isinstance(linear, nn.Linear):
            mlp.gate.wg = Scores(linear)


def _plain(config: PretrainedConfig) -> Gate:
    activation = ACT2FN[config.hidden_act]

    def gate(gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = activation(gated) * up
        return out

    return gate


def _clamped(config: PretrainedConfig) -> Gate:
    """gpt-oss' gate: swish of a steeper slope, both of its sides clamped, and 1 added to one."""
    limit, slope = config.swiglu_limit, config.swiglu_alpha

    def gate(gated: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gated = gated.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (gated * torch.sigmoid(gated * slope))

    return gate


_ACTIVATIONS: tuple[type[nn.Module], ...] = tuple(
    one if isinstance(one, type) else one[0] for one in ACT2CLS.values()
)
_ATTENTION = "edgespec_tree"
"""Name under which transformers' layers find `library_attention`."""


def skeleton(config: ModelConfig, first: int, end: int) -> PreTrainedModel:
    """The whole model on the meta device, layers [first, end) with one module for each matrix.

    It has a configuration of its own, in which edgespec's attention is chosen.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config.library), attn_implementation=_ATTENTION
        ).model
        for layer in model.layers[first:end]:
            separate_experts(layer, model.config)
    return model


class LibraryLayers:
    """Layers [first, end) of a model (see model.layers)."""

    def __init__(self, config: ModelConfig, first: int, end: int, math: RowMath) -> None:
        self._model, self._math = skeleton(config, first, end), math
        keys = int(config.num_key_value_heads), int(self._model.layers[first].self_attn.head_dim)
        self._rows = RowForm(*keys)
        kept: Sequence[str] = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        self._wide = (*kept, "gate.wg.")  # Hunyuan's is made so
        modules = (one for layer in self._model.layers[first:end] for one in layer.modules())
        self.has_experts = any(isinstance(one, Experts) for one in modules)

    def rows(self, index: int, held_as: torch.dtype) -> RowForm:
        return self._rows

    def shapes(self, index: int) -> dict[str, torch.Size]:
        parameters = self._model.layers[index].named_parameters()
        return {name: parameter.shape for name, parameter in parameters}

    def matrices(self, index: int) -> frozenset[str]:
        modules = self._model.layers[index].named_modules()
        return frozenset(f"{n}.weight" for n, module in modules if isinstance(module, nn.Linear))

    def layer(
        self, index: int, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> LibraryLayer:
        module = self._model.layers[index]
        _load(module, source, f"model.layers.{index}.", dtype, device, self._wide)
        _by_row(module, self._math)
        return LibraryLayer(module, self._math)

    def norm(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        _load(self._model.norm, source, "model.norm.", dtype, device)
        norm: nn.Module = self._model.norm
        return norm

    def rotary(
        self, kind: str | None, dtype: torch.dtype, device: torch.device
    ) -> Callable[[torch.Tensor], Rotary]:
        # Made again, as the one on the meta device has no frequencies; they stay float32.
        # None where no layer turns its keys.
        rotary = self._model.rotary_emb
        made = None if rotary is None else type(rotary)(self._model.config).to(device)
        like = torch.empty(0, dtype=dtype, device=device)

        def make(positions: torch.Tensor) -> Rotary:
            if made is None:
                return (positions,)
            kinds = () if kind is None else (kind,)

            def angles(one: torch.Tensor) -> torch.Tensor:
                return torch.stack(made(like, one[None], *kinds), -1)[0]

            return positions, *self._math.by_row(angles, positions).unbind(-1)

        return make


class RowByRow(nn.Module):
    """A module that sees each row as a tensor of its own, where the row math keeps rows apart.

    torch reckons activations at the end of a tensor in another way than in its middle, and a
    router's product by the number of rows.
    """

    def __init__(self, module: nn.Module, math: RowMath) -> None:
        super().__init__()
        self._module, self._math = module, math

    def forward(self, rows: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Rows [..., n] to such rows of an activation, [R, n] to all that a router gives."""
        made: torch.Tensor | tuple[torch.Tensor, ...]
        made = self._math.by_row(self._module, rows.reshape(-1, rows.shape[-1]))
        return made.view(rows.shape) if isinstance(made, torch.Tensor) else made


class LibraryLayer:
    """One of transformers' layers, called as edgespec's own are."""

    def __init__(self, module: nn.Module, math: RowMath) -> None:
        self.module, self._math = module, math

    def __call__(
        self, hidden: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """See model.layers. `rotary`: the positions int64 [R], and, unless the model turns no keys,
        cosines and sines [R, D]."""
        positions, *angles = rotary
        out: torch.Tensor = self.module(
            hidden[None],
            attention_mask=partial(self._math.attention, seen=seen),
            position_ids=positions[None],
            past_key_values=cache,
            position_embeddings=tuple(one[None] for one in angles) or None,
        )
        return out[0]


def library_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: AnyHeld,
    value: AnyHeld,
    attention_mask: Callable[..., torch.Tensor],
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' layers call it: they pass their own cap, sinks and window.

    `attention_mask`: what attends, as RowMath.attention, under the mask of the pass. `query` [1,
    heads, R, head_dim]; returns [1, R, heads, head_dim], and None in the place of the weights.
    Raises ModelError for variants of attention that it would otherwise silently leave out.
    """
    if dropout:
        raise ModelError(
            "this model's attention uses dropout, which edgespec does not compute; use a model of "
            "another family"
        )
    form = AttentionForm(scaling, softcap, sliding_window, s_aux)
    rows = query[0].transpose(0, 1)
    out = attention_mask(rows, key, value, form=form)
    return out.view(1, *rows.shape[:2], -1), None


def _by_row(layer: nn.Module, math: RowMath) -> None:
    """Let a layer's activations, routers and gates of experts keep rows apart."""
    for name, module in list(layer.named_modules()):
        if isinstance(module, _ACTIVATIONS) or type(module).__name__.endswith(("Router", "Gate")):
            layer.set_submodule(name, RowByRow(module, math))
        elif isinstance(module, Expert):
            module.gate = partial(math.by_row, module.gate)


def _load(
    module: nn.Module,
    source: TensorSource,
    prefix: str,
    dtype: torch.dtype,
    device: torch.device,
    wide: Sequence[str] = (),
) -> None:
    """Replace a module's meta parameters by the checkpoint's tensors, those with one of `wide` in
    their names in float32 at least.

    One at a time, so that loading never needs more than the finished block and one tensor as
    stored.
    """
    for name, linear in list(module.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue
        form = source.form(f"{prefix}{name}.weight")
        plain = form.kind == "none"
        if plain and device.type != "cpu":
            continue
        bias = None
        if linear.bias is not None:
            bias = load_parameter(source, f"{prefix}{name}.bias", linear.bias.shape, dtype, device)
        shape = linear.weight.shape
        held: nn.Module
        if plain:
            weight = load_parameter(source, f"{prefix}{name}.weight", shape, dtype, device)
            held = ExactLinear(row_product(weight, bias))
        else:
            packed = source.packed(f"{prefix}{name}.weight", shape)
            held = linear_from(packed, bias, shape, form, dtype, device)
        module.set_submodule(name, held)
    for name, parameter in list(module.named_parameters()):
        owner_path, _, leaf = name.rpartition(".")
        kept = torch.float32 if any(part in name for part in wide) else dtype
        kept = torch.promote_types(kept, dtype)
        loaded = load_parameter(source, prefix + name, parameter.shape, kept, device)
        setattr(module.get_submodule(owner_path), leaf, loaded)
    module.eval()


AttentionInterface.register(_ATTENTION, library_attention)
