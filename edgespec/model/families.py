"""Model families: which model types run, what each does around its layers, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from edgespec.errors import ModelError
from edgespec.model.model_config import (
    BOTH,
    CONVOLUTION,
    FULL,
    MIXTURE,
    MLP,
    RECURRENT,
    SLIDING,
    ModelConfig,
)
from edgespec.model.packed.settings import packing_of
from edgespec.planning.architecture import ACTIVE, EXPERTS, MOST_EXPERTS, MOST_LAYERS
from edgespec.planning.refused import refusal_of
from edgespec.planning.text_part import DELTA, GROUPED, LATENT, SHARING


@dataclass(frozen=True)
class Family:
    """What a model type's own `Model.forward` does around its layers; they do the rest themselves.

    `windows`: whether a sliding window is in no layer, in all of them, or where `layer_types` says.
    `own_angles`: each layer type has rotary embeddings of its own. `scaled_embedding`: embedded
    tokens are multiplied by the root of hidden_size. `capped_logits`: final_logit_softcapping
    counts. `multipliers`: embedding_multiplier and logits_scaling count. `scaled_logits`:
    logit_scale counts. `besides`: of which types of `layer_types` are layers that do not attend.
    """

    windows: Literal["none", "all", "by type"] = "none"
    own_angles: bool = False
    scaled_embedding: bool = False
    capped_logits: bool = False
    multipliers: bool = False
    scaled_logits: bool = False
    besides: frozenset[str] = frozenset()


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(windows="by type"),
    "qwen3": Family(windows="by type"),
    "gemma2": Family(windows="by type", scaled_embedding=True, capped_logits=True),
    "gemma3_text": Family(
        windows="by type", own_angles=True, scaled_embedding=True, capped_logits=True
    ),
    "gemma4_text": Family(
        windows="by type", own_angles=True, scaled_embedding=True, capped_logits=True
    ),
    "phi3": Family(windows="all"),
    "qwen3_moe": Family(windows="all"),
    "gpt_oss": Family(windows="by type"),
    "ministral": Family(windows="by type"),
    "ministral3": Family(windows="all"),
    "granite": Family(multipliers=True),
    "granitemoehybrid": Family(multipliers=True, besides=frozenset((RECURRENT,))),
    "falcon_h1": Family(multipliers=True, besides=frozenset((BOTH,))),
    "nemotron_h": Family(besides=frozenset((RECURRENT, MLP, MIXTURE))),
    **dict.fromkeys(DELTA, Family(besides=frozenset((RECURRENT,)))),
    "qwen2_moe": Family(windows="by type"),
    "glm4_moe": Family(),
    "smollm3": Family(windows="by type"),
    "olmo2": Family(),
    "olmo3": Family(windows="by type", own_angles=True),
    "gemma": Family(scaled_embedding=True),
    "exaone4": Family(windows="by type"),
    "seed_oss": Family(),
    "ernie4_5": Family(),
    "glm4": Family(),
    "cohere2": Family(windows="by type", scaled_logits=True),
    "olmoe": Family(),
    "mixtral": Family(windows="all"),
    "hunyuan_v1_dense": Family(),
    **dict.fromkeys(LATENT, Family()),
    "ernie4_5_moe": Family(),
    "hunyuan_v1_moe": Family(),
    "lfm2": Family(besides=frozenset((CONVOLUTION,))),
    "lfm2_moe": Family(besides=frozenset((CONVOLUTION,))),
}
"""Every value of `model_type` that is accepted."""

_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_ONLY = {"proportional": "gemma4_text"}
"""Types of rotary embeddings that are fixed too, and the family that has them."""
_MOST = {
    "num_hidden_layers": MOST_LAYERS,
    "num_experts": MOST_EXPERTS,
    "num_local_experts": MOST_EXPERTS,
    "n_routed_experts": MOST_EXPERTS,
    "moe_num_experts": MOST_EXPERTS,
}
"""Numbers in config.json of parts that are made one by one."""


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float | None:
    """What embedded tokens are multiplied by in `dtype`; None for nothing."""
    family = FAMILIES[config.model_type]
    if family.multipliers:
        return float(config.embedding_multiplier)
    if family.scaled_embedding:
        return float(torch.tensor(config.hidden_size**0.5, dtype=dtype))
    return None


def angle_kinds(config: ModelConfig) -> list[str | None]:
    """For each layer, the layer type whose rotary embeddings it uses; None where all share one."""
    if FAMILIES[config.model_type].own_angles:
        return list(config.layer_types)
    return [None] * int(config.num_hidden_layers)


def layer_embedding(config: ModelConfig) -> int:
    """Numbers that each layer is told of a row's token, beside the row; 0 in most models."""
    if config.model_type != "gemma4_text":
        return 0
    return int(config.hidden_size_per_layer_input)


