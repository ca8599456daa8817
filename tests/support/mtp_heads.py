"""Random MTP heads, written into the folder of a random Qwen 3.5 as its publisher has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_family

FILE = "model.safetensors"


def write_mtp(folder: Path, seed: int = 7, **settings: object) -> dict[str, torch.Tensor]:
    """Save a random base of FAMILY_SETTINGS with such a head; returns all tensors."""
    write_family(folder, "qwen3_5_text", **settings)
    config = json.loads((folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, layer = config["head_dim"], "mtp.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.q_proj.weight": (2 * heads * dim, hidden),
        f"{layer}self_attn.k_proj.weight": (kv_heads * dim, hidden),
        f"{layer}self_attn.v_proj.weight": (kv_heads * dim, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * dim),
        f"{layer}self_attn.q_norm.weight": (dim,),
        f"{layer}self_attn.k_norm.weight": (dim,),
        f"{layer}mlp.gate_proj.weight": (inner, hidden),
        f"{layer}mlp.up_proj.weight": (inner, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, inner),
    }
    dice = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(size, generator=dice) * 0.3 for name, size in shapes.items()}
    tensors = load_file(folder / FILE) | made
    save_file(tensors, folder / FILE, {"format": "pt"})
    config["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
