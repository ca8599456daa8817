"""The hook that checks commit messages, as git runs it in a repository of the test's own."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HOOK = REPOSITORY / "tools" / "commit_msg.py"
ALLOWED = (
    "tree: keep rows above the watermark",
    "tests/cli: a stage that is lost\n\nWhy: it was slow; measured, not guessed.",
    f"docs: {'x' * 66}",
    "# a comment of the template\nmake: demo installs no test tools\n# more of it",
    f"rope, cache: one table\n# {'-' * 24} >8 {'-' * 24}\nonly shown by git commit -v",
    "Merge branch 'a-branch-with-a-name-that-goes-on-for-more-than-seventy-two-characters'",
    'Revert "tree: keep rows above the watermark"',
    "fixup! tree: keep rows above the watermark",
    "",
)
REFUSED = {
    f"docs: {'x' * 67}": "it has 73 characters, of at most 72",
    "Keep rows above the watermark": "it does not begin with the room",
    "tree: ": "it does not begin with the room",
    "tree: keep rows; drop ids": "`;` joins two changes",
    "tree: keep rows (WIP)": "it says that the work is not finished",
    "tree: keep rows\nabove the watermark": "the line below it is not empty",
}


def git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git or make without this user's settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    clean.pop("MAKEFLAGS", None)
    clean |= {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    for role in ("AUTHOR", "COMMITTER"):
        clean |= {f"GIT_{role}_NAME": "Test", f"GIT_{role}_EMAIL": "test@example.org"}
    return subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty repository with the Makefile and the hook, which is not installed."""
    (tmp_path / "tools").mkdir()
    shutil.copy(HOOK, tmp_path / "tools")
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    assert git(tmp_path, "git", "init", "--quiet").returncode == 0
    return tmp_path


def test_what_is_allowed_and_what_is_refused() -> None:
    problems = runpy.run_path(str(HOOK))["problems"]
    for text in ALLOWED:
        assert list(problems(text)) == [], text
    for text, reason in REFUSED.items():
        (problem,) = problems(text)
        assert problem.startswith(reason)


def test_make_hooks_lets_git_check_messages(repository: Path) -> None:
    commit = ("git", "commit", "--quiet", "--allow-empty", "-m")
    assert git(repository, *commit, "before; all goes").returncode == 0
    assert "from now on" in git(repository, "make", "hooks").stdout
    assert "already" in git(repository, "make", "hooks").stdout
    refused = git(repository, *commit, "tree: keep rows; drop ids")
    assert refused.returncode != 0
    assert "git commit -e -F .git/COMMIT_EDITMSG" in refused.stderr
    assert git(repository, *commit, "tree: keep rows").returncode == 0


def test_make_hooks_overwrites_no_hook(repository: Path) -> None:
    own = repository / ".git" / "hooks" / "commit-msg"
    own.parent.mkdir(exist_ok=True)
    own.write_text("#!/bin/sh\n")
    done = git(repository, "make", "hooks")
    assert done.returncode != 0
    assert f'Let your own commit-msg hook call {repository}/tools/commit_msg.py "$1"' in done.stderr
    assert own.read_text() == "#!/bin/sh\n"

    own.unlink()
    git(repository, "git", "config", "core.hooksPath", str(repository / "shared"))
    assert git(repository, "make", "hooks").returncode != 0
    assert not (repository / "shared").exists()