def key_owners(config: ModelConfig) -> dict[int, int]:
    """The layers that have no keys of their own, and which layer's they read: that of the last of
    the same type that has some."""
    shared = int(config.num_kv_shared_layers) if config.model_type == "gemma4_text" else 0
    types: list[str] = list(config.layer_types) if shared else []
    first = len(types) - shared
    last = {kind: number for number, kind in enumerate(types[:first])}
    return {number: last[types[number]] for number in range(first, len(types))}


def bound_last(config: ModelConfig) -> int:
    """How many last layers have to be on one stage, as some read the keys of others."""
    owners = key_owners(config).values()
    return int(config.num_hidden_layers) - min(owners, default=int(config.num_hidden_layers))


def logits_from(config: ModelConfig, product: torch.Tensor) -> torch.Tensor:
    """Logits from what the head's matrix makes of hidden rows: scaled or capped where the model
    does so. A soft cap c turns each x into c · tanh(x / c)."""
    family = FAMILIES[config.model_type]
    if family.multipliers:
        return product / float(config.logits_scaling)
    if family.scaled_logits:
        return product * float(config.logit_scale)
    cap = config.final_logit_softcapping if family.capped_logits else None
    return product if cap is None else torch.tanh(product / float(cap)) * float(cap)


def folds(config: ModelConfig) -> bool:
    """Whether some layer folds rows into a state."""
    may = FAMILIES[config.model_type].besides & {RECURRENT, BOTH}
    return bool(may) and not may.isdisjoint(config.layer_types)


