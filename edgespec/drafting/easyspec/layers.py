"""Layer matrices: those of Llama-like layers, stacked by groups, norm gains folded into them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgespec.errors import ModelError
from edgespec.model.source import TensorSource

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
        given = getattr(config, "head_dim", None)
        self.head_dim = int(given or config.hidden_size // self.heads)

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
