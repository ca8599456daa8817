"""Latent attention (MLA): the cache holds of each row one latent, which all heads share.

A latent is what each head's keys and values are made of, by two matrices of that head. Both are
absorbed: queries go through the first one into the space of latents, and what is summed there
through the second one out of it, so that no row's keys or values are ever made (DeepSeek-V2,
arXiv 2405.04434, sections 2.1.2 and 2.1.3, and its appendix C). Attention itself is that of one
head of keys, of which the values are the first numbers.

After transformers' DeepseekV2Attention and Glm4MoeLiteAttention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch

from edgespec.kernels.products import EachProduct, RowProduct
from edgespec.model.joint import JointCache, RowCache
from edgespec.model.kv_cache import RowForm
from edgespec.model.matrices import MatrixReader, Product
from edgespec.model.model_config import ModelConfig
from edgespec.model.rope import Rotary
from edgespec.model.row_math import Norm, RowMath
from edgespec.model.source import TensorSource, load_parameter
from edgespec.model.tree_attention import AttentionForm, Seen
from edgespec.planning.text_part import LATENT

_EPS = 1e-6
"""Of the norms of latents, whatever the model's others have, as in transformers."""

_KEYS, _VALUES = "self_attn.k_b", "self_attn.v_b"
"""The two matrices of each head, NAME.HEAD: into the space of latents, and out of it."""


@dataclass(frozen=True, slots=True)
class LatentForm:
    """What one layer attends by.

    `rank`: numbers of a latent. `turned`: of the keys, those that carry the position; they follow a
    latent in a row. `straight`: of a head's queries, those that do not. `value`: of its values.
    `query_rank`: of what queries are made of; None: of the row itself. `interleaved`: numbers that
    are turned together are neighbours.
    """

    hidden: int
    heads: int
    rank: int
    turned: int
    straight: int
    value: int
    query_rank: int | None
    scaling: float
    biased: bool
    interleaved: bool

    @property
    def row(self) -> RowForm:
        """What the cache holds of each row."""
        return RowForm(1, self.rank + self.turned, parts=1)

    def shapes(self) -> dict[str, torch.Size]:
        """Its tensors, by their names in the layer; matrices [out, in], all else flat."""
        queries = self.heads * (self.straight + self.turned)
        narrow = {"kv_a_proj_with_mqa": (self.rank + self.turned, self.hidden)}
        found: dict[str, tuple[int, ...]] = {"kv_a_layernorm.weight": (self.rank,)}
        if self.query_rank is None:
            found["q_proj.weight"] = (queries, self.hidden)
        else:
            narrow["q_a_proj"] = (self.query_rank, self.hidden)
            found["q_a_layernorm.weight"] = (self.query_rank,)
            found["q_b_proj.weight"] = (queries, self.query_rank)
        narrow["o_proj"] = (self.hidden, self.heads * self.value)
        for name, shape in narrow.items():
            found[f"{name}.weight"] = shape
            if self.biased:
                found[f"{name}.bias"] = shape[:1]
        found = {f"self_attn.{name}": shape for name, shape in found.items()}
        for head in range(self.heads):
            found[f"{_KEYS}.{head}.weight"] = (self.rank, self.straight)
            found[f"{_VALUES}.{head}.weight"] = (self.value, self.rank)
        return {name: torch.Size(shape) for name, shape in found.items()}


def latent_form(config: ModelConfig) -> LatentForm | None:
    """How the layers of a model attend, if they hold latents."""
    if config.model_type not in LATENT:
        return None
    straight, turned = int(config.qk_nope_head_dim), int(config.qk_rope_head_dim)
    return LatentForm(
        hidden=int(config.hidden_size),
        heads=int(config.num_attention_heads),
        rank=int(config.kv_lora_rank),
        turned=turned,
        straight=straight,
        value=int(config.v_head_dim),
        query_rank=None if config.q_lora_rank is None else int(config.q_lora_rank),
        scaling=_scaling(config.rope_parameters, straight + turned),
        biased=bool(config.attention_bias),
        interleaved=config.model_type == "deepseek_v2" or bool(config.rope_interleave),
    )