def has_windows(config: ModelConfig) -> bool:
    """Whether some layer has a sliding window."""
    if FAMILIES[config.model_type].windows == "by type":
        return SLIDING in config.layer_types
    return getattr(config, "sliding_window", None) is not None


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ModelError if a config.json, as read, is not of a model type and packing that run."""
    kind = settings.get("model_type")
    if (refusal := refusal_of(settings, FAMILIES)) is not None:
        raise ModelError(
            f"the model in {folder} is of type {kind!r}, which edgespec does not run: {refusal}"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"the model in {folder} is of type {kind!r}, which edgespec does not run; it runs "
            f"{', '.join(FAMILIES)}"
        )
    for name, most in _MOST.items():
        value = settings.get(name)
        if isinstance(value, int | float) and not value <= most:
            raise ModelError(
                f"the model in {folder} says that {name} is {value}, edgespec runs up to {most}; "
                "download the model again"
            )
    packing_of(folder, settings)


def check_config(folder: Path, settings: dict[str, Any], config: ModelConfig) -> None:
    """Raise ModelError for a variant of a family that would not be computed exactly.

    `settings`: config.json as read; `config`: what was made of it.
    """
    kind = config.model_type
    family = FAMILIES[kind]
    heads, of_keys = int(config.num_attention_heads), int(config.num_key_value_heads)
    if not heads or not of_keys or heads % of_keys:
        raise ModelError(
            f"the model in {folder} says that it has {heads} heads for {of_keys} of keys, which is "
            "no multiple; download the model again"
        )
    _check_own(folder, config)
    _check_angles(folder, family, config)
    _check_windows(folder, family, settings, config)
    later = getattr(config, "use_bidirectional_attention", None)
    if later and not (kind == "gemma4_text" and later == "vision"):  # an image's tokens alone
        raise ModelError(
            f"the model in {folder} lets tokens see later ones (use_bidirectional_attention in "
            "config.json), so it does not write text from left to right; use a causal model"
        )
    experts = getattr(config, EXPERTS.get(kind, "num_experts"), None)
    if isinstance(getattr(config, "moe_topk", None), list) or isinstance(experts, list):
        raise ModelError(
            f"the model in {folder} says that experts differ among layers (moe_topk, num_experts "
            "in config.json), which edgespec does not run; use another model"
        )
    active = int(getattr(config, ACTIVE.get(kind, "num_experts_per_tok"), None) or 0)
    if experts and not 0 < active <= int(experts):
        raise ModelError(
            f"the model in {folder} says that a token goes to {active} of "
            f"{experts} experts; download the model again"
        )
    if kind == "ernie4_5_moe" and config.use_bias:
        raise ModelError(
            f"the model in {folder} has biases, its head too (use_bias in config.json), which "
            "edgespec does not add to logits; use another model"
        )
    if kind == "ernie4_5_moe" and config.moe_norm_min is None:
        raise ModelError(
            f"the model in {folder} has no moe_norm_min in its config.json, by which experts' "
            "shares are bounded; download the model again"
        )
    wanted = ("llama_4_scaling_beta", "original_max_position_embeddings")
    for name in wanted if kind == "ministral3" else ():
        value = config.rope_parameters.get(name)
        if not isinstance(value, int | float) or not 0 <= value < 1 << 31:
            raise ModelError(
                f"the model in {folder} has no {name} in the rope_parameters of its config.json, "
                f"or {value!r}, without which no model of type {kind!r} can be computed; download "
                "the model again"
            )
    if layer_embedding(config) and config.vocab_size_per_layer_input < config.vocab_size:
        raise ModelError(
            f"the model in {folder} has embeddings for its layers of "
            f"{config.vocab_size_per_layer_input} of {config.vocab_size} tokens; download it again"
        )
    if kind == "gemma3_text" and config.attn_logit_softcapping is not None:
        # transformers accepts the setting and computes without it: nothing to be exact against.
        raise ModelError(
            f"the model in {folder} asks for a soft cap in attention (attn_logit_softcapping in "
            f"config.json), which models of type {kind!r} do not have; use the original release"
        )


def _check_own(folder: Path, config: ModelConfig) -> None:
    """Refuse what no published model of these types has, and edgespec's layers do not compute."""
    kind = config.model_type
    biases = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")
    alone = kind in ("granitemoehybrid", *SHARING, *GROUPED)
    wanted: dict[str, object] = {"hidden_act": "silu"} if alone or folds(config) else {}
    if kind == "olmoe":
        wanted = {"clip_qkv": None}
    if kind == "falcon_h1":  # as their products are multiplied
        wanted |= dict.fromkeys(biases, False)
    if kind == "nemotron_h":
        wanted = {"hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False}
        wanted |= {"moe_latent_size": None}
    for name, one in wanted.items():
        if getattr(config, name) != one:
            raise ModelError(
                f"the model in {folder} is of type {kind!r} with {name} {getattr(config, name)!r} "
                f"in its config.json, and edgespec runs that type with {one!r} only; use the "
                "original release"
            )


def _check_angles(folder: Path, family: Family, config: ModelConfig) -> None:
    angles = config.rope_parameters
    head_dim = config.head_dim
    for one in angles.values() if family.own_angles else [angles]:
        rope = one.get("rope_type", "default")
        share = one.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
        turned = head_dim if share is None else int(head_dim * float(share))
        if not 0 < turned <= head_dim or turned % 2:
            raise ModelError(
                f"the model in {folder} turns {turned} numbers of a head's {head_dim} "
                "(partial_rotary_factor in config.json); download the model again"
            )
        short = one.get("short_factor")
        if config.model_type == "phi3" and rope == "longrope" and short is not None:
            if not _are_factors(short, turned // 2):
                raise ModelError(
                    f"the model in {folder} has no {turned // 2} numbers above 0 as short_factor "
                    "in its config.json; download the model again"
                )
        elif (rope not in _FIXED_ROPE and _ONLY.get(rope) != config.model_type) and not (
            config.model_type.startswith("hunyuan_v1") and one.get("alpha")  # by which it is fixed
        ):
            # A cached key would not be what one machine computes.
            raise ModelError(
                f"the model in {folder} uses rotary embeddings of type {rope!r}, which edgespec "
                "does not run: they turn keys by angles that change with the sequence's length, "
                f"but cached keys keep theirs; it runs {', '.join(_FIXED_ROPE)}"
            )


def _are_factors(found: object, count: int) -> bool:
    return (
        isinstance(found, list)
        and len(found) == count
        and all(isinstance(one, int | float) and 0 < one < math.inf for one in found)
    )


def _check_windows(
    folder: Path, family: Family, settings: dict[str, Any], config: ModelConfig
) -> None:
    """Refuse windows that models of the type do not have, and those that show nothing."""
    window = getattr(config, "sliding_window", None)
    asked = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    types = set(getattr(config, "layer_types", None) or ())
    if family.windows == "by type":
        known = types <= {FULL, SLIDING}
    else:
        used = SLIDING if family.windows == "all" and window is not None else FULL
        known = types <= {used} | family.besides
    if not known or (family.windows == "none" and asked is not None):
        raise ModelError(
            f"the model in {folder} asks for attention that models of type {config.model_type!r} "
            f"do not have (sliding_window {asked}, layer_types {sorted(types)} in config.json); "
            "use the original release"
        )
    if has_windows(config) and (not isinstance(window, int) or not 0 < window < 1 << 31):
        raise ModelError(
            f"the model in {folder} has a sliding window of {window!r} tokens, which must be 1 or "
            "more, below 2^31; download the model again"
        )
