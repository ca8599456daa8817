"""Memory available to models: from the system, its control groups, or the GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from edgespec.daemon.device import ROOT, is_jetson, meminfo, system_text

if TYPE_CHECKING:
    import torch

    from edgespec.model.source import TensorSource


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can be allocated now, and the source of the figure."""

    bytes: int
    source: str


def available_memory(device_type: str = "cpu", root: Path = ROOT) -> Available:
    """What a model on a device of this type ("cpu" or "cuda") can take now.

    A GPU that shares the RAM (Jetson) has what the system has: its driver counts pages that the
    system would give back as taken. A GPU with memory of its own is asked itself.
    """
    if device_type == "cuda" and not is_unified(root):
        import torch

        free, total = torch.cuda.mem_get_info()
        return Available(free, f"free of the GPU's {total / 2**30:.1f} GiB, by its driver")
    return min(_limits(root), key=lambda limit: limit.bytes)


def yet_to_take(need: int, device_type: str = "cpu", root: Path = ROOT) -> int:
    """Bytes of `need` that this process does not hold for good yet, and that `available_memory`
    therefore still counts. Mapped files are not held: the system drops them for others."""
    status = system_text(root / "proc/self/status")
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    held = int(found[1]) << 10 if found else 0
    if device_type == "cuda":
        import torch

        held = torch.cuda.memory_reserved() + (held if is_unified(root) else 0)
    return max(0, need - held)


def bound_gpu(most: int) -> None:
    """Let torch hold at most so many bytes of the GPU beyond those of now.

    It keeps what is freed for what comes next, and caches that grow leave pieces behind that fit
    nothing. At this bound it gives them back and goes on, before it asks the driver for more, which
    on a Jetson would take the memory from under the system.
    """
    import torch

    total = torch.cuda.mem_get_info()[1]
    share = (torch.cuda.memory_reserved() + most) / total
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))


def give_back(source: TensorSource, device: torch.device) -> None:
    """Where the GPU shares the memory, what it has of a block file by now is not to stay in the
    system's cache of files besides: drivers do not take memory that it would give up."""
    from edgespec.model.block_file import BlockFile

    if device.type == "cuda" and isinstance(source, BlockFile) and is_unified():
        source.give_back()


def is_unified(root: Path = ROOT) -> bool:
    """Whether the GPU has no memory of its own."""
    import torch

    integrated = getattr(torch.cuda.get_device_properties(0), "is_integrated", 0)
    return bool(integrated) or is_jetson(root)


def _limits(root: Path) -> Iterator[Available]:
    if available := meminfo("MemAvailable", root):
        yield Available(available, "MemAvailable of /proc/meminfo")
    else:
        yield _without_proc()
    for line in system_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _group_limits(root / "sys/fs/cgroup", path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _group_limits(root / "sys/fs/cgroup/memory", path, *names)


def _without_proc() -> Available:
    """On a system whose /proc does not tell."""
    try:
        return Available(int(psutil.virtual_memory().available), "the system's available memory")
    except (OSError, ValueError, KeyError):  # psutil reads the same file
        pages = os.sysconf("SC_AVPHYS_PAGES")
        return Available(pages * os.sysconf("SC_PAGE_SIZE"), "the system's free pages")


def _group_limits(
    mount: Path, path: str, limit_file: str, usage_file: str, cached: str
) -> Iterator[Available]:
    """What each control group from this one up to the root leaves; file cache is given back."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        limit, usage = system_text(folder / limit_file), system_text(folder / usage_file)
        if not limit.isdecimal() or not usage.isdecimal():
            continue  # "max", or a group that this container does not show
        cache = re.search(rf"^{cached} (\d+)$", system_text(folder / "memory.stat"), re.MULTILINE)
        free = int(limit) - int(usage) + (int(cache[1]) if cache else 0)
        yield Available(max(0, free), f"{limit_file} of the control group {path} less its use")
