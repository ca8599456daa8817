"""Head folders: EAGLE heads as they are published, read into one description and one set of names.

A folder holds config.json and model.safetensors, or pytorch_model.bin. The variants that are
known: EAGLE's own releases, repacks with "model." before every name, heads of SpecForge, AngelSlim
and vLLM with "layers.0." where EAGLE-3 has "midlayer.", and speculators' nested settings. Where
settings and tensors say different things, the tensors are right: several published files say a
wrong head_dim, number of layers or bias.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.shape import HeadShape, Rope, number, rope, whole
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

SAFE, PICKLED, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
LAYERS = {"eagle": "layers.0.", "eagle3": "midlayer."}
"""What the one layer's tensors are called in the official files."""


def read_head(
    path: str | Path, base_hidden: int, base_vocab: int, base_layers: int
) -> HeadFiles[HeadShape]:
    """Read a head, a folder or a hub id, for a base of this width, vocabulary and depth.

    Raises ModelError if it cannot be read, asks for what edgespec does not compute, or does not
    fit the base.
    """
    files = model_files(path)
    config = files.file(CONFIG)
    raw, file = read_tensors(files, SAFE, PICKLED)
    stored = _named(raw, file)
    shape = read_settings(config, stored, base_hidden, base_layers)
    return checked_head(shape, stored, EagleHead, "EAGLE", file, base_vocab)


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


# Set, they change the arithmetic in ways that are not documented.
_UNKNOWN_FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "use_aux_norm")
_SPECULATORS = "transformer_layer_config"
_KIND = "EAGLE"  # as messages call it


def usual_taps(layers: int) -> tuple[int, int, int]:
    """The base's layers whose incoming rows EAGLE-3 heads read, unless they say otherwise."""
    return 2, layers // 2, layers - 3


def read_settings(
    file: Path, tensors: Mapping[str, torch.Tensor], base_hidden: int, base_layers: int
) -> HeadShape:
    """The shape of the head with this config.json and these tensors, by EagleHead's names.

    Raises ModelError for settings that are damaged or that edgespec does not compute.
    """
    raw = read_object(file, "download the head again")
    layer = raw.get(_SPECULATORS)
    settings = {**raw, **layer} if isinstance(layer, dict) else raw
    for flag in _UNKNOWN_FLAGS:
        if settings.get(flag):
            raise ModelError(
                f"{file} sets {flag!r}, which edgespec does not compute; use another head"
            )
    if settings.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{file} says hidden_act {settings['hidden_act']!r}, edgespec computes silu alone; use "
            "another head"
        )
    third = "layer.hidden_norm.weight" in tensors
    layer_fields = fields_of(settings, tensors, "layer.", _KIND, file)
    # EAGLE-1 and EAGLE-2 give out the base's own features; a file that does not is found later.
    hidden = matrix_rows(tensors, "fc.weight", _KIND, file)
    hidden = hidden if third else base_hidden
    own_head = third and ("lm_head.weight" in tensors or hidden != base_hidden)
    whole_vocab = whole(settings, "vocab_size", file)
    return HeadShape(
        kind="eagle3" if third else "eagle",
        hidden=hidden,
        base_hidden=base_hidden,
        vocab=matrix_rows(tensors, "lm_head.weight", _KIND, file) if own_head else whole_vocab,
        ropes=_ropes(settings, file),
        fc_bias="fc.bias" in tensors,
        # Some exports of EAGLE-3 carry an embedding that was never trained: the base's is right,
        # unless the head has another width than the base.
        own_embedding=hidden != base_hidden if third else "embed_tokens.weight" in tensors,
        own_head=own_head,
        residual_normed=bool(settings.get("norm_before_residual", False)),
        aux_hidden=_taps(settings, base_layers, file) if third else (),
        **layer_fields,
    )


class LayerFields(TypedDict):
    """The fields of a head's shape that are of its layers, one like the other."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    qkv_bias: bool
    o_bias: bool


def fields_of(
    settings: dict[str, Any],
    tensors: Mapping[str, torch.Tensor],
    layer: str,
    kind: str,
    file: Path,
) -> LayerFields:
    """Those of a head, by its config.json `file` and the tensors of the `layer` whose names begin
    so. Raises ModelError, which calls the head a `kind`."""
    heads = whole(settings, "num_attention_heads", file)
    queries, keys, intermediate = (
        matrix_rows(tensors, f"{layer}{name}_proj.weight", kind, file)
        for name in ("self_attn.q", "self_attn.k", "mlp.gate")
    )
    if queries % (2 * heads) or keys % (queries // heads) or heads % (keys // (queries // heads)):
        raise ModelError(
            f"{file} says {heads} attention heads, which does not fit queries of {queries} and "
            f"keys of {keys} in the file beside it; download the head again"
        )
    return LayerFields(
        heads=heads,
        kv_heads=keys // (queries // heads),
        head_dim=queries // heads,
        intermediate=intermediate,
        eps=number(settings.get("rms_norm_eps", 1e-6), "rms_norm_eps", file),
        qkv_bias=f"{layer}self_attn.q_proj.bias" in tensors,
        o_bias=f"{layer}self_attn.o_proj.bias" in tensors,
    )


def matrix_rows(tensors: Mapping[str, torch.Tensor], name: str, kind: str, file: Path) -> int:
    """How many rows a matrix beside a config.json has. Raises ModelError if it is not there."""
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != 2 or not tensor.numel():
        raise ModelError(
            f"there is no matrix {name!r} beside {file}: this is no {kind} head; name the folder "
            "of a head that was trained for this base"
        )
    return int(tensor.shape[0])


def _ropes(settings: dict[str, Any], file: Path) -> tuple[Rope, ...]:
    """The rotary settings, and the usual ones where others have been found to be wrong."""
    said = rope(settings, file)
    return (said,) if said == Rope() else (said, Rope())


def _taps(settings: dict[str, Any], layers: int, file: Path) -> tuple[int, ...]:
    """The base's layers whose incoming rows are read.

    SpecForge and SGLang count a layer by what leaves it, vLLM and speculators by what enters it;
    the usual three tell which is meant, and for others the name of the writer.
    """
    nested = settings.get("eagle_config")
    inner = nested if isinstance(nested, dict) else {}
    name = "eagle_aux_hidden_state_layer_ids"
    said = settings.get(name) or inner.get(name)
    if not said:
        if layers < 4:
            raise ModelError(f"EAGLE-3 reads 3 layers of a base of 4 and more, this has {layers}")
        return usual_taps(layers)
    if not isinstance(said, list) or not all(type(i) is int and -1 <= i < layers for i in said):
        raise ModelError(
            f"{name} in {file} names layers {said!r}, the base has {layers}; use the head that was "
            "trained for this base"
        )
    later = tuple(layer + 1 for layer in said)
    if later == usual_taps(layers):
        return later
    leaving = _SPECULATORS not in settings and tuple(said) != usual_taps(layers)
    aux_hidden = later if leaving else tuple(said)
    if not all(0 <= layer < layers for layer in aux_hidden):
        raise ModelError(
            f"{name} in {file} names a layer that the base's {layers} do not have; use the head "
            "that was trained for this base"
        )
    return aux_hidden
