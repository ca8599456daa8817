"""Operations: how many a decoder layer is made of, which the host launches one by one.

Views do not count; norms and attention count one each, as CUDA has a kernel for them. The numbers
are those of two rows of one request; one row takes two less, which is not charged.
tests/model/test_operations.py counts those of the real layers.
"""

from __future__ import annotations

from edgespec.planning.text_part import GROUPED

USUAL_OPERATIONS = 17
"""Of the layer that a profile's `launch_seconds` is for: edgespec's own, as Llama has it."""

OWN_OPERATIONS = {
    "llama": USUAL_OPERATIONS,
    "mistral": USUAL_OPERATIONS,
    "ministral": USUAL_OPERATIONS,
    "qwen2": USUAL_OPERATIONS,
    "phi3": USUAL_OPERATIONS,
    "granite": USUAL_OPERATIONS,
    "smollm3": USUAL_OPERATIONS,
    "qwen3": 19,
    "gemma2": 36,
    "gemma3_text": 30,
    "gemma4_text": 32,
    "lfm2": 19,  # whether it attends or convolves
    "lfm2_moe": 26,
    # Of the layers that attend; states are read row by row where no kernel does it.
    "granitemoehybrid": USUAL_OPERATIONS,
    "falcon_h1": USUAL_OPERATIONS + 1,
    "nemotron_h": 8,
    **{"qwen3_5_text": 30, "qwen3_5_moe_text": 45, "qwen3_next": 45},
    **{"qwen2_moe": 29, "glm4_moe": 38},
    # With one product for all heads, as on a CPU; see layer_operations.
    **{"deepseek_v2": 37, "deepseek_v3": 49, "glm4_moe_lite": 43},
}
"""By model type, of those whose layers are edgespec's own; of mixtures without experts."""

LIBRARY_OPERATIONS = {
    "ministral3": 50,
    "olmo2": 60,
    "olmo3": 60,
    "gemma": 46,
    "hunyuan_v1_dense": 58,
    "exaone4": 58,
    "seed_oss": 42,
    "ernie4_5": 50,
    "glm4": 60,
    "cohere2": 42,
    "olmoe": 60,
    "mixtral": 45,
    "qwen3_moe": 62,
    "gpt_oss": 54,
    "ernie4_5_moe": 63,
    "hunyuan_v1_moe": 69,
}
"""Of those that run transformers' layers; of mixtures without experts."""

EXPERT_OPERATIONS = {
    "lfm2_moe": 10,
    "granitemoehybrid": 12,
    "nemotron_h": 5,
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text", "qwen3_next", *GROUPED), 11),
    "qwen3_moe": 11,
    "olmoe": 11,
    "mixtral": 12,
    **dict.fromkeys(("ernie4_5_moe", "hunyuan_v1_moe"), 11),
    "gpt_oss": 16,
    "gemma4_text": 12,
}
"""More for each expert that some row goes through; of Gemma 4, Granite 4 and Nemotron-H, of which
some have none, with a share of the router's. Of the last, less than half of the layers have some.
"""

DRAFT_HEAD_OPERATIONS = 40
"""Of the layer of an EAGLE head, and of each layer in `easyspec`, which are code of their own: at
most about so many; no test counts them."""


def layer_operations(family: str, experts: float = 0.0, heads: int = 0) -> float:
    """Of a layer of this model type, whose rows go through so many of its experts. `heads`: of
    latents, whose two products are launched head by head, as GPUs do."""
    known = OWN_OPERATIONS | LIBRARY_OPERATIONS
    of_heads = 2 * heads - 1 if heads else 0
    return known[family] + experts * EXPERT_OPERATIONS.get(family, 0) + of_heads
