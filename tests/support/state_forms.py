"""Layers that keep a state, as published models have them."""

from __future__ import annotations

from edgespec.model.state_form import StateForm

GRANITE = StateForm(
    delta=False, name="mamba", entering=(), hidden=2048, heads=64, groups=1, key=128, value=64,
    kernel=4, eps=1e-5, normed=4096, conv_bias=True,
)  # fmt: skip
FALCON = StateForm(
    delta=False, name="mamba", entering=(), hidden=2048, heads=48, groups=1, key=256, value=64,
    kernel=4, eps=1e-5, normed=0, conv_bias=True, scale=(1.0, 0.8, 0.9, 1.2, 0.7),
)  # fmt: skip
QWEN = StateForm(
    delta=True, name="linear_attn", entering=(), hidden=4096, heads=32, groups=16, key=128,
    value=128, kernel=4, eps=1e-6, normed=128, gate_last=True,
)  # fmt: skip
TINY_DELTA = StateForm(
    delta=True, name="delta", entering=(), hidden=16, heads=2, groups=1, key=16, value=12,
    kernel=4, eps=1e-5, normed=12, gate_last=True,
)  # fmt: skip
PUBLISHED = {"granite-4-h-micro": GRANITE, "falcon-h1-1.5b": FALCON, "qwen3.5-9b": QWEN}
