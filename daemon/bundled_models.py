"""Paths of the bundled demo models."""

from __future__ import annotations

from importlib import resources


def bundled(part: str) -> str:
    """Path of the bundled "base" or "draft" folder (see edgespec/models/MODEL_CARD.md)."""
    return str(resources.files("edgespec") / "models" / part)