def _scaling(angles: Mapping[str, Any], head_dim: int) -> float:
    """What scores are multiplied by: where waves are stretched, more than by the root of a head."""
    louder = float(angles.get("mscale_all_dim") or 0.0)
    if angles["rope_type"] == "default" or not louder or angles["factor"] <= 1:
        return float(head_dim**-0.5)
    louder = 0.1 * louder * log(angles["factor"]) + 1.0
    return float(head_dim**-0.5 * louder * louder)


class LatentMixer:
    """A mixer of this form, read from a source."""

    def __init__(
        self,
        index: int,
        form: LatentForm,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        row_math: RowMath,
    ) -> None:
        """Of layer `index`. Raises ModelError for tensors that the source does not have so."""
        self._index, self._form, self._math = index, form, row_math
        prefix, shapes = f"model.layers.{index}.", form.shapes()
        reader = MatrixReader(source, dtype, device)

        def product(name: str) -> Product:
            biased = f"{name}.bias" in shapes
            return reader.product([prefix + name], [shapes[f"{name}.weight"]], biased)

        def norm(name: str) -> Norm:
            key = f"{name}.weight"
            gain = load_parameter(source, prefix + key, shapes[key], dtype, device)
            return Norm(gain.data, _EPS, above_one=False)

        if form.query_rank is None:
            self._query = product("self_attn.q_proj")
            self._query_norm: Norm | None = None
        else:
            self._query_down = product("self_attn.q_a_proj")
            self._query_norm = norm("self_attn.q_a_layernorm")
            self._query = product("self_attn.q_b_proj")
        self._down = product("self_attn.kv_a_proj_with_mqa")
        self._norm = norm("self_attn.kv_a_layernorm")
        heads = range(form.heads)
        self._keys = _ByHead([product(f"{_KEYS}.{head}") for head in heads])
        self._values = _ByHead([product(f"{_VALUES}.{head}") for head in heads])
        self._out = product("self_attn.o_proj")
        self._attention = AttentionForm(form.scaling)

    def __call__(
        self, rows: torch.Tensor, rotary: Rotary, cache: RowCache | JointCache, seen: Seen
    ) -> torch.Tensor:
        """Normed rows [R, H] to what is added to the rows, [R, H]; their latents go into the
        cache."""
        form, math = self._form, self._math
        count, heads, rank = len(rows), form.heads, form.rank
        if self._query_norm is None:
            query = self._query(rows)
        else:
            query = self._query(math.norm(self._query_down(rows), self._query_norm))
        query = query.view(count, heads, -1)
        latent, key = self._down(rows).split([rank, form.turned], 1)
        turned = torch.cat((query[..., form.straight :], key[:, None]), 1)
        if form.interleaved:  # into halves, as all others have them: of queries and keys alike
            turned = turned.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2)
        math.rotate(turned, heads, 1, rotary, None)
        row = torch.cat((math.norm(latent, self._norm), turned[:, heads]), 1)
        (held,) = cache.append(row[None, None], self._index)
        straight = self._keys(query[..., : form.straight])
        query = torch.cat((straight, turned[:, :heads]), 2)
        # The turned part is summed, too, and left: so what is held is one tensor for both.
        sums = math.attention(query, held, held, seen, self._attention)
        values = self._values(sums.view(count, heads, -1)[..., :rank])
        return self._out(values.flatten(1))


class _ByHead:
    """A product for each head."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = products
        compiled = [one for one in products if isinstance(one, RowProduct)]
        self._as_one = EachProduct(compiled) if len(compiled) == len(products) else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """What they make of each head's numbers of rows [R, heads, n]: [R, heads, out]."""
        every = rows.transpose(0, 1).contiguous()
        if self._as_one is not None:
            return self._as_one(every).transpose(0, 1)
        return torch.stack([one(own) for one, own in zip(self._products, every, strict=True)], 1)
