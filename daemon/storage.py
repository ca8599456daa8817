"""Where blocks of layers and swapped memory lie: which kind of disk, and how fast it is."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from edgespec.daemon.device import ROOT, system_text

TRIED_BYTES = 32 << 20
"""How much is written and read back: three seconds of a slow SD card."""
_PIECE = 1 << 20
_KINDS = {"SD": "SD card", "MMC": "eMMC"}


@dataclass(frozen=True, slots=True)
class Disk:
    """A disk by its kernel name ("" unknown), and its kind in words."""

    name: str
    kind: str

    @property
    def is_card(self) -> bool:
        """Whether it is slow, and wears out by being written."""
        return self.name.startswith("mmcblk")

    def __str__(self) -> str:
        return f"{self.name}, {self.kind}" if self.name else self.kind


def disk_of(number: int, root: Path = ROOT) -> Disk:
    """The disk of a device number (os.stat's st_dev)."""
    link = root / "sys/dev/block" / f"{os.major(number)}:{os.minor(number)}"
    try:
        folder = link.resolve(strict=True)
    except (OSError, RuntimeError):  # a network's or a container's file system; a loop of links
        return Disk("", "no disk of its own (a network, a container or memory)")
    if (folder / "partition").exists():
        folder = folder.parent
    return Disk(folder.name, _kind(folder))


def _kind(folder: Path) -> str:
    name = folder.name
    if name.startswith("mmcblk"):
        return _KINDS.get(system_text(folder / "device/type"), "SD card or eMMC")
    if name.startswith("nvme"):
        return "NVMe"
    if name.startswith("zram"):
        return "compressed memory"
    if "usb" in str(folder):
        return "USB disk"
    return "disk"


def speeds(folder: Path) -> tuple[float, float]:
    """Bytes a second (written, read back) of a file in this folder, which is gone afterwards.

    What was written is flushed to the disk, and read past the system's cache as far as the file
    system lets it be dropped. Raises OSError.
    """
    piece = os.urandom(_PIECE)  # a disk may compress
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()
        began = time.perf_counter()
        for _ in range(TRIED_BYTES // _PIECE):
            os.write(descriptor, piece)
        os.fsync(descriptor)
        written = time.perf_counter() - began
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began = time.perf_counter()
        while os.read(descriptor, _PIECE):
            pass
        read = time.perf_counter() - began
    return TRIED_BYTES / max(written, 1e-9), TRIED_BYTES / max(read, 1e-9)


@dataclass(frozen=True, slots=True)
class Swap:
    """One entry of /proc/swaps."""

    path: str
    bytes: int

    @property
    def is_memory(self) -> bool:
        """Whether it lies in the memory that it is to relieve."""
        return "zram" in self.path


def swaps(root: Path = ROOT) -> list[Swap]:
    """What memory may be swapped out to."""
    found = []
    for line in system_text(root / "proc/swaps").splitlines()[1:]:
        words = line.split()
        if len(words) >= 3 and words[2].isdecimal():
            found.append(Swap(words[0], int(words[2]) * 1024))
    return found


def swap_disk(swap: Swap, root: Path = ROOT) -> Disk:
    """The disk that it lies on."""
    path = root / swap.path.lstrip("/")
    try:
        state = path.stat()
    except OSError:
        name = Path(swap.path).name
        return Disk(name, _kind(root / "sys/block" / name))
    # A partition's own number, or that of the file system that has the file.
    return disk_of(state.st_rdev or state.st_dev, root)
