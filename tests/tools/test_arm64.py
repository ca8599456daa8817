"""What `make test-arm64` says where it cannot run, and of what fails.

`make test-arm64` itself takes root, QEMU and most of an hour: it is run by name.
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.wheel_index import REPOSITORY

TOOL = runpy.run_path(str(REPOSITORY / "tools" / "arm64.py"))


def test_what_is_missing_is_named_with_a_code_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(REPOSITORY / "tools/arm64.py"), "--folder", str(tmp_path)],
        env={"PATH": str(tmp_path), "http_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (77, "")
    assert done.stderr.startswith("Not run. Missing here: the program debootstrap; ")
    for name in ("qemu-aarch64-static", "Debian's packages at http://deb.debian.org"):
        assert name in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_sources_are_copied_with_their_links_and_once_more(tmp_path: Path) -> None:
    system = TOOL["System"](tmp_path)
    gone = system.sources / "edgespec" / "gone.py"
    for _ in range(2):
        system.copy_sources()
        assert (system.sources / "edgespec" / "cli").is_symlink()
        assert (system.sources / "edgespec" / "cli" / "main.py").is_file()
        assert (system.sources / "tests" / "conftest.py").is_file()
        assert not gone.exists()
        gone.write_text("")


def test_other_token_ids_are_a_failure() -> None:
    assert TOOL["same"]({"a": [1, 2]}, {"a": [1, 2]}).startswith(
        "1 of 1 answers have the token ids"
    )
    for there in ({}, {"a": [1, 3]}):
        with pytest.raises(TOOL["Failed"], match=r"a: .*, here \[1, 2\]"):
            TOOL["same"](there, {"a": [1, 2]})


def test_a_step_that_fails_or_hangs_ends_with_words() -> None:
    with pytest.raises(TOOL["Failed"], match="sh ended with exit code 3\nlast words"):
        TOOL["run"]("sh", "-c", "echo last words; exit 3")
    with pytest.raises(TOOL["Failed"], match=r"sleep took more than 0 s"):
        TOOL["run"]("sleep", "9", seconds=0.2)
