"""Random MTP heads, written into the folder of a random Qwen 3.5 as its publisher has them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_family
from transformers import AutoModelForCausalLM

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


def write_fitted_mtp(folder: Path, **settings: object) -> Path:
    """The same with a head that is right now and then: its matrix maps a token and a row to the
    next row as well as one can in texts of the base's own; its layer adds a little to that."""
    tensors = write_mtp(folder, **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(3)
    begin = torch.randint(3, model.config.vocab_size, (24, 4))
    with torch.inference_mode():
        texts = model.generate(begin, do_sample=True, max_new_tokens=44, eos_token_id=None)
        rows = model.model(texts).last_hidden_state

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / (x * x).mean(-1, keepdim=True).sqrt()

    words = normed(tensors["model.embed_tokens.weight"][texts])
    given = torch.cat([words[:, 1:], normed(rows[:, :-1])], -1).flatten(0, 1)
    gain = tensors["model.norm.weight"]
    wanted = (rows[:, 1:] / (1 + gain)).flatten(0, 1)
    tensors["mtp.fc.weight"] = torch.linalg.lstsq(given, wanted).solution.T.contiguous()
    tensors["mtp.norm.weight"] = gain.clone()
    for name in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{name}.weight"] = torch.zeros_like(gain)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"mtp.layers.0.{name}.weight"] *= 0.1
    save_file(tensors, folder / FILE, {"format": "pt"})
    return folder
