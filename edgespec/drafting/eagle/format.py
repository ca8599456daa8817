"""Head folders: EAGLE heads as they are published, read into one description and one set of names.

A folder holds config.json and model.safetensors, or pytorch_model.bin. The variants that are
known: EAGLE's own releases, repacks with "model." before every name, heads of SpecForge, AngelSlim
and vLLM with "layers.0." where EAGLE-3 has "midlayer.", and speculators' nested settings.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.settings import read_settings
from edgespec.drafting.eagle.shape import HeadShape
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

SAFE, PICKLED, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
LAYERS = {"eagle": "layers.0.", "eagle3": "midlayer."}
"""What the one layer's tensors are called in the official files."""

_ENDS = ("embed_tokens.weight", "lm_head.weight")
_EXTRA = ("d2t", "t2d")


@dataclass(frozen=True)
class HeadFiles:
    """One head as read: `weights` has EagleHead's names; `embedding` [V, hidden] and `matrix`
    [vocab, hidden] are None where the base's are borrowed; `tokens` int64 [vocab] is the base's
    token of each column, None where column v is token v."""

    shape: HeadShape
    weights: dict[str, torch.Tensor]
    embedding: torch.Tensor | None
    matrix: torch.Tensor | None
    tokens: torch.Tensor | None


def read_head(path: str | Path, base_hidden: int, base_vocab: int, base_layers: int) -> HeadFiles:
    """Read a head, a folder or a hub id, for a base of this width, vocabulary and depth.

    Raises ModelError if it cannot be read, asks for what edgespec does not compute, or does not
    fit the base.
    """
    files = model_files(path)
    config = files.file(CONFIG)
    raw, file = read_tensors(files, SAFE, PICKLED)
    stored = _named(raw, file)
    shape = read_settings(config, stored, base_hidden, base_layers)
    return _checked(shape, stored, file, base_vocab)


def write_head(
    folder: Path,
    shape: HeadShape,
    tensors: dict[str, torch.Tensor],
    tokens: torch.Tensor | None,
    vocab: int,
    positions: int,
) -> None:
    """Write a head in its official format, floats in bfloat16.

    `tensors`: by EagleHead's names, and "lm_head.weight" if it has one; `tokens` int64 [vocab of
    the head]: see HeadFiles; `vocab`: of the base. Raises OSError as writing does.
    """
    named = {
        name.replace("layer.", LAYERS[shape.kind], 1): weight.to(torch.bfloat16).cpu()
        for name, weight in tensors.items()
    }
    named |= scored_tensors(tokens, vocab)
    rope = shape.ropes[0]
    settings: dict[str, Any] = {
        "architectures": [
            "LlamaForCausalLMEagle3" if shape.kind == "eagle3" else "LlamaForCausalLMEagle"
        ],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": shape.eps,
        "rope_theta": rope.theta,
        "max_position_embeddings": positions,
        "vocab_size": vocab,
        "bias": shape.fc_bias,
        "torch_dtype": "bfloat16",
    }
    if shape.kind == "eagle3":
        settings["draft_vocab_size"] = shape.vocab
    write_tensors(named, folder / SAFE)
    text = json.dumps(settings, indent=2) + "\n"
    write_whole(folder / CONFIG, text)


def _named(stored: dict[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    """The tensors by EagleHead's names."""
    named: dict[str, torch.Tensor] = {}
    for old, tensor in stored.items():
        name = old.removeprefix("model.")
        if name.endswith("rotary_emb.inv_freq"):
            continue
        for prefix in LAYERS.values():
            if name.startswith(prefix):
                name = "layer." + name[len(prefix) :]
        if name in named:
            raise ModelError(f"{file} holds {name!r} twice, as {old!r} too; download it again")
        named[name] = tensor
    return named


def _checked(
    shape: HeadShape, stored: dict[str, torch.Tensor], file: Path, base_vocab: int
) -> HeadFiles:
    with torch.device("meta"):
        layer = {name: tuple(w.shape) for name, w in EagleHead(shape).named_parameters()}
    wanted = dict(layer)
    strange = stored.keys() - wanted.keys() - set(_ENDS) - set(_EXTRA)
    if strange:
        # Leaving a bias or norm out would compute something else than the head.
        raise ModelError(
            f"{file} holds {min(strange)!r}, which no EAGLE head that edgespec knows has; use "
            "another head for this base"
        )
    if shape.own_embedding:
        wanted["embed_tokens.weight"] = (base_vocab, shape.hidden)
    if shape.own_head:
        wanted["lm_head.weight"] = (shape.vocab, shape.hidden)
    for name, size in wanted.items():
        check_tensor(name, stored.get(name), size, file)
    return HeadFiles(
        shape,
        {name: stored[name] for name in layer},
        stored["embed_tokens.weight"] if shape.own_embedding else None,
        stored["lm_head.weight"] if shape.own_head else None,
        scored_tokens(shape.vocab, stored.get("d2t"), file, base_vocab),
    )
