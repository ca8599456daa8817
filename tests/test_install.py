"""The wheel and the source distribution: what is in them, and that both install and answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import edgespec

REPOSITORY = Path(__file__).resolve().parent.parent
NAME = f"edgespec-{edgespec.__version__}"
# What builds, tools and commands leave in a checkout, and no distribution may carry.
LEFTOVERS = (
    ".venv/bin/python",
    "build/types/edgespec/old.py",
    "dist/edgespec-0.0-py3-none-any.whl",
    "bench-results/run.json",
    ".mypy_cache/3.10/edgespec.json",
    "edgespec/__pycache__/old.cpython-311.pyc",
    "tests/__pycache__/old.cpython-311.pyc",
)


def run(cwd: Path, *command: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}{done.stderr}"
    return done.stdout


def tracked_files() -> set[str]:
    """Every file and link of the repository, as git has it."""
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs a git checkout")
    # A checkout of another user, as containers mount it, is read all the same.
    names = run(REPOSITORY, "git", "-c", "safe.directory=*", "ls-files", "-z").split("\0")
    found = {name: REPOSITORY / name for name in names if name}
    return {name for name, path in found.items() if path.is_file() or path.is_symlink()}


def wheel_of(source: Path, out: Path) -> Path:
    """The wheel that pip builds of a folder or an archive, with the installed setuptools."""
    run(
        *(out.parent, sys.executable, "-m", "pip", "wheel", str(source), "--wheel-dir", str(out)),
        *("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"),
    )
    (wheel,) = out.iterdir()
    return wheel


def contents(wheel: Path) -> dict[str, int]:
    """The checksum of every file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {info.filename: info.CRC for info in archive.infolist()}


@pytest.mark.thorough
def test_wheel_and_sdist_are_complete_install_and_answer(tmp_path: Path) -> None:
    tracked = tracked_files()
    source = tmp_path / "source"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name, follow_symlinks=False)
    for name in LEFTOVERS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(b"")

    build = "from setuptools import build_meta as b; b.build_sdist('../sdist')"
    run(source, sys.executable, "-c", build)
    sdist = tmp_path / "sdist" / f"{NAME}.tar.gz"
    with tarfile.open(sdist) as archive:
        packed = {member.name for member in archive.getmembers() if member.isfile()}
    made = {name for name in packed if name.startswith(f"{NAME}/edgespec.egg-info/")}
    links = {name for name in tracked if (source / name).is_symlink()}
    # An archive has no links: what they lead to is in it twice.
    behind = {
        f"{link}/{name.removeprefix(f'{folder}/')}"
        for link in links
        for folder in [(source / link).resolve().relative_to(source.resolve())]
        for name in tracked
        if name.startswith(f"{folder}/")
    }
    expected = tracked - links | behind | {"PKG-INFO"}
    assert packed - made == {f"{NAME}/{name}" for name in expected}

    wheel = wheel_of(sdist, tmp_path / "from-sdist")
    assert contents(wheel) == contents(wheel_of(source, tmp_path / "from-source"))
    assert {name.partition("/")[0] for name in contents(wheel)} == {"edgespec", f"{NAME}.dist-info"}

    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python, command = str(home / "bin" / "python"), str(home / "bin" / "edgespec")
    run(tmp_path, python, "-m", "pip", "install", "--no-deps", "--no-index", str(wheel))
    # The dependencies are those of the running interpreter. Only a site folder's own .pth files
    # count, so that an edgespec installed there as a link to the checkout stays unseen.
    (packages,) = home.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("-packages")]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    where = run(tmp_path, python, "-c", "import edgespec; print(edgespec.__file__)")
    assert Path(where).is_relative_to(home)
    assert run(tmp_path, command, "--version") == f"edgespec {edgespec.__version__}\n"

    toy = str(Path(where.strip()).parent / "models" / "base")
    demo = (command, "demo", "--model", toy, "--max-new-tokens", "8", "--json")
    answer = json.loads(run(tmp_path, *demo))
    assert (answer["new_tokens"], answer["stages"]) == (8, 3)
    assert answer["text"]
