"""Head folders: one-pass heads as they are published, read into one description and one set of
names, and written as DeepSpec does.

A folder holds config.json and model.safetensors, or pytorch_model.bin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.dspark.head import DSparkHead
from edgespec.drafting.dspark.settings import read_settings
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.weight_file import (
    check_tensor,
    read_tensors,
    scored_tensors,
    scored_tokens,
    write_tensors,
)
from edgespec.errors import ModelError
from edgespec.files import write_whole
from edgespec.model.hub import model_files
from edgespec.model.reading import read_object

SAFE, PICKLED, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"

_ENDS = ("embed_tokens.weight", "lm_head.weight")
_CONFIDENCE = "confidence_head."
"""Of tensors that are not needed: policies calibrate scores by what turns out right."""


@dataclass(frozen=True)
class DSparkFiles:
    """One head as read.

    `weights`: by DSparkHead's names. `embedding` [V, hidden] and `matrix` [vocab, hidden] are None
    where the base's are borrowed. `tokens` int64 [vocab]: the base's token of each column, None
    where column v is token v; with a borrowed matrix, the rows of it that the head scores with.
    """

    shape: DSparkShape
    weights: dict[str, torch.Tensor]
    embedding: torch.Tensor | None
    matrix: torch.Tensor | None
    tokens: torch.Tensor | None


def is_head(folder: Path) -> bool:
    """Whether a folder holds a head as write_head writes it, not a whole model."""
    file = folder / CONFIG
    return file.is_file() and "target_layer_ids" in read_object(file, "make the head again")


def read_head(path: str | Path, base_hidden: int, base_vocab: int, base_layers: int) -> DSparkFiles:
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
    with torch.device("meta"):
        named = {name: tuple(w.shape) for name, w in DSparkHead(shape).named_parameters()}
    strange = stored.keys() - named.keys() - {*_ENDS, "d2t", "t2d"}
    if strange:
        # Leaving a bias or norm out would compute something else than the head.
        raise ModelError(
            f"{file} holds {min(strange)!r}, which no DSpark or DFlash head that edgespec knows "
            "has; use another head for this base"
        )
    if shape.markov_rank and shape.markov_rows not in (base_vocab, shape.vocab):
        raise ModelError(
            f"the Markov head in {file} knows {shape.markov_rows} tokens, the base has "
            f"{base_vocab}; use the head that was trained for this base"
        )
    wanted = dict(named)
    if shape.own_embedding:
        wanted["embed_tokens.weight"] = (base_vocab, shape.hidden)
    if shape.own_head:
        wanted["lm_head.weight"] = (shape.vocab, shape.hidden)
    for name, size in wanted.items():
        check_tensor(name, stored.get(name), size, file)
    return DSparkFiles(
        shape,
        {name: stored[name] for name in named},
        stored["embed_tokens.weight"] if shape.own_embedding else None,
        stored["lm_head.weight"] if shape.own_head else None,
        scored_tokens(shape.vocab, stored.get("d2t"), file, base_vocab),
    )


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
    own; `tokens` int64 [vocab], ascending: see DSparkFiles; `positions`: how long a text may be.
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
