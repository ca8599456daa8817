"""Operations: how many a decoder layer is made of, which a host launches one by one on a GPU."""

from __future__ import annotations

OWN_FAMILIES = (
    *("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"),
    *("granite", "smollm3"),
)
"""Values of `model_type` whose layers are edgespec's own; the others run transformers' layers."""
