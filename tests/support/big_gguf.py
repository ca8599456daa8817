"""A GGUF file with the shapes of Llama 2 7B in the types of a Q4_K_M file, random, 3.8 GiB.

`python big_gguf.py FILE` writes it, at the speed of the disk.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

HIDDEN, INTERMEDIATE, VOCAB, LAYERS = 4096, 11008, 32000, 32
LARGEST = 4 * VOCAB * HIDDEN
"""Bytes of the largest tensor in float32, as which it is dequantised: the embedding."""

_MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, HIDDEN),
    "attn_v": (HIDDEN, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}
_FINER = ("attn_v", "ffn_down")
"""Q6_K in every other layer."""
_POOL = 1 << 15  # random blocks that are written again and again


def write_big_gguf(file: Path) -> None:
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    tensors = list(_tensors())
    for name, shape, kind in tensors:
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // columns * size)
        plain = kind == GGMLQuantizationType.F32
        dtype = np.dtype(np.float32 if plain else np.uint8)
        count = int(np.prod(stored))
        writer.add_tensor_info(name, shape if plain else stored, dtype, count, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    pools = {kind: _pool(kind) for kind in {kind for _, _, kind in tensors}}
    with open(file, "ab") as stream:
        stream.write(bytes(-stream.tell() % 32))
        for _, shape, kind in tensors:
            columns, size = gguf.GGML_QUANT_SIZES[kind]
            left = int(np.prod(shape)) // columns * size
            while left > 0:
                left -= stream.write(pools[kind][:left])
    writer.close()


def _tensors() -> list[tuple[str, tuple[int, ...], GGMLQuantizationType]]:
    usual, finer = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K
    plain = GGMLQuantizationType.F32
    found = [("token_embd.weight", (VOCAB, HIDDEN), usual)]
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            found.append((f"blk.{layer}.{norm}.weight", (HIDDEN,), plain))
        for name, shape in _MATRICES.items():
            kind = finer if name in _FINER and layer % 2 else usual
            found.append((f"blk.{layer}.{name}.weight", shape, kind))
    found.append(("output_norm.weight", (HIDDEN,), plain))
    return [*found, ("output.weight", (VOCAB, HIDDEN), finer)]


def _pool(kind: GGMLQuantizationType) -> memoryview:
    """Blocks whose numbers are of Llama's scale."""
    random = np.random.default_rng(0)
    if kind == GGMLQuantizationType.F32:
        return memoryview(random.uniform(0.5, 1.5, _POOL).astype(np.float32).tobytes())
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (_POOL, size), dtype=np.uint8)
    for start in (0, 2) if kind == GGMLQuantizationType.Q4_K else (208,):
        scales = random.uniform(5e-5, 1e-4, (_POOL, 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return memoryview(blocks.tobytes())


if __name__ == "__main__":
    write_big_gguf(Path(sys.argv[1]))
