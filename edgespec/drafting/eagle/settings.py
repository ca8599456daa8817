"""Head settings: config.json of an EAGLE head as its many writers have it, and the head's shape.

Read as plain JSON, since libraries rename and default its fields. Where a field and the tensors
say different things, the tensors are right: several published files say a wrong head_dim, number
of layers or bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.eagle.shape import HeadShape, Rope
from edgespec.drafting.head_settings import number, rope, whole
from edgespec.errors import ModelError
from edgespec.model.reading import read_object

# Set, they change the arithmetic in ways that are not documented.
_UNKNOWN_FLAGS = ("fc_norm", "norm_before_fc", "norm_output", "use_aux_norm")
_SPECULATORS = "transformer_layer_config"


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
    heads = whole(settings, "num_attention_heads", file)
    # EAGLE-1 and EAGLE-2 give out the base's own features; a file that does not is found later.
    hidden = _rows(tensors, "fc.weight", file) if third else base_hidden
    _rows(tensors, "fc.weight", file)
    queries = _rows(tensors, "layer.self_attn.q_proj.weight", file)
    keys = _rows(tensors, "layer.self_attn.k_proj.weight", file)
    if queries % (2 * heads) or keys % (queries // heads) or heads % (keys // (queries // heads)):
        raise ModelError(
            f"{file} says {heads} attention heads, which does not fit queries of {queries} and "
            f"keys of {keys} in the file beside it; download the head again"
        )
    own_head = third and ("lm_head.weight" in tensors or hidden != base_hidden)
    whole_vocab = whole(settings, "vocab_size", file)
    return HeadShape(
        kind="eagle3" if third else "eagle",
        hidden=hidden,
        base_hidden=base_hidden,
        heads=heads,
        kv_heads=keys // (queries // heads),
        head_dim=queries // heads,
        intermediate=_rows(tensors, "layer.mlp.gate_proj.weight", file),
        vocab=_rows(tensors, "lm_head.weight", file) if own_head else whole_vocab,
        eps=number(settings.get("rms_norm_eps", 1e-6), "rms_norm_eps", file),
        ropes=_ropes(settings, file),
        fc_bias="fc.bias" in tensors,
        qkv_bias="layer.self_attn.q_proj.bias" in tensors,
        o_bias="layer.self_attn.o_proj.bias" in tensors,
        # Some exports of EAGLE-3 carry an embedding that was never trained: the base's is right,
        # unless the head has another width than the base.
        own_embedding=hidden != base_hidden if third else "embed_tokens.weight" in tensors,
        own_head=own_head,
        residual_normed=bool(settings.get("norm_before_residual", False)),
        aux_hidden=_taps(settings, base_layers, file) if third else (),
    )


def _rows(tensors: Mapping[str, torch.Tensor], name: str, file: Path) -> int:
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != 2 or not tensor.numel():
        raise ModelError(
            f"there is no matrix {name!r} beside {file}: this is no EAGLE head; name the folder "
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
