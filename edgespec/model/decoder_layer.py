"""Decoder layer: edgespec's own, of few operations, for the families that `layer_form` knows.

On a GPU the host launches an operation at a time, on a CPU each has a price of its own, so what
counts beside the products is how many there are: matrices with one input are one, queries and keys
are turned together where the product left them, and keys and values are stored by one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import gelu, silu
from transformers import PretrainedConfig

from edgespec.model.joint import JointCache, RowCache, Turn
from edgespec.model.layer_form import LayerForm
from edgespec.model.matrices import MatrixReader
from edgespec.model.rope import Angles, turn_heads
from edgespec.model.source import TensorSource, load_parameter
from edgespec.model.tree_attention import (
    AttentionForm,
    JointVisibility,
    Visibility,
    tree_attention,
)

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


class Norm:
    """RMSNorm: rows over the root of their mean square, times a gain.

    In float32 inside, whatever the dtype, as transformers does it; in 16 bit it is rounded once,
    where transformers rounds before the gain too.
    """

    def __init__(self, weight: torch.Tensor, eps: float, above_one: bool) -> None:
        """`weight` [n]: the gain, or that above 1. Its dtype is that of the rows."""
        self._shape, self._eps, self._dtype = list(weight.shape), eps, weight.dtype
        self._gain = 1.0 + weight.float() if above_one else weight
        self._wide = weight.dtype == torch.float64 or self._gain.dtype != weight.dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., n], in new memory."""
        if not self._wide:
            return torch.rms_norm(rows, self._shape, self._gain, self._eps)
        rows = rows.float()
        if self._gain.dtype == torch.float32:
            normed = torch.rms_norm(rows, self._shape, self._gain, self._eps)
        else:
            normed = torch.rms_norm(rows, self._shape, None, self._eps) * self._gain
        return normed.to(self._dtype)


class HeadNorm:
    """The RMSNorm of each head's queries and keys, which stay where they are."""

    def __init__(self, query: torch.Tensor, key: torch.Tensor, form: LayerForm) -> None:
        """`query`, `key` [head_dim]: weights, as Norm takes them."""
        gains = torch.cat((query.repeat(form.heads, 1), key.repeat(form.kv_heads, 1)))
        self._gains = 1.0 + gains.float() if form.above_one else gains
        self._shape, self._eps = [form.head_dim], form.eps
        self._wide = gains.dtype == torch.float64 or form.above_one

    def __call__(self, heads: torch.Tensor) -> None:
        """Norm `heads` [R, heads + kv_heads, head_dim]."""
        rows = heads.float() if self._wide else heads
        torch.mul(torch.rms_norm(rows, self._shape, None, self._eps), self._gains, out=heads)


class DecoderLayer:
    """One layer, a function of the rows, their angles, the cache and what they see."""

    def __init__(
        self,
        index: int,
        form: LayerForm,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Read layer `index`. Raises ModelError for tensors that the source does not have so."""
        self._index, self._form = index, form
        prefix = f"model.layers.{index}."
        shapes = form.shapes()
        reader = MatrixReader(source, dtype, device)

        def product(*names: str) -> Callable[[torch.Tensor], torch.Tensor]:
            biased = f"{names[0]}.bias" in shapes
            of = [shapes[f"{name}.weight"] for name in names]
            return reader.product([prefix + name for name in names], of, biased)

        def vector(name: str) -> torch.Tensor:
            key = f"{name}.weight"
            return load_parameter(source, prefix + key, shapes[key], dtype, device).data

        def norm(name: str) -> Norm | None:
            return Norm(vector(name), form.eps, form.above_one) if name else None

        self._qkv = product(*form.qkv_names)
        self._out = product("self_attn.o_proj")
        self._gate_up = product(*form.gate_up_names)
        self._down = product("mlp.down_proj")
        enter, self._attended, middle, self._left = map(norm, form.norm_names)
        assert enter is not None
        assert middle is not None
        self._enter, self._middle = enter, middle
        self._head_norm: HeadNorm | None = None
        if form.head_norms:
            gains = vector("self_attn.q_norm"), vector("self_attn.k_norm")
            self._head_norm = HeadNorm(*gains, form)
        self._activation = _ACTIVATIONS[form.activation]
        self._attention = AttentionForm(form.scaling, form.softcap, form.window)

    def __call__(
        self,
        hidden: torch.Tensor,
        turn: Turn,
        cache: RowCache | JointCache,
        seen: Visibility | JointVisibility,
    ) -> torch.Tensor:
        """Hidden rows [R, H] to such rows, in new memory; keys and values go into the cache.

        `turn`: cosines and signed sines of the rows' positions (see Angles).
        """
        form = self._form
        rows, heads = hidden.shape[0], form.heads
        qkv = self._qkv(self._enter(hidden)).view(rows, -1, form.head_dim)
        turned = qkv.narrow(1, 0, heads + form.kv_heads)
        if self._head_norm is not None:
            self._head_norm(turned)
        if form.turned:
            turn_heads(turned, *turn)
        kv = qkv.narrow(1, heads, 2 * form.kv_heads)
        kv = kv.view(rows, 2, form.kv_heads, form.head_dim).permute(1, 2, 0, 3)
        keys, values = cache.append(kv, self._index)
        query = qkv.narrow(1, 0, heads)
        added = self._out(tree_attention(query, keys, values, seen, self._attention))
        if self._attended is not None:
            added = self._attended(added)
        hidden = torch.add(hidden, added, alpha=form.share)
        gate, up = self._gate_up(self._middle(hidden)).chunk(2, 1)
        added = self._down(self._activation(gate).mul_(up))
        if self._left is not None:
            added = self._left(added)
        return torch.add(hidden, added, alpha=form.share)


class OwnLayers:
    """Layers of a model whose form `layer_form` knows (see model.layers)."""

    has_experts = False

    def __init__(self, config: PretrainedConfig, forms: dict[int, LayerForm]) -> None:
        self._config, self._forms = config, forms
        self.head_dim = next(iter(forms.values())).head_dim

    def shapes(self, index: int) -> dict[str, torch.Size]:
        return self._forms[index].shapes()

    def matrices(self, index: int) -> frozenset[str]:
        return frozenset(name for name, shape in self.shapes(index).items() if len(shape) > 1)

    def layer(
        self, index: int, source: TensorSource, dtype: torch.dtype, device: torch.device
    ) -> DecoderLayer:
        return DecoderLayer(index, self._forms[index], source, dtype, device)

    def norm(self, source: TensorSource, dtype: torch.dtype, device: torch.device) -> Norm:
        form = next(iter(self._forms.values()))
        shape = torch.Size((form.hidden,))
        weight = load_parameter(source, "model.norm.weight", shape, dtype, device)
        return Norm(weight.data, form.eps, form.above_one)

    def turns(self, kind: str | None, dtype: torch.dtype, device: torch.device) -> Angles:
        return Angles(self._config, kind, dtype, device)
