"""Head shape: what a one-pass head computes, told by its files and checked against its base."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.drafting.eagle.shape import Rope
from edgespec.model.model_config import ModelConfig
from edgespec.types.draft_pass import HeadForm


@dataclass(frozen=True, slots=True)
class DSparkShape:
    """One head of the DSpark family: DSpark itself, and DFlash and JetSpec, which lack its heads.

    It reads the base's rows that enter the layers `aux_hidden` (low to high) at all positions
    before an anchor, and a block of `block` slots at the anchor's position and those after it:
    the anchor's token, then tokens or masks. Slot i guesses the token at position
    anchor + i + `offset`; `offset` is 1 (the anchor's slot guesses the next token), or 0 (a slot
    guesses the token at its own place, so that the anchor's slot guesses nothing).

    `layers`, `hidden`, `heads`, `kv_heads`, `head_dim`, `intermediate`, `eps`, `rope`: as of a
    Qwen3 decoder; `qk_norm`: whether queries and keys are normed by head; `qkv_bias`, `o_bias`:
    which biases there are. `base_hidden`: the width of the base.
    `vocab`: tokens that it scores, the base's or a part of them.
    `mask_token`: the token whose embedding stands in a slot without a token; None: the head has a
    mask embedding of its own.
    `markov_rank`: 0 without a Markov head. `markov_rows`: tokens before a guess that it knows,
    all of the base's, or those that the head scores.
    `causal`: a slot sees those before it and itself, not the whole block. `windows`: for each
    layer, how many positions a slot sees, itself included; None for all.
    `revealed`: so many tokens after the anchor were shown to it at most in training; 0: they are
    masks always.
    `own_embedding`, `own_head`: whether it brings its own matrices or borrows the base's.
    """

    layers: int
    hidden: int
    base_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    block: int
    eps: float
    aux_hidden: tuple[int, ...]
    rope: Rope
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    offset: int = 1
    mask_token: int | None = None
    markov_rank: int = 0
    markov_rows: int = 0
    causal: bool = False
    windows: tuple[int | None, ...] = ()
    revealed: int = 0
    own_embedding: bool = False
    own_head: bool = False

    @property
    def fused_width(self) -> int:
        """What `fc` takes in a row."""
        return len(self.aux_hidden) * self.base_hidden

    @property
    def depths(self) -> int:
        """How many tokens after the anchor it guesses."""
        return self.block - 1 + self.offset

    def slot_of(self, depth: int) -> int:
        """The slot that guesses the token `depth` tokens after the one that follows the anchor."""
        return depth + 1 - self.offset

    @property
    def shows(self) -> bool:
        """Whether drafting may show it guesses, as a tree of them: a slot sees no other branch."""
        return self.causal and bool(self.revealed and self.offset) and not self.windows

    def window(self, layer: int) -> int | None:
        """How many positions a slot of that layer sees; None for all."""
        return self.windows[layer] if self.windows else None

    def form(self, base: ModelConfig) -> HeadForm:
        """What it is made of, beside the base that it was trained for."""
        hidden, heads = int(base.hidden_size), int(base.num_attention_heads)
        dim = base.head_dim
        kv_heads = int(getattr(base, "num_key_value_heads", None) or heads)
        own_rows = (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return HeadForm(
            layers=self.layers,
            taps=len(self.aux_hidden),
            width=self.hidden / hidden,
            attention=own_rows / ((heads + kv_heads) * dim * hidden),
            mlp=self.intermediate * self.hidden / (int(base.intermediate_size) * hidden),
            keys=self.kv_heads * self.head_dim / (kv_heads * dim),
            vocab=self.vocab / int(base.vocab_size),
            markov_rank=self.markov_rank,
            own_matrix=self.own_head,
        )
