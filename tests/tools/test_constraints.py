"""Which torch an installation gets, and that a vendor's is never replaced: by dry runs of pip on an
index of wheels without code, as if on other machines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from support.wheel_index import REPOSITORY, would_install, write_index, write_wheel

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
MACHINES = ("aarch64", "x86_64")
CUDA = 'nvidia-cublas==13.1 ; platform_system == "Linux"'
OLD_CUDA = 'nvidia-cublas-cu12==12.8 ; platform_system == "Linux" and platform_machine == "x86_64"'
USUAL = ("filelock", "typing-extensions>=4.10.0", "sympy>=1.13.3", "networkx", "jinja2", "fsspec")
TORCHES = {  # as PyPI has them: since 2.11 with CUDA on ARM too
    "2.10.0": (*USUAL, OLD_CUDA),
    "2.13.0": (*USUAL, CUDA),
    "2.15.0": (*USUAL, CUDA),
}
TOO_OLD = ("2.5.0a0+872d972e41.nv24.8", "2.6.0rc1", "2.6.0a0+df5bbc09d1.nv24.11")
NUMPY_1 = b"...numpy.core._multiarray_umath..."
NUMPY_2 = NUMPY_1 + b"numpy._core._multiarray_umath"


@dataclass
class Board:
    """A machine's packages and what tools/constraints.py says there."""

    site: Path
    machine: str
    device: Path

    def install_torch(self, version: str, built_for: bytes, requires: tuple[str, ...] = ()) -> None:
        info = self.site / f"torch-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
        lines += [f"Requires-Dist: {one}" for one in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (info / "INSTALLER").write_text("pip\n", encoding="utf-8")
        library = self.site / "torch" / "lib" / "libtorch_python.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(built_for)

    def constraints(self, *choice: str) -> subprocess.CompletedProcess[str]:
        self.site.mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-S", str(REPOSITORY / "tools" / "constraints.py"), *choice],
            env={
                "PYTHONPATH": str(self.site),
                "MACHINE": self.machine,
                "DEVICE_ROOT": str(self.device),
                "PATH": os.environ["PATH"],
            },
            capture_output=True,
            text=True,
            timeout=60,
        )

    def plan(self, index: Path, python: str, wanted: str) -> dict[str, str]:
        """What pip would install by these constraints on a Python of that version."""
        said = self.constraints()
        assert said.returncode == 0, said.stderr
        elsewhere = {
            "python_version": python,
            "python_full_version": f"{python}.9",
            "platform_machine": self.machine,
        }
        return would_install(index, self.site, elsewhere, said.stdout, wanted)


def board(folder: Path, machine: str) -> Board:
    folder.mkdir()
    return Board(folder / "site", machine, folder)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resolution") / "index"
    write_index(folder, TORCHES)
    write_wheel(folder, "numpy", "1.26.4")
    return folder


def check(index: Path, folder: Path, python: str, machine: str, torch: str) -> None:
    """One case: `torch` is the version that is there, "" none."""
    place = board(folder, machine)
    if torch:
        # Jetson AI Lab's 2.8 has other dependencies than the pins would allow.
        place.install_torch(torch, NUMPY_1, ("sympy==1.13.1", "filelock"))
        write_wheel(index, "sympy", "1.13.1")
    plan = place.plan(index, python, "edgespec[coordinator]")
    assert "uvicorn" in plan
    if torch:
        assert "torch" not in plan, plan["torch"]
        assert (plan["numpy"], plan["sympy"]) == ("1.26.4", "1.13.1")
    else:
        assert plan["torch"] == {"aarch64": "2.10.0", "x86_64": "2.13.0"}[machine]
    brings_cuda = any(name.startswith("nvidia") for name in plan)
    assert brings_cuda == (machine == "x86_64" and not torch)


def test_a_vendors_torch_is_kept_with_the_numpy_that_it_needs(index: Path, tmp_path: Path) -> None:
    check(index, tmp_path / "kept", "3.10", "aarch64", "2.8.0")
    check(index, tmp_path / "fresh", "3.11", "aarch64", "")


@pytest.mark.thorough
def test_on_every_python_and_machine(index: Path, tmp_path: Path) -> None:
    for number, case in enumerate(product(PYTHONS, MACHINES, ("2.8.0", ""))):
        check(index, tmp_path / str(number), *case)


def test_one_that_is_too_old_is_refused_with_words(tmp_path: Path) -> None:
    for number, (machine, version) in enumerate(product(MACHINES, TOO_OLD)):
        place = board(tmp_path / str(number), machine)
        place.install_torch(version, NUMPY_1)
        said = place.constraints()
        assert (said.returncode, said.stdout) == (1, ""), version
        assert f"torch {version} is installed here, and edgespec needs 2.6" in said.stderr
        assert "Nothing was changed" in said.stderr
        assert "docs/jetson.md" in said.stderr


def test_a_vendors_release_of_a_later_version_is_kept(tmp_path: Path) -> None:
    for number, version in enumerate(("2.7.0a0+ecf3bae40a.nv25.02", "2.6.0", "2.6.1rc1", "2.9.1")):
        place = board(tmp_path / str(number), "aarch64")
        place.install_torch(version, NUMPY_2)
        said = place.constraints()
        assert said.stdout.splitlines()[:2] == ["# torch: kept", f"torch=={version}"]
        assert "numpy<2" not in said.stdout


def test_without_a_library_to_look_at_numpy_is_pinned_as_usual(tmp_path: Path) -> None:
    place = board(tmp_path / "empty", "aarch64")
    place.install_torch("2.8.0", b"")
    assert "numpy<2" not in place.constraints().stdout
    assert "\nnumpy==" in place.constraints().stdout


def test_the_pinned_version_with_cuda_is_kept_with_all_pins(tmp_path: Path) -> None:
    place = board(tmp_path / "pc", "aarch64")
    place.install_torch("2.13.0+cu130", NUMPY_2, ("sympy>=1.13.3",))
    lines = place.constraints().stdout.splitlines()
    assert lines[:2] == ["# torch: kept", "torch==2.13.0+cu130"]
    assert "sympy==1.14.0" in lines
    assert not any(line.startswith("torch==2.10") for line in lines)


def test_a_jetson_without_torch_is_refused_until_told_to_use_its_cpu(tmp_path: Path) -> None:
    place = board(tmp_path / "jetson", "aarch64")
    (tmp_path / "jetson" / "etc").mkdir()
    (tmp_path / "jetson" / "etc" / "nv_tegra_release").write_text("# R36\n", encoding="utf-8")
    said = place.constraints()
    assert (said.returncode, said.stdout) == (1, "")
    assert "this is a Jetson, and torch is not installed in this environment" in said.stderr
    assert 'torch==2.10.0 ; platform_machine == "aarch64"' in place.constraints("cpu").stdout
    assert "torch==2.13.0\n" in place.constraints("default").stdout


def test_an_unknown_choice_is_named(tmp_path: Path) -> None:
    said = board(tmp_path / "x", "x86_64").constraints("gpu")
    assert said.returncode == 1
    assert "there is no choice 'gpu'; give one of: auto, cpu, default" in said.stderr
