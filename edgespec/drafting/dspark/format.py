"""Head folders: one-pass heads as they are published, read into one description and one set of
names, and written as DeepSpec does.

A folder holds config.json and model.safetensors, or pytorch_model.bin. DeepSpec writes plain
settings side by side, z-lab's DFlash and JetSpec put theirs into `dflash_config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.dspark.head import DSparkHead
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.format import fields_of, matrix_rows
from edgespec.drafting.eagle.shape import rope, whole
from edgespec.drafting.weight_file import (
    HeadFiles,
    checked_head,
    read_tensors,
    scored_tensors,
    write_tensors,
)
from edgespec.errors import ModelError
from edgespec.files import write_whole
from edgespec.model.hub import model_files
from edgespec.model.reading import read_object
from edgespec.planning.architecture import MOST_LAYERS

SAFE, PICKLED, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"

_CONFIDENCE = "confidence_head."
"""Of tensors that are not needed: policies calibrate scores by what turns out right."""


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head as write_head writes it, not a whole model."""
    file = folder / CONFIG
    return file.is_file() and "target_layer_ids" in read_object(file, "make the head again")


def read_head(
    path: str | Path, base_hidden: int, base_vocab: int, base_layers: int
) -> HeadFiles[DSparkShape]:
    """Read a head, a folder or a hub id, for a base of this width, vocabulary and depth.

    Raises ModelError if it cannot be read, asks for what edgespec does not compute, or does not
    fit the base.
    """
    files = model_files(path)
    config = files.file(CONFIG)
    raw, file = read_tensors(files, SAFE, PICKLED)
    stored = {
        name.removeprefix("model."): tensor
        for name, tensor in raw.items()
        if not name.endswith("rotary_emb.inv_freq") and not name.startswith(_CONFIDENCE)
    }
    shape = read_settings(config, stored, base_hidden, base_vocab, base_layers)
    if shape.markov_rank and shape.markov_rows not in (base_vocab, shape.vocab):
        raise ModelError(
            f"the Markov head in {file} knows {shape.markov_rows} tokens, the base has "
            f"{base_vocab}; use the head that was trained for this base"
        )
    return checked_head(shape, stored, DSparkHead, "DSpark or DFlash", file, base_vocab)


