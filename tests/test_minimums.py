"""The lowest versions that setup.cfg allows, in an environment of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from support.wheel_index import REPOSITORY, name_of, numbers, requirements

TESTS = ("tests/serving", "tests/net", "tests/wire")
WITH_BROWSER = ("tests/serving/test_page.py", "tests/serving/test_screenshots.py")
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "setuptools")
TOOLS += ("httpx", "openai", "llm", "schemathesis", "jsonschema_rs", "gguf")
"""What those tests import, at the versions of constraints.txt."""

INSTALL_S, TESTS_S = 900, 1800


def lowest() -> dict[str, str]:
    """The lowest version of all that a coordinator needs, by name; of torch too."""
    needed = [one for one in requirements() if "extra" not in one or '"coordinator"' in one]
    found = {}
    for one in needed:
        bound = re.fullmatch(r"([\w-]+)>=([\d.]+)( ; .*)?", one)
        assert bound, f"{one} gives no lowest version alone"
        found[bound[1]] = bound[2]
    return found


def link_torch(folder: Path) -> None:
    """Links in this new folder to torch and to what it requires, as they are installed here."""
    folder.mkdir()
    wanted, linked = ["torch"], set()
    while wanted:
        name = name_of(wanted.pop())
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # of another platform
            continue
        if name in linked:
            continue
        linked.add(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (folder / top).symlink_to(Path(str(found.locate_file(top))))
        wanted += [one for one in found.requires or () if "extra ==" not in one]


def run(*command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """A command's end, without what this run of pytest and its environment say to it."""
    own = ("PYTEST_", "PYTHON", "VIRTUAL_ENV")
    env = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=seconds
    )


def test_nothing_is_pinned_below_its_lowest_version() -> None:
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8")
    bounds = {name_of(name): version for name, version in lowest().items()}
    pinned = re.findall(r"^([\w-]+)==([\d.]+)", pins, re.MULTILINE)
    assert bounds.keys() <= {name for name, _ in pinned}
    for name, version in pinned:
        assert numbers(version) >= numbers(bounds.get(name, "0")), (name, version)


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S + TESTS_S + 120)
def test_the_lowest_versions_that_setup_cfg_allows_pass_the_tests_of_serving_and_net(
    tmp_path: Path,
) -> None:
    """torch stays as it is installed here: an index for one platform may have no older one. The
    tests of the page are left out, which need a browser and try its scripts."""
    pip = ("-m", "pip", "--disable-pip-version-check")
    asked = run(sys.executable, *pip, "--retries", "1", "index", "versions", "msgspec", seconds=300)
    if asked.returncode:
        pytest.skip(f"needs a package index: {asked.stderr.strip()[-300:]}")
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv/bin/python")
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    link_torch(tmp_path / "torch")
    (site / "torch.pth").write_text(f"{tmp_path / 'torch'}\n", encoding="utf-8")
    versions = {name: version for name, version in lowest().items() if name != "torch"}
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    free = {"torch", *map(name_of, versions)}
    others = [pin for pin in pins if pin and pin[0] != "#" and name_of(pin) not in free]
    (tmp_path / "pins").write_text("\n".join(others), encoding="utf-8")
    installed = run(
        *(python, *pip, "install", "--quiet", "-c", str(tmp_path / "pins")),
        *("-e", ".[coordinator]", *TOOLS, *(f"{one}=={v}" for one, v in versions.items())),
        seconds=INSTALL_S,
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    tested = run(
        *(python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *TESTS),
        *("-m", "not slow and not thorough", "-p", "no:cacheprovider"),
        *(f"--ignore={one}" for one in WITH_BROWSER),
        seconds=TESTS_S,
    )
    assert tested.returncode == 0, tested.stdout[-20_000:] + tested.stderr[-2_000:]
