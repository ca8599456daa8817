"""Head shape: what an EAGLE head computes, told by its files and checked against its base."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["eagle", "eagle3"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of the head's own attention: `theta`, and positions divided by `factor`.

    `llama3`: the settings (low and high frequency factor, original context length) of Llama 3.1's
    rule, by which `factor` divides slow frequencies alone; None for all others.
    """

    theta: float = 10000.0
    factor: float = 1.0
    llama3: tuple[float, float, int] | None = None


@dataclass(frozen=True, slots=True)
class HeadShape:
    """One EAGLE head. `kind` "eagle" is EAGLE-1 and EAGLE-2 (the same weights), "eagle3" EAGLE-3.

    `hidden` is the width of the head, `base_hidden` that of the base. `vocab` counts the tokens
    that the head scores: the base's, or for EAGLE-3 a part of them. `fc_bias`, `qkv_bias` and
    `o_bias` say which biases there are; `own_embedding` and `own_head` whether the head brings its
    own matrices or borrows the base's. `residual_normed`: the residual stream of EAGLE-3 starts
    after `hidden_norm`, not before it (speculators' norm_before_residual). `aux_hidden`: the
    base's layers whose incoming rows EAGLE-3 reads, low to high (none for "eagle"). `ropes`: what
    may be meant, the likeliest first; more than one only where the published settings are in doubt.
    """

    kind: Kind
    hidden: int
    base_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    ropes: tuple[Rope, ...] = (Rope(),)
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    own_embedding: bool = False
    own_head: bool = False
    residual_normed: bool = False
    aux_hidden: tuple[int, ...] = ()

    @property
    def fused_width(self) -> int:
        """What `fc` takes in a row."""
        return len(self.aux_hidden) * self.base_hidden if self.kind == "eagle3" else 2 * self.hidden
