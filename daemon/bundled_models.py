"""Paths of the bundled demo models."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

HYBRID = "toy-hybrid"
"""The name, wherever a model is named, of the bundled one that attends in few of its layers."""


def bundled(part: str) -> str:
    """Path of a bundled folder: "base" or "draft" (see edgespec/models/MODEL_CARD.md), HYBRID."""
    return str(resources.files("edgespec") / "models" / part)


def bundled_weights(part: str) -> str:
    """The same, or "" if no weights of that name are bundled."""
    folder = bundled(part)
    return folder if Path(folder).is_dir() else ""
