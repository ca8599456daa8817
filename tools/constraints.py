#!/usr/bin/env python3
"""Print which versions pip may install edgespec with, so that a vendor's torch stays.

    .venv/bin/python tools/constraints.py [auto|cpu|default] >/tmp/versions &&
        .venv/bin/pip install -c /tmp/versions '.[stage]'

These are the pins of constraints.txt. If this interpreter has a torch already, that one is kept:
its exact version takes the place of the pin, the packages that it requires are not pinned, and
numpy stays below 2 if it was built for that. One that is too old ends this with what to do, before
pip has changed anything; so does a Jetson without torch. pip by itself would replace the first and
give the second a torch that does not see its GPU.

`cpu`: torch's build for the CPU alone, whatever the device is; `default`: what the package index
has for it, on most machines with CUDA. The first line says what was chosen. DEVICE_ROOT and
MACHINE, for tests, stand for the device's file system and architecture.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
LEAST = (2, 6)
"""torch's, as setup.cfg has it."""
KEPT, CPU_INDEX, USUAL = (
    "# torch: kept",
    "# torch: from the index of builds for the CPU",
    "# torch: from the usual index",
)
CHOICES = ("auto", "cpu", "default")
HOW = "docs/jetson.md says which torch goes with which JetPack, and how to install it"


class Refused(Exception):
    """Why nothing should be installed yet, and what to do."""


def versions(choice: str, root: Path, machine: str) -> Iterator[str]:
    """The lines of a constraints file for this interpreter. Raises Refused."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if name_of(line)]
    device = nvidia_device(root)
    found = own_torch()
    if found is not None:
        yield from kept(found, pins)
    elif device == "Jetson" and choice == "auto":
        raise Refused(
            "this is a Jetson, and torch is not installed in this environment: a usual build would "
            f"not see the GPU. {HOW}; it is kept then. To compute on the CPU alone: `make "
            "TORCH=cpu`, or `tools/constraints.py cpu`"
        )
    elif choice == "default" or (choice == "auto" and device):
        yield USUAL
        yield from (unmarked(pin) if is_pin("torch", pin) else pin for pin in newest_first(pins))
    else:
        # On ARM the usual index has a build for the CPU, of the version that is pinned there.
        yield USUAL if machine == "aarch64" else CPU_INDEX
        yield from pins


def own_torch() -> importlib.metadata.Distribution | None:
    """The torch of this interpreter; None without one, or if it is the usual build for the CPU,
    which anybody can have again."""
    try:
        found = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if found.version.endswith("+cpu") else found


def kept(torch: importlib.metadata.Distribution, pins: list[str]) -> Iterator[str]:
    """Constraints that leave it as it is. Raises Refused if it is too old."""
    if is_too_old(torch.version):
        raise Refused(
            f"torch {torch.version} is installed here, and edgespec needs 2.6 or newer; pip would "
            "replace it by one that may not see this device's GPU. Nothing was changed. Install a "
            f"newer one first ({HOW}), or, if it may be any, remove it: pip uninstall torch"
        )
    yield KEPT
    yield f"torch=={torch.version}"
    free = {"torch"}
    if f"torch=={torch.version.partition('+')[0]}" not in map(unmarked, pins):
        free.update(map(name_of, torch.requires or ()))
    if needs_old_numpy(torch):
        free.add("numpy")
        yield "numpy<2"
    yield from (pin for pin in pins if name_of(pin) not in free)


def is_too_old(version: str) -> bool:
    """Whether it comes before LEAST, as its own pre-releases do."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    numbers = tuple(map(int, release[0].split("."))) if release else ()
    rest = version[len(release[0]) :] if release else ""
    before = bool(re.match(r"[-_.]?(a|b|c|rc|pre|dev)", rest))
    padded = (*numbers, 0, 0)[:2]
    return padded < LEAST or (padded == LEAST and before and not any(numbers[2:]))


def needs_old_numpy(torch: importlib.metadata.Distribution) -> bool:
    """Whether it was built with the headers of NumPy 1, and so cannot speak with NumPy 2: the
    headers of NumPy 2 look for the module numpy._core too. No if there is nothing to look at."""
    library = Path(str(torch.locate_file("torch/lib/libtorch_python.so")))
    if not library.is_file() or not library.stat().st_size:
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as bytes_:
        has = [bytes_.find(name) >= 0 for name in (b"numpy.core._multiarray", b"numpy._core._mult")]
    return has == [True, False]


def nvidia_device(root: Path) -> str:
    """ "Jetson", "GPU", or "" if there is neither."""
    model = "".join(
        (root / "proc/device-tree" / name).read_text(encoding="utf-8", errors="replace").lower()
        for name in ("model", "compatible")
        if (root / "proc/device-tree" / name).is_file()
    )
    if (root / "etc/nv_tegra_release").exists() or "nvidia" in model:
        return "Jetson"
    if any(root.glob("dev/nvhost-*")):
        return "Jetson"
    if any(root.glob("dev/nvidia*")):
        return "GPU"
    return "GPU" if root == Path("/") and shutil.which("nvidia-smi") else ""  # WSL has only that


def name_of(requirement: str) -> str:
    """The distribution of a requirement or a pin, in normal form."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def is_pin(name: str, line: str) -> bool:
    return name_of(line) == name


def unmarked(pin: str) -> str:
    return pin.partition(";")[0].strip()


def newest_first(pins: list[str]) -> list[str]:
    """The pins with the first one of torch alone, which is that of x86-64."""
    first = next(pin for pin in pins if is_pin("torch", pin))
    return [pin for pin in pins if not is_pin("torch", pin) or pin == first]


def main() -> None:
    """Print the file, or why not, with exit code 1."""
    choice = sys.argv[1] if len(sys.argv) > 1 else "auto"
    if choice not in CHOICES or len(sys.argv) > 2:
        known = ", ".join(CHOICES)
        sys.exit(f"edgespec: error: there is no choice {choice!r}; give one of: {known}")
    root = Path(os.environ.get("DEVICE_ROOT") or "/")
    machine = os.environ.get("MACHINE") or platform.machine()
    try:
        print("\n".join(list(versions(choice, root, machine))))
    except Refused as refusal:
        sys.exit(f"edgespec: error: {refusal}")


if __name__ == "__main__":
    main()
