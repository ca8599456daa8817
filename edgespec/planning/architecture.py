"""Architecture: the numbers of a config.json that decide how many bytes a model's parts have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

from edgespec.config import Quantisation
from edgespec.errors import ConfigError
from edgespec.planning.refused import refusal_of
from edgespec.planning.text_part import (
    CONVOLVING,
    DELTA,
    FOLDING,
    GROUPED,
    LATENT,
    SHARING,
    text_settings,
)
from edgespec.planning.uneven import FULL, SLIDING, Uneven
from edgespec.types.boundaries import HELD_ROWS, HELD_STATES

MOST_LAYERS, MOST_EXPERTS = 1024, 4096
"""Of a model, whose parts are made one by one; the largest known have 126 and 512."""

DEFAULTS: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("defaults.json").read_bytes()
)
"""By model type, what a field that config.json leaves out stands for, if model.model_config does
not say it of all."""
FAMILIES = tuple(DEFAULTS)
"""Values of `model_type` whose sizes are known."""
_ALWAYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings"),
)
"""Fields that every config.json has, so that one without them is damaged."""
EXPERTS = {
    "qwen3_moe": "num_experts",
    "gpt_oss": "num_local_experts",
    "olmoe": "num_experts",
    "mixtral": "num_local_experts",
    "lfm2_moe": "num_experts",
    "granitemoehybrid": "num_local_experts",
    **dict.fromkeys(SHARING, "num_experts"),
    **dict.fromkeys(GROUPED, "n_routed_experts"),
    "ernie4_5_moe": "moe_num_experts",
    "hunyuan_v1_moe": "num_experts",
    "nemotron_h": "n_routed_experts",
}
"""Mixtures, and the field that counts their experts."""
ACTIVE = {"gemma4_text": "top_k_experts", "ernie4_5_moe": "moe_k", "hunyuan_v1_moe": "moe_topk"}
"""Mixtures that have another field for how many of them a row goes through than
num_experts_per_tok."""
WIDTHS = {
    "qwen3_moe": "moe_intermediate_size",
    **dict.fromkeys(("lfm2_moe", "ernie4_5_moe", *SHARING, *GROUPED), "moe_intermediate_size"),
    "nemotron_h": "moe_intermediate_size",
}
"""Mixtures that have another field for the inner width than intermediate_size."""


Matrices = tuple[tuple[int, int], ...]
"""Shapes [out, in]."""


@dataclass(frozen=True, slots=True)
class Latent:
    """Of layers that hold one latent of a row for all heads (see model.latent.LatentForm)."""

    rank: int
    turned: int
    straight: int
    value: int
    query_rank: int = 0

    def matrices(self, heads: int, hidden: int) -> Matrices:
        """Shapes [out, in] of a layer's, of which some are of one head."""
        queries, narrow = heads * (self.straight + self.turned), self.query_rank
        down = ((narrow, hidden), (queries, narrow)) if narrow else ((queries, hidden),)
        of_head = ((self.rank, self.straight), (self.value, self.rank))
        entering = (*down, (self.rank + self.turned, hidden))
        return (*entering, *of_head * heads, (hidden, heads * self.value))


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes of a decoder-only model whose layers are all alike, but for what `uneven` says, and
    that `convolutions` of them may have a short convolution in place of attention, `states` of them
    a state (`beside`: with attention), `alone` ones an MLP or experts, ungated, where no other has
    some, and `dense` ones of a mixture one MLP of a width of their own, `dense_width`: then a layer
    is what they are on average.

    `intermediate`: inner width of the gated MLP, or of one expert. `head_dim` 0: hidden / heads.
    `tied`: the output head is the input embedding. `experts` 0: no mixture; else each row goes
    through `active` of them, and through an MLP beside them that is `shared` wide, if that is not
    0. A state has a matrix [`state_key`, `state_value`] for each of its `state_heads`, whose keys
    are `state_groups`. `gated`: attention and states have a gate more, by number or by head.
    `latent`: what attention is over, if not over keys. `family`: its `model_type`. `coded`: caches
    hold rows in 8 bits, not 16.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 0
    tied: bool = False
    experts: int = 0
    active: int = 0
    shared: int = 0
    convolutions: int = 0
    states: int = 0
    state_heads: int = 0
    state_groups: int = 0
    state_key: int = 0
    state_value: int = 0
    beside: bool = False
    alone: int = 0
    gated: bool = False
    dense: int = 0
    dense_width: int = 0
    family: str = "llama"
    uneven: Uneven | None = None
    latent: Latent | None = None
    coded: bool = False

    @property
    def width(self) -> int:
        """Numbers in the queries of one row; where layers differ, the most."""
        dim = self.head_dim or self.hidden // self.heads
        return self.heads * max(dim, self.uneven.head_dim if self.uneven else 0)

    @property
    def kv_width(self) -> int:
        """Numbers in the keys (or the values) of one row in one layer; half of its latent."""
        return self.mean(self._kv_width)

    @property
    def attention_matrices(self) -> Matrices:
        """Shapes [out, in] of the queries', keys', values' and output matrices of a first layer,
        and of what else it has beside the MLP or the experts."""
        return self.matrices(0)[0]

    @property
    def attending(self) -> int:
        """How many layers have queries, keys and values."""
        others = 0 if self.beside else self.states
        return self.layers - self.convolutions - self.alone - others

    @property
    def attentive(self) -> Architecture:
        """The same with attention and an MLP in every layer, as draft heads for it have them."""
        return replace(self, convolutions=0, states=0, beside=False, alone=0)

    @property
    def convolution_matrices(self) -> Matrices:
        """Shapes [out, in] of the matrices around a convolution."""
        return ((3 * self.hidden, self.hidden), (self.hidden, self.hidden))

    @property
    def state_matrices(self) -> Matrices:
        """Shapes [out, in] of the matrices around a state: gates, keys, queries, values and steps,
        and what is made of all."""
        inner = self.state_heads * self.state_value
        entering = 2 * inner + 2 * self.state_groups * self.state_key
        entering += self.state_heads * (1 + self.gated)
        return ((entering, self.hidden), (self.hidden, inner))

    @property
    def mlp_matrices(self) -> Matrices:
        """Shapes [out, in] of the three matrices of the gated MLP, or of one expert."""
        return self.matrices(0)[1]

    def matrices(self, layer: int) -> tuple[Matrices, Matrices]:
        """Of one layer: those beside the MLP or the experts, and those of the MLP or an expert."""
        hidden, uneven = self.hidden, self.uneven
        kv, shared = (self._held(layer), hidden), self._mlp_of(self.shared)
        if uneven is None:
            queries = (self.width * (1 + self.gated), hidden)
            attention: Matrices = queries, kv, kv, (hidden, self.width)
            if self.latent is not None:
                attention = self.latent.matrices(self.heads, hidden)
            return (*attention, *shared), self._mlp_of(self.intermediate)
        full, shares = uneven.kind(layer) == FULL, layer >= self.layers - uneven.shared
        width = self.heads * (uneven.head_dim if full else self.head_dim)
        own = 0 if shares else 1 if full and not uneven.values else 2
        told = ((uneven.told, hidden),) * 2 + ((hidden, uneven.told),) if uneven.told else ()
        inner = self.intermediate * (2 if shares and uneven.wider else 1)
        beside = ((width, hidden), *(kv,) * own, (hidden, width), *told, *shared)
        return beside, self._mlp_of(inner)

    def _mlp_of(self, inner: int) -> Matrices:
        """Shapes [out, in] of an MLP so wide: of gate, if something gates, up and down."""
        up, down = (inner, self.hidden), (self.hidden, inner)
        return ((up, down) if self.alone else (up, up, down)) if inner else ()

    def _held(self, layer: int) -> int:
        """Numbers in one layer's keys, which are another layer's where it has none."""
        if self.latent is not None:
            return -(-(self.latent.rank + self.latent.turned) // 2)
        if self.uneven is None:
            return self.kv_heads * (self.head_dim or self.hidden // self.heads)
        if self.uneven.kind(layer) == FULL:
            return self.uneven.kv_heads * self.uneven.head_dim
        return self.kv_heads * self.head_dim

    def _kv_width(self, layer: int) -> int:
        """Numbers in the keys that a cache holds for a layer."""
        shared = self.uneven.shared if self.uneven else 0
        return self._held(layer) if layer < self.layers - shared else 0

    def mean(self, of: Callable[[int], int], first: int = 0, end: int = 0) -> int:
        """Of what `of(layer)` says for layers [first, end), or for all, rounded up."""
        if self.uneven is None:
            return of(0)
        layers = range(first, end or self.layers)
        return -(-sum(map(of, layers)) // len(layers))

    @property
    def bound(self) -> int:
        """So many last layers have to be on one stage, as some read the keys of others."""
        return self.uneven.bound(self.layers) if self.uneven else 0

    def part(self, first: int, end: int) -> tuple[float, int]:
        """Of layers [first, end): their weights as a multiple of those that as many usual layers
        have, and the mean of `kv_bytes`."""
        weights = self.mean(self._weights, first, end) / self.layer_weights
        return weights, 2 * self._row_bytes(self.mean(self._kv_width, first, end))

    def _weights(self, layer: int) -> int:
        beside, mlp = self.matrices(layer)
        return _weights_of(beside) + _weights_of(mlp) * max(1, self.experts)

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer, all experts included.

        Norms, biases and a mixture's router, together below 0.1 %, are left out.
        """
        return self.mean(self._weights) if self.uneven else self._mixed(mul) + self.mlp_weights

    @property
    def mlp_weights(self) -> int:
        """Weights of the matrices of one layer's MLP, or of all its experts."""
        if self.uneven is None:
            return self._mlp(lambda rows, columns: rows * columns)
        return self.mean(lambda layer: _weights_of(self.matrices(layer)[1])) * max(1, self.experts)

    @property
    def table_weights(self) -> int:
        """Numbers of what all layers are told of tokens, which stay in their files."""
        return self.vocab * self.layers * self.uneven.told if self.uneven else 0

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head in 16 bit; the input embedding has as many."""
        return 2 * self.vocab * self.hidden

    def _row_bytes(self, numbers: int) -> int:
        """Bytes of so many numbers of a row, of which those of a head share a scale."""
        if not self.coded:
            return 2 * numbers
        if self.latent is not None:  # of which this is a half
            return numbers + 2
        return numbers + 4 * -(-numbers // (self.head_dim or self.hidden // self.heads))

    @property
    def kv_bytes(self) -> int:
        """Bytes of what one layer holds of one row, keys and values."""
        convolved = self.convolutions * self._row_bytes(self.hidden)
        return (self._attended + convolved) // self.layers

    @property
    def _attended(self) -> int:
        """Bytes of the keys and values of one row in all layers."""
        return self.attending * 2 * self._row_bytes(self.kv_width)

    @property
    def seen_share(self) -> float:
        """How much of these is read of each earlier row: a convolution reads a few rows alone."""
        return self._attended / self.layers / self.kv_bytes if self.convolutions else 1.0

    @property
    def request_bytes(self) -> int:
        """Bytes that one layer holds of a request however long it is: states and the rows that are
        not folded into them, and their convolution's inputs: in 32 bit, which is too much for the
        inputs where a ring computes in 16."""
        keys = self.state_groups * self.state_key
        inner = self.state_heads * self.state_value
        row = 4 * (3 * keys + 2 * inner + self.state_heads)
        state = HELD_STATES * 4 * inner * self.state_key
        return self.states * (state + HELD_ROWS * row) // self.layers

    @property
    def largest_matrix(self) -> int:
        """Weights of the largest matrix of a layer."""
        mixing = self.convolution_matrices if self.convolutions else ()
        mixing += self.state_matrices if self.states else ()
        ends = (some for end in {0, self.layers - 1} for some in self.matrices(end))
        matrices = (shape for some in (*ends, mixing) for shape in some)
        return max(self.dense_width * self.hidden, *(r * c for r, c in matrices))

    def attention_bytes(self, quantisation: Quantisation) -> int:
        if self.uneven is None:
            return self._mixed(lambda rows, columns: matrix_bytes(rows, columns, quantisation))
        return self.mean(lambda layer: _bytes_of(self.matrices(layer)[0], quantisation))

    def _mixed(self, of: Callable[[int, int], int]) -> int:
        """That of the matrices around what mixes rows, and of an MLP beside experts, of a layer on
        average."""
        shared = sum(of(*shape) for shape in self._mlp_of(self.shared))
        attention = sum(of(*shape) for shape in self.attention_matrices) - shared
        convolution = sum(of(*shape) for shape in self.convolution_matrices)
        state = sum(of(*shape) for shape in self.state_matrices) if self.states else 0
        every = self.attending * attention + self.convolutions * convolution + self.states * state
        with_experts = (self.alone or self.layers) - self.dense
        return every // self.layers + shared * with_experts // self.layers

    def mlp_bytes(self, quantisation: Quantisation) -> int:
        """Bytes of one layer's MLP; of all its experts, if it is a mixture."""
        if self.uneven is None:
            return self._mlp(lambda rows, columns: matrix_bytes(rows, columns, quantisation))
        one = self.mean(lambda layer: _bytes_of(self.matrices(layer)[1], quantisation))
        return one * max(1, self.experts)

    def _mlp(self, of: Callable[[int, int], int]) -> int:
        """That of the matrices of an MLP, or of all its experts, of a layer on average."""
        one = max(1, self.experts) * sum(of(*shape) for shape in self.mlp_matrices)
        dense = sum(of(*shape) for shape in self._mlp_of(self.dense_width))
        others = (self.alone or self.layers) - self.dense
        return (others * one + self.dense * dense) // self.layers

    def layer_bytes(self, quantisation: Quantisation) -> int:
        """Bytes of one layer's matrices, scales included."""
        return self.attention_bytes(quantisation) + self.mlp_bytes(quantisation)


def _weights_of(matrices: Matrices) -> int:
    return sum(rows * columns for rows, columns in matrices)


def _bytes_of(matrices: Matrices, quantisation: Quantisation) -> int:
    return sum(matrix_bytes(rows, columns, quantisation) for rows, columns in matrices)


def matrix_bytes(rows: int, columns: int, quantisation: Quantisation) -> int:
    """Bytes of a matrix [rows, columns] as a block holds it, scales included.

    none: 16 bits a weight. int8: 8, and 16 a row. int4: 4, and a scale and a zero of 16 bits each
    for every `group` columns of a row. nf4: 4, and a scale of 32 bits for every `group` weights;
    with `double` these scales take 8 bits, and one of 32 for 256 of them, beside their mean.
    """
    weights = rows * columns
    if quantisation.kind == "none":
        return 2 * weights
    if quantisation.kind == "int8":
        return weights + 2 * rows
    if quantisation.kind == "int4":
        return -(-weights // 2) + 4 * rows * -(-columns // quantisation.group)
    scales = -(-weights // quantisation.group)
    if quantisation.double:
        return -(-weights // 2) + scales + 4 * -(-scales // 256) + 4
    return -(-weights // 2) + 4 * scales


Q4_K, Q5_K, Q6_K, Q8_0, MXFP4 = 4.5, 5.5, 6.5625, 8.5, 4.25
"""Bits that a weight takes in GGUF's block types."""


def gguf_bytes(of: Architecture, name: str, fused: bool = False) -> int:
    """Bytes of the weights in a GGUF file of that name: of Q8_0, of MXFP4, in which only experts
    are and all else is of Q8_0, or else of Q4_K_M.

    llama.cpp holds all matrices of the latter as Q4_K, but as Q6_K the head (the embedding, if that
    is the head) and, in half of the layers, the values' and the last one of the MLP
    (src/llama-quant.cpp). `fused`: queries, keys and values are one matrix, which is Q5_K.
    """
    ends = of.head_bytes // 2 * (1 if of.tied else 2)
    if "Q8_0" in name or "MXFP4" in name:
        experts = of.layers * of.mlp_weights if "MXFP4" in name else 0
        rest = of.layers * of.layer_weights + of.table_weights + ends - experts
        return int((rest * Q8_0 + experts * MXFP4) / 8)
    eighth = of.layers // 8
    fine = sum(
        at < eighth or at >= 7 * of.layers // 8 or (at - eighth) % 3 == 2 for at in range(of.layers)
    )
    values = of.kv_width * of.hidden
    of_values = 0 if fused else values * of.attending // of.layers
    of_mlps = of.mlp_weights // len(of.mlp_matrices) + of.shared * of.hidden
    finer = fine * (of_mlps + of_values) + of.head_bytes // 2
    one = of.layers * (of.hidden * of.width + 2 * values) if fused else 0
    bits = (of.layers * of.layer_weights + ends) * Q4_K + one * (Q5_K - Q4_K)
    bits += of.table_weights * Q5_K
    return int((bits + finer * (Q6_K - Q4_K)) / 8)


def architecture_of(config: Mapping[str, object], where: str) -> Architecture:
    """The sizes in a config.json, or of its text part; `where` is its path, for messages.

    Raises ConfigError for a family that is not known, and for a field that is missing or wrong.
    """
    if (refusal := refusal_of(config, FAMILIES)) is not None:
        kind = config.get("model_type")
        raise ConfigError(f"{where}: model_type is {kind!r}, which does not run: {refusal}")
    config = text_settings(config)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type is {family!r}, whose sizes are not known; known ones: "
            f"{', '.join(FAMILIES)}"
        )
    usual = DEFAULTS[family].items()
    config = {name: value for name, value in usual if name not in _ALWAYS} | config
    heads = _count(config, where, "num_attention_heads")
    hidden = _count(config, where, "hidden_size")
    kv_heads = _count(config, where, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: num_key_value_heads is {kv_heads}, which does not divide the "
            f"num_attention_heads, {heads}"
        )
    head_dim = _count(config, where, "head_dim", hidden // heads)
    latent = _latent(config, where) if family in LATENT else None
    if latent is not None:
        head_dim = latent.straight + latent.turned
    layers = _count(config, where, "num_hidden_layers", most=MOST_LAYERS)
    alone, mixed = 0, family in EXPERTS
    if family == "nemotron_h":
        dense, mixtures = (_of_type(config, where, kind) for kind in ("mlp", "moe"))
        alone, mixed = dense + mixtures, mixtures > 0
    width = WIDTHS.get(family if mixed else "", "intermediate_size")
    experts, active = _experts(config, where, family) if mixed else (0, 0)
    inner, uneven = _count(config, where, width), None
    shared = _shared(config, where, family, inner)
    if family == "gemma4_text":
        uneven = _uneven(config, where, layers, kv_heads, head_dim)
        if config.get("enable_moe_block") is True:
            inner, shared = _count(config, where, "moe_intermediate_size"), inner
            experts = _count(config, where, "num_experts", most=MOST_EXPERTS)
            active = _count(config, where, ACTIVE[family], most=experts)
    if family == "granitemoehybrid" and not experts:
        inner = shared
    dense = _dense(config, where, family, layers) if experts else 0
    return Architecture(
        layers=layers,
        hidden=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv_heads,
        vocab=_count(config, where, "vocab_size"),
        head_dim=head_dim,
        tied=_flag(config, where, "tie_word_embeddings"),
        experts=experts,
        active=active,
        shared=shared if experts else 0,
        convolutions=_of_type(config, where, "conv") if family in CONVOLVING else 0,
        gated=family in DELTA,
        beside=family == "falcon_h1",
        alone=alone,
        dense=dense,
        dense_width=_count(config, where, "intermediate_size") if dense else 0,
        **_states(config, where, family, hidden),
        family=family,
        uneven=uneven,
        latent=latent,
    )


def _latent(config: Mapping[str, object], where: str) -> Latent:
    """The sizes of latents."""
    narrow = config["q_lora_rank"]
    return Latent(
        rank=_count(config, where, "kv_lora_rank", 512),
        turned=_count(config, where, "qk_rope_head_dim", 64),
        straight=_count(config, where, "qk_nope_head_dim", 128),
        value=_count(config, where, "v_head_dim", 128),
        query_rank=0 if narrow is None else _count(config, where, "q_lora_rank"),
    )


def _uneven(
    config: Mapping[str, object], where: str, layers: int, kv_heads: int, head_dim: int
) -> Uneven:
    """How the layers of a Gemma 4 differ."""
    types = config.get("layer_types")
    if types is None:
        types = ["" if (n + 1) % 6 and n + 1 < layers else "full_attention" for n in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise ConfigError(f"{where}: layer_types does not name {layers} layers")
    kinds = "".join(FULL if one == "full_attention" else SLIDING for one in types)
    newer = config.get("per_layer_config")
    of_full = newer.get(str(kinds.find(FULL)), {}) if isinstance(newer, dict) else None
    same = config.get("attention_k_eq_v") is True
    if isinstance(of_full, dict):
        dim = _count(of_full, where, "head_dim", head_dim)
        heads = _count(of_full, where, "num_key_value_heads", kv_heads)
    else:
        dim = _count(config, where, "global_head_dim", 512)
        heads = _count(config, where, "num_global_key_value_heads", kv_heads) if same else kv_heads
    shared = config.get("num_kv_shared_layers") or 0
    if (
        not isinstance(shared, int)
        or not 0 <= shared < layers
        or set(kinds[: layers - shared]) != set(kinds)
    ):
        raise ConfigError(f"{where}: num_kv_shared_layers is {shared!r}, which cannot be")
    told = config.get("hidden_size_per_layer_input", 256)
    return Uneven(
        kinds,
        head_dim=dim,
        kv_heads=heads,
        values=not same,
        shared=shared,
        wider=config.get("use_double_wide_mlp") is True,
        told=told if isinstance(told, int) and 0 < told < 1 << 31 else 0,
    )


def _shared(config: Mapping[str, object], where: str, family: str, inner: int) -> int:
    """The width of the MLP beside the experts, which are `inner` wide; 0 where there is none."""
    if family == "granitemoehybrid":
        return _count(config, where, "shared_intermediate_size")
    if family in SHARING or family == "nemotron_h":
        return _count(config, where, "shared_expert_intermediate_size", 512)
    if family in GROUPED or family == "ernie4_5_moe":
        field, usual = "n_shared_experts", 1
        if family == "ernie4_5_moe":
            field, usual = "moe_num_shared_experts", 2
        return inner * _count({field: usual, **config}, where, field, least=0)
    return inner if family == "hunyuan_v1_moe" else 0


def _dense(config: Mapping[str, object], where: str, family: str, layers: int) -> int:
    """How many layers of a mixture have no experts; at least one has some."""
    field, usual = ("num_dense_layers", 2) if family == "lfm2_moe" else ("first_k_dense_replace", 1)
    if family == "nemotron_h":
        return _of_type(config, where, "mlp")
    if family == "lfm2_moe" or family in GROUPED:
        return min(_count({field: usual, **config}, where, field, least=0), layers - 1)
    if family == "ernie4_5_moe":
        given = {"moe_layer_start_index": 1, "moe_layer_end_index": -1, **config}
        step = _count(config, where, "moe_layer_interval", 1)
        first = _count(given, where, "moe_layer_start_index", least=0)
        end = _count(given, where, "moe_layer_end_index", least=-1)
        last = layers - 1 if end == -1 else end
        found = sum((n + 1) % step > 0 or not first <= n <= last for n in range(layers))
        return min(found, layers - 1)
    step = _count(config, where, "decoder_sparse_step", 1)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list):
        raise ConfigError(f"{where}: mlp_only_layers is {named!r}, it must be a list")
    found = sum(n in named or (n + 1) % step > 0 for n in range(layers))
    return min(found, layers - 1)


def longest_context(config: Mapping[str, object], where: str) -> int:
    """Tokens that a model can hold. Raises ConfigError if config.json does not say it."""
    return _count(text_settings(config), where, "max_position_embeddings")


def _states(config: Mapping[str, object], where: str, family: str, hidden: int) -> dict[str, Any]:
    """Sizes of states, where there are some."""
    if family in DELTA:
        layers = _count(config, where, "num_hidden_layers", most=MOST_LAYERS)
        listed = config.get("layer_types") is not None
        every = _count(config, where, "full_attention_interval", 4)
        states = _of_type(config, where, "linear_attention") if listed else layers - layers // every
        heads = _count(config, where, "linear_num_value_heads", 32)
        groups = _count(config, where, "linear_num_key_heads", 16)
        key = _count(config, where, "linear_key_head_dim", 128)
        value = _count(config, where, "linear_value_head_dim", 128)
    elif family in FOLDING:
        states = _of_type(config, where, "linear_attention")
        heads = _count(config, where, "mamba_n_heads", 128)
        groups = _count(config, where, "mamba_n_groups", 1)
        key = _count(config, where, "mamba_d_state", 256)
        inner = _count(config, where, "mamba_expand", 2) * hidden
        if family == "falcon_h1":
            states = _count(config, where, "num_hidden_layers", most=MOST_LAYERS)
            inner = _count(config, where, "mamba_d_ssm", inner)
        value = max(1, inner // heads)
        value = _count(config, where, "mamba_d_head") if family == "nemotron_h" else value
    else:
        return {}
    sizes = {"heads": heads, "groups": groups, "key": key, "value": value}
    return {"states": states, **{f"state_{name}": n for name, n in sizes.items()}} if states else {}


def _of_type(config: Mapping[str, object], where: str, kind: str) -> int:
    """How many layers are of that type; all attend where config.json does not say it."""
    listed = config.get("layer_types")
    kinds = listed if isinstance(listed, list) else []
    if listed is not None and len(kinds) != config.get("num_hidden_layers"):
        raise ConfigError(
            f"{where}: layer_types is no list of num_hidden_layers; download the model again"
        )
    return kinds.count(kind)


def _experts(config: Mapping[str, object], where: str, family: str) -> tuple[int, int]:
    least = int(family != "granitemoehybrid")  # which has dense models, too
    experts = _count(config, where, EXPERTS[family], least=least)
    if not experts:
        return 0, 0
    field = ACTIVE.get(family, "num_experts_per_tok")
    active = _count(config, where, field)
    if active > experts:
        raise ConfigError(
            f"{where}: {field} is {active}, more than the {EXPERTS[family]}, {experts}"
        )
    return experts, active


def _count(
    config: Mapping[str, object],
    where: str,
    field: str,
    default: int = 0,
    most: int = 1 << 31,
    least: int = 1,
) -> int:
    """An integer from `least` on; `default` > 0 stands for one that is missing or null."""
    value = config.get(field)
    if value is None and default > 0:
        return default
    if value is None:
        raise ConfigError(f"{where}: {field} is missing; download the model again")
    # The upper limit keeps out what no model has, so that no sum of sizes can grow absurd.
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(
            f"{where}: {field} is {value!r}; it must be a whole number from {least} to {most}"
        )
    return value


def _flag(config: Mapping[str, object], where: str, field: str) -> bool:
    value = config.get(field, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: {field} is {value!r}; it must be true or false")
    return value
