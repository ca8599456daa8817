"""Operations: how many a decoder layer is made of, which the host launches one by one.

Views do not count; norms and attention count one each, as CUDA has a kernel for them. The numbers
are those of two rows of one request; one row takes two less, which is not charged.
tests/model/test_operations.py counts those of the real layers.
"""

from __future__ import annotations

from edgespec.planning.text_part import GROUPED

USUAL_OPERATIONS = 17
"""Of the layer that a profile's `launch_seconds` is for: as Llama has it."""

LAYER_OPERATIONS = {
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
    # Of the layers that attend.
    "granitemoehybrid": USUAL_OPERATIONS,
    "falcon_h1": 26,  # and keep a state
    "nemotron_h": 8,
    **{"qwen3_5_text": 30, "qwen3_5_moe_text": 45, "qwen3_next": 45},
    **{"qwen2_moe": 29, "glm4_moe": 38},
    # With one product for all heads, as on a CPU; see layer_operations.
    **{"deepseek_v2": 37, "deepseek_v3": 49, "glm4_moe_lite": 43},
    **{"seed_oss": 17, "ministral3": 18, "hunyuan_v1_dense": 19, "exaone4": 19, "ernie4_5": 20},
    **{"olmo2": 21, "olmo3": 21, "gemma": 21, "glm4": 22, "cohere2": 22},
    **{"olmoe": 25, "mixtral": 24, "qwen3_moe": 26, "gpt_oss": 33},
    **{"hunyuan_v1_moe": 31, "ernie4_5_moe": 33},
}
"""By model type; of mixtures without experts."""

STATES_SAVE = {
    "granitemoehybrid": 3,
    **{"qwen3_5_text": 12, "qwen3_5_moe_text": 12, "qwen3_next": 11},
}
"""How many fewer a layer is made of that keeps a state in place of keys: a state takes four, as a
GPU's kernels launch it. Torch without these goes row by row, which is not charged."""

EXPERT_OPERATIONS = {
    "lfm2_moe": 10,
    "granitemoehybrid": 12,
    "nemotron_h": 5,
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text", "qwen3_next", *GROUPED), 11),
    **dict.fromkeys(("qwen3_moe", "olmoe", "mixtral", "ernie4_5_moe", "hunyuan_v1_moe"), 11),
    "gpt_oss": 16,
    "gemma4_text": 12,
}
"""More for each expert that some row goes through; of Gemma 4, Granite 4 and Nemotron-H, of which
some have none, with a share of the router's. Of the last, less than half of the layers have some.
"""

DRAFT_HEAD_OPERATIONS = 40
"""Of the layer of an EAGLE head, and of each layer in `easyspec`, which are code of their own: at
most about so many; no test counts them."""


def layer_operations(
    family: str, experts: float = 0.0, states: float = 0.0, heads: int = 0
) -> float:
    """Of a layer of this model type, whose rows go through so many of its experts, or of the mean
    one where a share of them keeps `states`. `heads`: of latents, whose two products are launched
    head by head, as GPUs do."""
    found = LAYER_OPERATIONS[family] - states * STATES_SAVE.get(family, 0)
    return found + experts * EXPERT_OPERATIONS.get(family, 0) + (2 * heads - 1 if heads else 0)
