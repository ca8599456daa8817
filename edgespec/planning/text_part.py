"""Text part: what a config.json says of the text model within one that reads images too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_vl": "qwen3",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "lfm2_vl": "lfm2",
}
"""Model types around a text model, and of which type that is unless `text_config` names one."""

_SAME = {
    "qwen3_vl_text": "qwen3",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_moe_text": "qwen3_moe",
    "gemma4_unified_text": "gemma4_text",
}
"""Types that `text_config` names, and which they are for text."""

CONVOLVING = ("lfm2", "lfm2_moe")
"""Types with layers of short convolutions."""

DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
"""Types with layers whose state follows the gated delta rule."""

FOLDING = ("granitemoehybrid", "falcon_h1", "nemotron_h", *DELTA)
"""Types with layers that fold the rows before a boundary into a state."""

SHARING = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
"""Mixtures with an MLP beside the experts that each row takes a share of."""

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Types whose layers hold latents in place of keys."""

GROUPED = ("glm4_moe", *LATENT)
"""Mixtures with an MLP beside the experts, which are chosen in groups, as DeepSeek V3 has them."""

_NEWER = {"mamba": "linear_attention", "attention": "full_attention"}
"""Values of `layer_types`, and what transformers 5 has for them."""

_NEMOTRON = {
    "layers_block_type": "layer_types",
    "layer_norm_epsilon": "rms_norm_eps",
    "mlp_hidden_act": "hidden_act",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "ssm_state_size": "mamba_d_state",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "use_bias": "mamba_proj_bias",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
"""Fields of a Nemotron-H, and what others call them."""
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Its layers' types, one letter each in older files."""

OUTER = frozenset(("tie_word_embeddings", "quantization_config"))
"""Fields that count for the text model where only the wrapper has them."""

_LONGEST = "max_position_embeddings"
_MOST = 1 << 31  # of any size
_FLAT = ("qwen2_5_vl",)
"""Wrappers whose older files have the text model's fields among their own."""


def text_settings(settings: Mapping[str, object]) -> dict[str, Any]:
    """The settings of the text model: `settings` as they are, unless they are a wrapper's, or ask
    for more than is run (see `_of_short`)."""
    kind, inner = settings.get("model_type"), settings.get("text_config")
    if inner is None and kind in _FLAT:
        inner = {name: value for name, value in settings.items() if name != "model_type"}
    if not isinstance(kind, str) or kind not in WRAPPERS or not isinstance(inner, dict):
        return _of_sparse(_of_convolving(_of_folding(_of_short(_of_alike(dict(settings))))))
    outer = {field: settings[field] for field in OUTER if field in settings}
    found: dict[str, Any] = {"model_type": WRAPPERS[kind], **outer, **inner}
    found["model_type"] = _SAME.get(str(found["model_type"]), found["model_type"])
    if kind == "gemma4_unified":  # it has no such tables
        found["hidden_size_per_layer_input"] = 0
    if kind == "qwen3_vl_moe":
        found["norm_topk_prob"] = True  # as it always is there
    for name in ("rope_scaling", "rope_parameters"):
        angles = found.get(name)
        if isinstance(angles, dict) and "mrope_section" in angles:
            found[name] = _of_text(angles)
    return _of_convolving(_of_folding(_of_alike(found)))


def _of_sparse(found: dict[str, Any]) -> dict[str, Any]:
    """Those of a GLM-4.7-Flash as other mixtures have them: how many first layers are dense."""
    if found.get("model_type") == "glm4_moe_lite":
        types = found.get("mlp_layer_types")
        listed = types if isinstance(types, list) else ["dense", "sparse"]
        found["first_k_dense_replace"] = [*listed, "sparse"].index("sparse")
    return found


def _of_alike(found: dict[str, Any]) -> dict[str, Any]:
    """Those of a Hunyuan with as many experts in each layer, by one number for all; of a Qwen 3 by
    the name that it was published with."""
    if found.get("model_type") == "qwen3_moe" and "num_local_experts" in found:
        found.setdefault("num_experts", found["num_local_experts"])
    for name in ("num_experts", "moe_topk") if found.get("model_type") == "hunyuan_v1_moe" else ():
        listed = found.get(name)
        if isinstance(listed, list) and listed and listed.count(listed[0]) == len(listed):
            found[name] = listed[0]
    return found


def _of_folding(found: dict[str, Any]) -> dict[str, Any]:
    """Those of a model with states, whose layers' types older files call otherwise."""
    if found.get("model_type") == "nemotron_h":
        own = {name: found.pop(old) for old, name in _NEMOTRON.items() if old in found}
        found |= own  # which count where the others' are there too
        pattern = found.pop("hybrid_override_pattern", None)
        if found.get("layer_types") is None and isinstance(pattern, str):
            found["layer_types"] = [_PATTERN.get(one, one) for one in pattern]
        if isinstance(found.get("layer_types"), list):
            found["num_hidden_layers"] = len(found["layer_types"])
    types = found.get("layer_types")
    if found.get("model_type") in FOLDING and isinstance(types, list):
        found["layer_types"] = [_NEWER.get(one, one) for one in map(str, types)]
    return found


def _of_convolving(found: dict[str, Any]) -> dict[str, Any]:
    """Those of an LFM2 as other families have them: each layer's type, the width of its MLP as it
    is made (transformers' Lfm2MLP), the norms' epsilon and whether the head is the embedding."""
    if found.get("model_type") not in CONVOLVING:
        return found
    for old, new in (("norm_eps", "rms_norm_eps"), ("tie_embedding", "tie_word_embeddings")):
        if old in found:
            found[new] = found[old]
    attend, layers = found.get("full_attn_idxs"), found.get("num_hidden_layers")
    if found.get("layer_types") is None and isinstance(attend, list) and isinstance(layers, int):
        kinds, full = ("conv", "full_attention"), {n for n in attend if isinstance(n, int)}
        # Beyond any model's: refused later on, where layers are counted.
        found["layer_types"] = [kinds[n in full] for n in range(min(layers, 1 << 12))]
    inner = found.pop("block_ff_dim", None) or found.get("intermediate_size", 12288)
    if found["model_type"] == "lfm2" and isinstance(inner, int) and 0 < inner < _MOST:
        if found.get("block_auto_adjust_ff_dim", True):
            inner = 2 * inner // 3
            factor = found.get("block_ffn_dim_multiplier", 1.0)
            step = found.get("block_multiple_of", 256)
            if _is_number(factor, _MOST) and isinstance(step, int) and step > 0:
                inner = -(-int(factor * inner) // step) * step
        found |= {"intermediate_size": inner, "block_auto_adjust_ff_dim": False}
    return found


def _of_short(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of a Phi-3 or Phi-4 whose angles differ in long sequences, held to short ones: what is
    long is longer than `original_max_position_embeddings`, and a cached key keeps its angle."""
    name = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    angles = settings.get(name)
    if settings.get("model_type") != "phi3" or not isinstance(angles, dict):
        return settings
    short, longest = (
        settings.get(field) for field in ("original_max_position_embeddings", _LONGEST)
    )
    short = 4096 if short is None else short
    if "short_factor" not in angles or not isinstance(short, int) or not isinstance(longest, int):
        return settings
    if not 0 < short < longest:
        return settings
    return settings | {name: {"factor": longest / short, **angles}, _LONGEST: short}


def _of_text(angles: dict[str, object]) -> dict[str, object]:
    """A text token has one position in all the sections of angles that an image's has three in."""
    plain = {name: value for name, value in angles.items() if not name.startswith("mrope_")}
    return {name: "default" if value == "mrope" else value for name, value in plain.items()}


def _is_number(value: object, most: float) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < most
