"""What happens first in the Python processes that a test starts."""

from __future__ import annotations

from pathlib import Path

import pytest


def at_start(monkeypatch: pytest.MonkeyPatch, folder: Path, word: str, code: str) -> None:
    """Let each Python process that this one starts, and that has `word` on its command line, run
    `code` before anything else."""
    lines = [f"    {line}" for line in code.strip().splitlines()]
    text = "\n".join(["import sys", f"if {word!r} in sys.orig_argv:", *lines, ""])
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(folder))
