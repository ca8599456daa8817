"""Head settings: what the config.json files of all draft heads have in common.

Read as plain JSON, since libraries rename and default its fields.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.drafting.eagle.shape import Rope
from edgespec.errors import ModelError

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
