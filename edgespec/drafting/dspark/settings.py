"""Head settings: config.json of a one-pass head as its writers have it, and the head's shape.

DeepSpec writes plain settings side by side, z-lab's DFlash and JetSpec put theirs into
`dflash_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.head_settings import number, rope, whole
from edgespec.errors import ModelError
from edgespec.model.reading import read_object
from edgespec.planning.architecture import MOST_LAYERS

MOST_SLOTS = 64
"""Slots of a block: more would guess further ahead than any ring is long."""

_NESTED = "dflash_config"
_FIRST = "layers.0.self_attn."
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
    heads = whole(settings, "num_attention_heads", file)
    hidden = _rows(tensors, "fc.weight", file)
    queries = _rows(tensors, f"{_FIRST}q_proj.weight", file)
    keys = _rows(tensors, f"{_FIRST}k_proj.weight", file)
    if queries % (2 * heads) or keys % (queries // heads) or heads % (keys // (queries // heads)):
        raise ModelError(
            f"{file} says {heads} attention heads, which does not fit queries of {queries} and "
            f"keys of {keys} in the file beside it; download the head again"
        )
    markov = tensors.get("markov_head.markov_w1.weight")
    rank = 0 if markov is None else int(markov.shape[-1])
    down = tensors.get("direct_maps.down.weight")
    scored = next((tensors[n] for n in ("lm_head.weight", "d2t") if n in tensors), None)
    shape = DSparkShape(
        layers=layers,
        hidden=hidden,
        base_hidden=base_hidden,
        heads=heads,
        kv_heads=keys // (queries // heads),
        head_dim=queries // heads,
        intermediate=_rows(tensors, "layers.0.mlp.gate_proj.weight", file),
        vocab=base_vocab if scored is None else len(scored),
        block=block,
        eps=number(settings.get("rms_norm_eps", 1e-6), "rms_norm_eps", file),
        aux_hidden=_taps(settings, layers, base_layers, file),
        rope=rope(settings, file),
        qk_norm=f"{_FIRST}q_norm.weight" in tensors,
        qkv_bias=f"{_FIRST}q_proj.bias" in tensors,
        o_bias=f"{_FIRST}o_proj.bias" in tensors,
        # DeepSpec lets the anchor's slot guess the next token, the others do not.
        offset=int(_flag(settings, "sample_from_anchor", settings is raw, file)),
        mask_token=_mask_token(settings, tensors, base_vocab, file),
        markov_rank=rank,
        markov_rows=0 if markov is None else len(markov),
        causal=_flag(settings, "causal_head", False, file),
        windows=_windows(settings, layers, file),
        revealed=_revealed(settings, block, file),
        direct=0 if down is None or block < 2 else len(down) // (block - 1),
        own_embedding="embed_tokens.weight" in tensors,
        own_head="lm_head.weight" in tensors,
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


def _rows(tensors: Mapping[str, torch.Tensor], name: str, file: Path) -> int:
    tensor = tensors.get(name)
    if tensor is None or tensor.dim() != 2 or not tensor.numel():
        raise ModelError(
            f"there is no matrix {name!r} beside {file}: this is no DSpark or DFlash head; name "
            "the folder of a head that was trained for this base"
        )
    return int(tensor.shape[0])


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
