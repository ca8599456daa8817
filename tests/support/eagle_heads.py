"""EAGLE heads on disk in every published form, random, for a base of write_checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, HEADS, DIM, WIDE = 32, 96, 4, 8, 40


@dataclass(frozen=True)
class Form:
    """How a head is published. `settings` go into config.json as they are, `nested` below
    speculators' transformer_layer_config."""

    third: bool = False
    prefix: str = "layers.0."
    outer: str = ""
    kv_heads: int = HEADS
    fc_bias: bool = False
    qkv_bias: bool = False
    embedding: bool = False
    pickled: bool = False
    vocab: int = VOCAB
    draft_vocab: int = VOCAB
    width: int = HIDDEN
    settings: dict[str, Any] = field(default_factory=dict)
    nested: bool = False


FORMS = {
    "eagle-vicuna": Form(fc_bias=True, embedding=True, pickled=True),
    "eagle-llama3": Form(kv_heads=2, settings={"bias": False, "rope_theta": 5e5}),
    "eagle-qwen2": Form(kv_heads=1, fc_bias=True, qkv_bias=True, settings={"qkv_bias": True}),
    "eagle-repacked": Form(outer="model.", embedding=True, settings={"head_dim": 80}),
    "eagle-linear": Form(settings={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "eagle3-official": Form(third=True, prefix="midlayer.", kv_heads=2, draft_vocab=40),
    "eagle3-pickled": Form(third=True, prefix="midlayer.", pickled=True, draft_vocab=40),
    "eagle3-community": Form(
        third=True,
        embedding=True,  # never trained: the base's must be taken
        settings={"eagle_aux_hidden_state_layer_ids": [1, 2, 0], "num_hidden_layers": 40},
    ),
    "eagle3-speculators": Form(
        third=True, nested=True, kv_heads=2, settings={"norm_before_residual": True}
    ),
    "eagle3-narrow": Form(
        third=True,
        prefix="midlayer.",
        width=24,
        embedding=True,
        settings={"target_hidden_size": HIDDEN},
    ),
}


def write_eagle(folder: Path, form: Form, seed: int = 0) -> dict[str, torch.Tensor]:
    """Save a random head of this form; returns its tensors by the plain official names."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    plain = {
        name: torch.randn(shape, generator=random) * (0.4 if len(shape) > 1 else 0.3)
        + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in _shapes(form).items()
    }
    extra: dict[str, torch.Tensor] = {}
    if form.draft_vocab < form.vocab:
        chosen = torch.randperm(form.vocab, generator=random)[: form.draft_vocab].sort().values
        extra["d2t"] = chosen - torch.arange(form.draft_vocab)
        extra["t2d"] = torch.zeros(form.vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    if not form.pickled:
        extra["rotary_emb.inv_freq"] = torch.ones(4)
    stored = {
        form.outer + name.replace("L.", form.prefix): tensor
        for name, tensor in (plain | extra).items()
    }
    if form.pickled:
        torch.save(stored, folder / "pytorch_model.bin")
    else:
        save_file(stored, folder / "model.safetensors")
    settings: dict[str, Any] = {
        "num_attention_heads": HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": form.vocab,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
    }
    if form.nested:
        settings = {"transformer_layer_config": settings}
    (folder / "config.json").write_text(json.dumps(settings | form.settings))
    return plain | extra


def _shapes(form: Form) -> dict[str, tuple[int, ...]]:
    wide = form.width
    into = 2 * wide if form.third else wide
    queries, keys = HEADS * DIM, form.kv_heads * DIM
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (wide, (3 if form.third else 2) * HIDDEN),
        "L.self_attn.q_proj.weight": (queries, into),
        "L.self_attn.k_proj.weight": (keys, into),
        "L.self_attn.v_proj.weight": (keys, into),
        "L.self_attn.o_proj.weight": (wide, queries),
        "L.mlp.gate_proj.weight": (WIDE, wide),
        "L.mlp.up_proj.weight": (WIDE, wide),
        "L.mlp.down_proj.weight": (wide, WIDE),
        "L.post_attention_layernorm.weight": (wide,),
    }
    if form.fc_bias:
        shapes["fc.bias"] = (wide,)
    if form.qkv_bias:
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            shapes[f"L.self_attn.{name}_proj.bias"] = (rows,)
    if form.embedding:
        shapes["embed_tokens.weight"] = (form.vocab, wide)
    if form.third:
        shapes |= {
            "L.input_layernorm.weight": (wide,),
            "L.hidden_norm.weight": (wide,),
            "norm.weight": (wide,),
            "lm_head.weight": (form.draft_vocab, wide),
        }
    return shapes
