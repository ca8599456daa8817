"""A cache of a test's own, in which the compiled kernels are those of this user: making them again
takes seconds of CPU time, in every process that would be the first."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.files import cache_folder


def own_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on what is kept goes into a folder that is not there yet; kernels do not."""
    kernels = cache_folder() / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "edgespec").mkdir(mode=0o700, parents=True)
    (folder / "edgespec" / "kernels").symlink_to(kernels)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
