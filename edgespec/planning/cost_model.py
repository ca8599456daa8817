"""Cost models: how many bytes the parts of published models have, for charging devices."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import ConfigError

GROUP = 64
"""Weights in 4 bits that share one scale of 16 bits."""

DEFAULT_COST_MODEL = "llama-2-13b"


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of a published config.json that decide the sizes of a Llama-like model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def kv_width(self) -> int:
        """Numbers in the keys (or the values) of one row in one layer."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def layer_weights(self) -> int:
        """Weights of the matrices of one layer.

        Attention has two of hidden × hidden (queries, output) and two of hidden × kv_width, the
        gated MLP three of hidden × intermediate. Norms and biases, below 0.1 %, are left out.
        """
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_width
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head_weights(self) -> int:
        """Weights of the output head, vocab × hidden; as many as of the input embedding."""
        return self.vocab * self.hidden


ARCHITECTURES = {
    "llama-2-7b": Architecture(32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": Architecture(40, 5120, 13824, 40, 40, 32000),
    "llama-3.1-8b": Architecture(32, 4096, 14336, 32, 8, 128256),
    "llama-3.1-70b": Architecture(80, 8192, 28672, 64, 8, 128256),
    "llama-3.2-1b": Architecture(16, 2048, 8192, 32, 8, 128256),
    "qwen2.5-0.5b": Architecture(24, 896, 4864, 14, 2, 151936),
    "qwen2.5-32b": Architecture(64, 5120, 27648, 40, 8, 152064),
    "tinyllama-1.1b": Architecture(22, 2048, 5632, 32, 4, 32000),
}
"""From the models' published config.json files."""


def packed_bytes(weights: int, bits: int) -> int:
    """Bytes of `weights` weights at 4 or 16 bits.

    At 4 bits each GROUP of weights has a scale of 16 bits: 4 + 16 / 64 = 4.25 bits a weight.
    """
    assert bits in (4, 16)
    return 2 * weights if bits == 16 else weights // 2 + 2 * -(-weights // GROUP)


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """The draft model on D0: its layers at `bits` (4 or 16), its head at `head_bits`.

    `layer_bytes` as held; `kv_bytes`: keys and values of one row in one layer, 16 bit.
    """

    name: str
    layers: int
    layer_bytes: int
    bits: int
    head_bytes: int
    head_bits: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """The model whose costs are charged, whatever model really runs.

    `layer_bytes`: one layer in 4 bits, scales included. `kv_bytes`: keys and values of one row in
    one layer, 16 bit. `head_bytes`: the output head in 16 bit; the input embedding has as many.
    """

    name: str
    layers: int
    hidden_size: int
    layer_bytes: int
    kv_bytes: int
    head_bytes: int
    draft: DraftCosts

    @property
    def activation_bytes(self) -> int:
        """Bytes of one row's hidden state on the wire, 16 bit."""
        return 2 * self.hidden_size


def _independent(name: str) -> DraftCosts:
    """A whole small model as the draft: layers in 4 bits, head in 16."""
    of = ARCHITECTURES[name]
    return DraftCosts(
        name=name,
        layers=of.layers,
        layer_bytes=packed_bytes(of.layer_weights, 4),
        bits=4,
        head_bytes=packed_bytes(of.head_weights, 16),
        head_bits=16,
        kv_bytes=2 * 2 * of.kv_width,
    )


def _eagle(base: str) -> DraftCosts:
    """EAGLE-2's head: one layer like the base's, in 16 bit, and the base's own output head.

    In front of the layer a matrix of 2 hidden × hidden joins a token's embedding and the base's
    hidden state.
    """
    of = ARCHITECTURES[base]
    weights = of.layer_weights + 2 * of.hidden * of.hidden
    return DraftCosts(
        name=f"{base}-eagle",
        layers=1,
        layer_bytes=packed_bytes(weights, 16),
        bits=16,
        head_bytes=packed_bytes(of.head_weights, 16),
        head_bits=16,
        kv_bytes=2 * 2 * of.kv_width,
    )


def _cost_model(name: str, base: str, draft: DraftCosts) -> CostModel:
    of = ARCHITECTURES[base]
    return CostModel(
        name=name,
        layers=of.layers,
        hidden_size=of.hidden,
        layer_bytes=packed_bytes(of.layer_weights, 4),
        kv_bytes=2 * 2 * of.kv_width,
        head_bytes=packed_bytes(of.head_weights, 16),
        draft=draft,
    )


COST_MODELS = {
    model.name: model
    for model in (
        _cost_model("llama-2-7b", "llama-2-7b", _independent("tinyllama-1.1b")),
        _cost_model("llama-2-7b-eagle", "llama-2-7b", _eagle("llama-2-7b")),
        _cost_model("llama-2-13b", "llama-2-13b", _independent("tinyllama-1.1b")),
        _cost_model("llama-3.1-8b", "llama-3.1-8b", _independent("llama-3.2-1b")),
        _cost_model("llama-3.1-70b", "llama-3.1-70b", _independent("llama-3.2-1b")),
        _cost_model("qwen2.5-32b", "qwen2.5-32b", _independent("qwen2.5-0.5b")),
    )
}


def cost_model_named(name: str) -> CostModel:
    """The cost model of this name; raises ConfigError, with all names, if there is none."""
    if name not in COST_MODELS:
        raise ConfigError(
            f"there is no cost model {name!r}; choose one of: {', '.join(COST_MODELS)}"
        )
    return COST_MODELS[name]
