"""Compiled kernels: built once, kept privately, and done without where nothing can build them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.kernels import compiled

pytestmark = pytest.mark.skipif(
    not any(map(compiled.shutil.which, compiled.COMPILERS)), reason="no C compiler here"
)

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C source, and a cache that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "some.c"
    path.write_text(SOURCE)
    return path


def kept(source: Path) -> list[Path]:
    return sorted((source.parent / "cache" / "edgespec" / "kernels").glob("*.so"))


def test_the_kernels_of_this_folder_compile() -> None:
    for path in Path(compiled.__file__).parent.glob("*.c"):
        assert compiled.complaint(path.stem) == ""


def test_a_function_runs_and_its_library_is_kept(source: Path) -> None:
    assert compiled.built(source).answer() == 42
    (library,) = kept(source)
    before = library.stat()
    assert compiled.built(source).answer() == 42
    assert library.stat().st_mtime_ns == before.st_mtime_ns
    assert stat.S_IMODE(library.parent.stat().st_mode) == 0o700
    source.write_text(SOURCE.replace("42", "43"))
    assert compiled.built(source).answer() == 43
    assert len(kept(source)) == 2


def test_a_folder_that_others_can_write_to_is_not_used(source: Path) -> None:
    folder = source.parent / "cache" / "edgespec" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert compiled.built(source).answer() == 42
    assert kept(source) == []


def test_a_folder_that_cannot_be_made_is_done_without(source: Path) -> None:
    (source.parent / "cache").write_text("in the way")
    assert compiled.built(source).answer() == 42


def test_what_cannot_be_built_says_why(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text("int answer(void) { return missing; }\n")
    with pytest.raises(compiled.Unusable, match=r"cannot compile some\.c .*missing"):
        compiled.built(source)
    assert kept(source) == []
    monkeypatch.setenv("PATH", str(source.parent))
    with pytest.raises(compiled.Unusable, match="no C compiler"):
        compiled.built(source)
    script = source.parent / "cc"
    target = "$(echo $* | sed 's/.* -o //;s/ .*//')"
    script.write_text(f"#!/bin/sh\necho that is no program > {target}\n")
    script.chmod(0o700)
    monkeypatch.setenv("PATH", f"{source.parent}:{os.environ['PATH']}:/usr/bin:/bin")
    with pytest.raises(compiled.Unusable, match="cannot be loaded"):
        compiled.built(source)


@pytest.mark.thorough
def test_processes_that_start_together_all_get_it(source: Path) -> None:
    code = (
        "import sys, pathlib; from edgespec.kernels import compiled; "
        "print(compiled.built(pathlib.Path(sys.argv[1])).answer())"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(source)], stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    assert [run.communicate()[0] for run in runs] == [b"42\n"] * 4
    assert len(kept(source)) == 1
