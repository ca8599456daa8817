"""A checkpoint with the shapes of Llama 2 7B's layers and random weights, several GiB, in shards.

`python big_checkpoint.py FOLDER LAYERS` writes it, one tensor in memory at a time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, VOCAB = 4096, 11008, 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB,
}
SHAPES = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.v_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
ENDS = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
LARGEST = 2 * VOCAB * HIDDEN
"""Bytes of the largest tensor in 16 bit: the embedding."""


def write_big_checkpoint(folder: Path, layers: int, seed: int = 0) -> None:
    """One shard for each layer, one for the ends; normal weights of Llama's scale, bfloat16."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    # As many numbers as the largest tensor has, shifted for each: drawing all anew takes minutes.
    numbers = (torch.randn(VOCAB * HIDDEN) * 0.02).to(torch.bfloat16)
    parts = [
        {f"model.layers.{layer}.{name}": shape for name, shape in SHAPES.items()}
        for layer in range(layers)
    ] + [ENDS]
    file_of = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {}
        for index, (name, shape) in enumerate(part.items()):
            size = torch.Size(shape).numel()
            shift = (7919 * (number * len(SHAPES) + index)) % (len(numbers) - size + 1)
            tensors[name] = numbers[shift : shift + size].view(shape).clone()
            file_of[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))


if __name__ == "__main__":
    write_big_checkpoint(Path(sys.argv[1]), int(sys.argv[2]))
