"""Model families: which model types run, what each does around its layers, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from edgespec.errors import ModelError
from edgespec.model.packed.settings import packing_of


@dataclass(frozen=True)
class Family:
    """What a model type's own `Model.forward` does around its layers; they do the rest themselves.

    `windows`: whether a sliding window is in no layer, in all of them, or where `layer_types` says.
    `own_angles`: each layer type has rotary embeddings of its own. `scaled_embedding`: embedded
    tokens are multiplied by the root of hidden_size. `capped_logits`: final_logit_softcapping
    counts.
    """

    windows: Literal["none", "all", "by type"] = "none"
    own_angles: bool = False
    scaled_embedding: bool = False
    capped_logits: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(windows="by type"),
    "qwen3": Family(windows="by type"),
    "gemma2": Family(windows="by type", scaled_embedding=True, capped_logits=True),
    "gemma3_text": Family(
        windows="by type", own_angles=True, scaled_embedding=True, capped_logits=True
    ),
    "phi3": Family(windows="all"),
    "qwen3_moe": Family(windows="all"),
}
"""Every value of `model_type` that is accepted."""

FULL, SLIDING = "full_attention", "sliding_attention"
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_WRAPPERS = {"gemma3": "gemma3_text"}  # models with images whose text part is such a family


def embedding_scale(config: PretrainedConfig, dtype: torch.dtype) -> torch.Tensor | None:
    """What embedded tokens are multiplied by, as one number of `dtype`; None for nothing."""
    if not FAMILIES[config.model_type].scaled_embedding:
        return None
    return torch.tensor(config.hidden_size**0.5, dtype=dtype)


def angle_kinds(config: PretrainedConfig) -> list[str | None]:
    """For each layer, the layer type whose rotary embeddings it uses; None where all share one."""
    if FAMILIES[config.model_type].own_angles:
        return list(config.layer_types)
    return [None] * int(config.num_hidden_layers)


def logit_cap(config: PretrainedConfig) -> float | None:
    """The soft cap c of the head, whose logits are c · tanh(x / c); None if it has none."""
    if not FAMILIES[config.model_type].capped_logits:
        return None
    cap = config.final_logit_softcapping
    return None if cap is None else float(cap)


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise ModelError if a config.json, as read, is not of a model type and packing that run."""
    kind = settings.get("model_type")
    if isinstance(kind, str) and kind in _WRAPPERS:
        raise ModelError(
            f"the model in {folder} is of type {kind!r}, a model of text and images, of which "
            f"edgespec runs only the text part, from a checkpoint of its own; use one of type "
            f"{_WRAPPERS[kind]!r} (edgespec runs {', '.join(FAMILIES)})"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ModelError(
            f"the model in {folder} is of type {kind!r}, which edgespec does not run; it runs "
            f"{', '.join(FAMILIES)}"
        )
    packing_of(folder, settings)


def check_config(folder: Path, settings: dict[str, Any], config: PretrainedConfig) -> None:
    """Raise ModelError for a variant of a family that would not be computed exactly.

    `settings`: config.json as read; `config`: what transformers made of it.
    """
    kind = settings["model_type"]
    if config.model_type != kind:
        raise ModelError(
            f"the model in {folder} says that it is of type {kind!r}, but transformers would run "
            f"it as {config.model_type!r}, which edgespec does not run; it runs "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    _check_angles(folder, family, config)
    _check_windows(folder, family, settings, config)
    if getattr(config, "use_bidirectional_attention", None):
        raise ModelError(
            f"the model in {folder} lets tokens see later ones (use_bidirectional_attention in "
            "config.json), so it does not write text from left to right; use a causal model"
        )
    if kind == "gemma3_text" and config.attn_logit_softcapping is not None:
        # transformers accepts the setting and computes without it: nothing to be exact against.
        raise ModelError(
            f"the model in {folder} asks for a soft cap in attention (attn_logit_softcapping in "
            f"config.json), which models of type {kind!r} do not have; use the original release"
        )


def _check_angles(folder: Path, family: Family, config: PretrainedConfig) -> None:
    angles = config.rope_parameters
    for one in angles.values() if family.own_angles else [angles]:
        rope = one.get("rope_type", "default")
        if rope not in _FIXED_ROPE:
            # A cached key would not be what one machine computes.
            raise ModelError(
                f"the model in {folder} uses rotary embeddings of type {rope!r}, which edgespec "
                "does not run: they turn keys by angles that change with the sequence's length, "
                f"but cached keys keep theirs; it runs {', '.join(_FIXED_ROPE)}"
            )


def _check_windows(
    folder: Path, family: Family, settings: dict[str, Any], config: PretrainedConfig
) -> None:
    """Refuse windows that transformers' layers would leave out, and those that show nothing."""
    window = getattr(config, "sliding_window", None)
    asked = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    types = set(getattr(config, "layer_types", None) or ())
    if family.windows == "by type":
        known = types <= {FULL, SLIDING}
    else:
        used = SLIDING if family.windows == "all" and window is not None else FULL
        known = types <= {used}
    if not known or (family.windows == "none" and asked is not None):
        raise ModelError(
            f"the model in {folder} asks for attention that models of type {config.model_type!r} "
            f"do not have (sliding_window {asked}, layer_types {sorted(types)} in config.json); "
            "use the original release"
        )
    windowed = SLIDING in types if family.windows == "by type" else window is not None
    if windowed and (not isinstance(window, int) or window < 1):
        raise ModelError(
            f"the model in {folder} has a sliding window of {window!r} tokens, which must be at "
            "least 1; download the model again"
        )
