"""Head shape: what an EAGLE head computes, told by its files and checked against its base; and what
the settings of all draft heads have in common, read as plain JSON, since libraries rename and
default its fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgespec.errors import ModelError

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


USUAL_THETA = 10000.0
"""Of heads that do not say, and of several that say otherwise."""


def whole(settings: dict[str, Any], name: str, file: Path, most: int = 1 << 31) -> int:
    """A setting that is a whole number from 1 to `most`. Raises ModelError if it is none."""
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(
            f"{file} has no whole number {name!r} from 1 to {most}; download the head again"
        )
    return value


def number(value: object, name: str, file: Path) -> float:
    """The value of a setting that is a number above 0. Raises ModelError if it is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e12:
        raise ModelError(f"{name} in {file} is {value!r}, no fit number; download the head again")
    return float(value)


def rope(settings: dict[str, Any], file: Path) -> Rope:
    """The rotary settings. Raises ModelError for those that edgespec does not compute."""
    nested = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(nested, dict):
        raise ModelError(f"rope_scaling in {file} is no object; download the head again")
    given = settings.get("rope_theta", nested.get("rope_theta", USUAL_THETA))
    theta = number(given, "rope_theta", file)
    kind = nested.get("rope_type", nested.get("type", "default"))
    # Within the length that a head was made for, "dynamic" is the plain rule.
    if kind in ("default", "dynamic"):
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, number(nested.get("factor"), "rope_scaling.factor", file))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (number(nested.get(n), f"rope_scaling.{n}", file) for n in names)
        original = whole(nested, "original_max_position_embeddings", file)
        return Rope(theta, factor, (low, high, original))
    raise ModelError(
        f"{file} says rope type {kind!r}, edgespec computes default, linear, dynamic and "
        "llama3; use another head"
    )
