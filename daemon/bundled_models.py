"""Paths of the bundled demo models."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def bundled(part: str) -> str:
    """Path of the bundled "base" or "draft" folder (see edgespec/models/MODEL_CARD.md)."""
    return str(resources.files("edgespec") / "models" / part)


def bundled_weights(part: str) -> str:
    """The same, or "" if no weights of that name are bundled."""
    folder = bundled(part)
    return folder if Path(folder).is_dir() else ""
