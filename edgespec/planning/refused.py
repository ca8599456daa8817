"""Refused: why models of families that are known do not run, and what to take in their place."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

from edgespec.planning.text_part import CONVOLVING, FOLDING, WRAPPERS

REASONS = {
    "recurrent": "its layers keep a recurrent state (linear attention, convolution, Mamba) of a "
    "kind that edgespec does not compute",
    "uneven": "its layers exchange rows of several widths with earlier ones (AltUp, Laurel)",
    "assistant": "it reads the keys of the model that it drafts for, which are on the stages, and "
    "drafts run with the coordinator",
    "tokenizer": "its tokenizer is code of its own, which edgespec never runs",
    "other": "its layers differ from those that edgespec computes",
}
"""docs/families.md tells more of each."""

_FAMILIES = (
    ("qwen3[6-9]|qwen4exp", "recurrent", "qwen3-8b"),
    (
        "bailinghybrid|bamba|falconmamba|jamba|kimilinear|lfm3|mamba|minimax$|"
        "olmohybrid|recurrentgemma|rwkv|xlstm|zamba",
        "recurrent",
        "qwen3-8b",
    ),
    ("gemma3n", "uneven", "gemma-4-e2b"),
    ("gemma4(unified)?assistant", "assistant", "gemma-4-e2b"),
    ("kimik", "tokenizer", "qwen3-235b-a22b-2507"),
    ("deepseek|minicpm3", "other", "deepseek-v2-lite"),
    ("llama4|minimaxm", "other", "gpt-oss-120b"),
    ("starcoder2", "other", "qwen2.5-coder-7b"),
    ("mistral4", "other", "mistral-small-3.2"),
    ("glm|exaone|cohere|hunyuan(?!dense|v1moe|moe)|phi|internlm|gptneox", "other", "qwen3-8b"),
)
"""How values of `model_type`, or architectures of GGUF files, begin without "-" and "_", the
narrower one first; why; and a model that runs."""

_STATES = {"linear_attention", "mamba", "conv", "hybrid"}
"""Of `layer_types`: the layer keeps a state."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a model does not run, a key of REASONS, and one that does, by its short name."""

    why: str
    instead: str

    def __str__(self) -> str:
        return f"{REASONS[self.why]}; use {self.instead}"


def refusal_of(settings: Mapping[str, object], running: Container[str]) -> Refusal | None:
    """Why a model with this config.json does not run; None if that is not known, or it may run.
    `running`: the families that do."""
    kind = str(settings.get("model_type"))
    inner = settings.get("text_config")
    listed = (inner if isinstance(inner, dict) else settings).get("layer_types")
    for beginning, why, instead in _FAMILIES if kind not in running else ():
        if re.match(beginning, re.sub("[-_]", "", kind)):
            return Refusal(why, instead)
    own = WRAPPERS.get(kind, kind) in (*CONVOLVING, *FOLDING)
    states = _STATES if not own else set()
    if isinstance(listed, list) and not states.isdisjoint(map(str, listed)):
        return Refusal("recurrent", "qwen3-8b")
    return None