def write_head(
    folder: Path,
    shape: DSparkShape,
    tensors: Mapping[str, torch.Tensor],
    tokens: torch.Tensor | None,
    base_vocab: int,
    base_layers: int,
    positions: int,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head as DeepSpec does, floats in `dtype`.

    `tensors`: by DSparkHead's names, and "embed_tokens.weight" and "lm_head.weight" if it has its
    own; `tokens` int64 [vocab], ascending: see HeadFiles; `positions`: how long a text may be.
    Raises OSError as writing does.
    """
    named = {name: weight.detach().to(dtype).cpu() for name, weight in tensors.items()}
    named |= scored_tensors(tokens, base_vocab)
    write_tensors(named, folder / SAFE)
    settings = _settings(shape, base_vocab, base_layers, positions, dtype)
    text = json.dumps(settings, indent=2) + "\n"
    write_whole(folder / CONFIG, text)


def _settings(
    shape: DSparkShape, base_vocab: int, base_layers: int, positions: int, dtype: torch.dtype
) -> dict[str, Any]:
    """config.json of a head; the last four settings are said, where DeepSpec leaves them open."""
    rope = shape.rope
    settings: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": shape.eps,
        "attention_bias": shape.qkv_bias,
        "rope_theta": rope.theta,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "vocab_size": base_vocab,
        "draft_vocab_size": shape.vocab,
        "dtype": str(dtype).removeprefix("torch."),
        "block_size": shape.block,
        "num_target_layers": base_layers,
        "target_layer_ids": [layer - 1 for layer in shape.aux_hidden],
        "mask_token_id": shape.mask_token,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "layer_types": [
            "sliding_attention" if shape.window(layer) else "full_attention"
            for layer in range(shape.layers)
        ],
        "sliding_window": max((w for w in shape.windows if w), default=None),
        "sample_from_anchor": bool(shape.offset),
        "causal_head": shape.causal,
        "revealed_tokens": shape.revealed,
    }
    if rope.llama3 is not None:
        low, high, original = rope.llama3
        settings["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    elif rope.factor != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": rope.factor}
    return settings


MOST_SLOTS = 64
"""Slots of a block: more would guess further ahead than any ring is long."""

_NESTED = "dflash_config"
_KIND = "DSpark or DFlash"  # as messages call it
_KNOWN = {
    "hidden_act": ("silu",),
    "markov_head_type": ("vanilla",),
    "projector_type": ("dflash", "dspark"),
    "attention_mode": ("gqa", "mha"),
}
"""Settings that change the arithmetic, with what edgespec computes."""


def read_settings(
    file: Path,
    tensors: Mapping[str, torch.Tensor],
    base_hidden: int,
    base_vocab: int,
    base_layers: int,
) -> DSparkShape:
    """The shape of the head with this config.json and these tensors.

    Raises ModelError for settings that are damaged, of another base, or that edgespec does not
    compute.
    """
    raw = read_object(file, "download the head again")
    nested = raw.get(_NESTED)
    settings = {**raw, **nested} if isinstance(nested, dict) else raw
    for name, fine in _KNOWN.items():
        if settings.get(name, fine[0]) not in fine:
            raise ModelError(
                f"{file} says {name} {settings[name]!r}, edgespec computes "
                f"{' and '.join(fine)}; use another head"
            )
    made_for = settings.get("num_target_layers", base_layers)
    if made_for != base_layers:
        raise ModelError(
            f"{file} is of a head for a base of {made_for} layers, this base has {base_layers}; "
            "use the head that was trained for this base"
        )
    layers = whole(settings, "num_hidden_layers", file, MOST_LAYERS)
    block = whole(settings, "block_size", file)
    if block > MOST_SLOTS:
        raise ModelError(
            f"block_size in {file} is {block}, edgespec computes blocks of up to {MOST_SLOTS} "
            "slots; use another head"
        )
    layer_fields = fields_of(settings, tensors, "layers.0.", _KIND, file)
    hidden = matrix_rows(tensors, "fc.weight", _KIND, file)
    markov = tensors.get("markov_head.markov_w1.weight")
    rank = 0 if markov is None else int(markov.shape[-1])
    scored = next((tensors[n] for n in ("lm_head.weight", "d2t") if n in tensors), None)
    shape = DSparkShape(
        layers=layers,
        hidden=hidden,
        base_hidden=base_hidden,
        vocab=base_vocab if scored is None else len(scored),
        block=block,
        aux_hidden=_taps(settings, layers, base_layers, file),
        rope=rope(settings, file),
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        # DeepSpec lets the anchor's slot guess the next token, the others do not.
        offset=int(_flag(settings, "sample_from_anchor", settings is raw, file)),
        mask_token=_mask_token(settings, tensors, base_vocab, file),
        markov_rank=rank,
        markov_rows=0 if markov is None else len(markov),
        causal=_flag(settings, "causal_head", False, file),
        windows=_windows(settings, layers, file),
        revealed=_revealed(settings, block, file),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
        **layer_fields,
    )
    if hidden != base_hidden and not (shape.own_embedding and shape.own_head):
        raise ModelError(
            f"the head beside {file} is {hidden} wide and brings no embedding and output matrix of "
            f"its own, the base is {base_hidden} wide; use the head that was trained for this base"
        )
    return shape


def _flag(settings: Mapping[str, Any], name: str, usual: bool, file: Path) -> bool:
    said = settings.get(name, usual)
    if not isinstance(said, bool):
        raise ModelError(f"{name} in {file} is {said!r}, no flag; download the head again")
    return said


def usual_taps(base_layers: int, layers: int) -> tuple[int, ...]:
    """The base's layers whose incoming rows a DFlash head of so many layers reads, unless it says
    otherwise: spread from the second to the third last."""
    if layers == 1:
        return (base_layers // 2 + 1,)
    step = (base_layers - 4) / (layers - 1)
    return tuple(round(1 + at * step) + 1 for at in range(layers))


def _taps(
    settings: Mapping[str, Any], layers: int, base_layers: int, file: Path
) -> tuple[int, ...]:
    """The base's layers whose incoming rows are read: the file counts a layer by what leaves it, so
    that -1 is the embedding."""
    name = "target_layer_ids"
    said = settings.get(name)
    if said is None and base_layers > layers + 2:
        return usual_taps(base_layers, layers)
    if not isinstance(said, list) or not said or not all(type(i) is int for i in said):
        raise ModelError(f"{file} has no list of layers {name!r}; download the head again")
    taps = tuple(layer + 1 for layer in said)
    if not all(0 <= layer < base_layers for layer in taps) or len(set(taps)) < len(taps):
        raise ModelError(
            f"{name} in {file} names layers {said!r}, the base has {base_layers}; use the head "
            "that was trained for this base"
        )
    return taps


def _mask_token(
    settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], base_vocab: int, file: Path
) -> int | None:
    if "mask_embedding" in tensors:
        return None
    token = settings.get("mask_token_id")
    if type(token) is not int or not 0 <= token < base_vocab:
        raise ModelError(
            f"mask_token_id in {file} is {token!r}, the base has {base_vocab} tokens; use the head "
            "that was trained for this base"
        )
    return token


def _windows(settings: Mapping[str, Any], layers: int, file: Path) -> tuple[int | None, ...]:
    """How many positions each layer sees; () if all see all."""
    kinds = settings.get("layer_types")
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return ()
    window = settings.get("sliding_window")
    if len(kinds) != layers or type(window) is not int or not 0 < window < 1 << 31:
        raise ModelError(
            f"layer_types and sliding_window in {file} do not say what each of {layers} layers "
            "sees; download the head again"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _revealed(settings: Mapping[str, Any], block: int, file: Path) -> int:
    revealed = settings.get("revealed_tokens", 0)
    if type(revealed) is not int or not 0 <= revealed < block:
        raise ModelError(
            f"revealed_tokens in {file} is {revealed!r}, a block has {block} slots; download the "
            "head again"
        )
    return revealed
