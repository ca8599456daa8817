"""Models with mask tokens, made of usual ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

MASK = 3


def with_masks(model: str | Path, folder: Path, mask: int = MASK, **settings: Any) -> Path:
    """A copy of a model's folder whose config.json names a mask token, and `settings`."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = json.dumps(config | {"pard_token": mask} | settings)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
