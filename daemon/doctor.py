"""Checks whether edgespec can run on this device, and what would make it run better."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from edgespec import __version__
from edgespec.config import DEFAULT_PORT, LOOPBACK
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.device import ROOT, board_facts, gpu_facts, warnings
from edgespec.daemon.extras import EXTRAS, missing
from edgespec.daemon.memory import available_memory
from edgespec.daemon.settings import RingOptions, served_config
from edgespec.errors import EdgespecError
from edgespec.planning.memory import RUNTIME_BYTES, Need
from edgespec.planning.partition import blocks_of

OK, WARNING, BLOCKED = "ok", "warning", "blocked"

_GIB = 2**30
_LEAST_MEMORY = _GIB // 2  # the interpreter, torch, and nothing of a model
_FEW_MEMORY = 2 * _GIB
_LEAST_DISK = 4 * _GIB  # a 4-bit block of some layers
_SLOW_DISK = 60e6  # bytes a second: SD cards
_MUCH_FASTER = 0.8


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `state`: OK, WARNING (edgespec runs) or BLOCKED."""

    name: str
    state: str
    text: str


def examine(
    cache: Path, cluster: Path, port: int = DEFAULT_PORT, root: Path = ROOT
) -> Iterator[Finding]:
    """Check this device; takes some seconds. `cluster`: its folder, which need not exist."""
    yield from guarded("versions", check_versions)
    broken = import_problem()
    if broken:
        yield Finding("import", BLOCKED, broken)
        return
    yield from guarded("device", lambda: check_device(root))
    yield from guarded("board", lambda: check_board(root))
    yield from guarded("speed", lambda: check_speed(root))
    yield from guarded("memory", lambda: [check_memory(root)])
    yield from guarded("GPU memory", lambda: check_gpu_memory(cluster, root))
    yield from guarded("both here", lambda: machine_memory(cluster, root))
    yield from guarded("swap", lambda: check_swap(root))
    yield from guarded("kernels", lambda: [check_kernels()])
    yield from guarded("16 bit", check_sixteen_bit)
    yield from guarded("quantisations", check_quantisations)
    yield from guarded("cache", lambda: [check_cache(cache)])
    yield from guarded("disk", lambda: check_disk(cache, root))
    yield from guarded("port", lambda: [check_port(port)])


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds. One that fails by what this system does not have, or has in another form,
    is a finding too: the others go on."""
    try:
        yield from check()
    except Exception as problem:  # of the kernel, a driver or a library: whatever it is
        what = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
        yield Finding(name, WARNING, f"this could not be looked at here ({what})")


# --- software -----------------------------------------------------------------------------------


def check_versions() -> Iterator[Finding]:
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Finding("edgespec", OK, __version__)
    for requirement in metadata.requires("edgespec") or ():
        found = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
        if found:  # else it is one of an extra, for tests
            yield check_version(found[1], found[2])
    without = {name: names for name in EXTRAS if (names := missing(name))}
    for name, names in without.items():
        text = f"without {', '.join(names)}, as `pip install '.[{name}]'` would bring"
        yield Finding(f"extra {name}", OK, text)


def check_version(name: str, least: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, BLOCKED, f"not installed; pip install '{name}>={least}'")
    if is_before(version, least):
        return Finding(name, BLOCKED, f"{version} is too old; pip install '{name}>={least}'")
    return Finding(name, OK, version)


def is_before(version: str, least: str) -> bool:
    """Whether it is older, as a pre-release of that very version is: 2.6.0rc1 comes before 2.6."""
    numbers, bound = _numbers(version), _numbers(least)
    length = max(len(numbers), len(bound))
    own, limit = (part + (0,) * (length - len(part)) for part in (numbers, bound))
    early = re.match(r"[\d.]*[-_.]?(a|b|c|rc|pre|dev)", version.partition("+")[0])
    return own < limit or (own == limit and early is not None)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def import_problem() -> str:
    """Why the libraries that compute cannot be loaded; "" if they can."""
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except Exception as problem:  # a wheel for another system fails in many ways
            return (
                f"{name} is installed but cannot be loaded ({problem}); install a build for this "
                "system (on a Jetson: NVIDIA's, for its JetPack)"
            )
    from edgespec.daemon.torch_checks import numpy_problem

    return numpy_problem()


# --- device -------------------------------------------------------------------------------------


def check_device(root: Path) -> Iterator[Finding]:
    from edgespec.daemon import torch_checks
    from edgespec.daemon.kernels import sixteen_bit_type
    from edgespec.model.tensors import best_device

    device = best_device()
    yield Finding("device", OK, f"{device.type}, 16 bit is {sixteen_bit_type(device)}")
    for name, fact in gpu_facts().items():
        yield Finding(name, OK, fact)
    if old := torch_checks.jetpack_problem(root):
        yield Finding("L4T", WARNING, old)
    if device.type == "cpu":
        if why := torch_checks.why_no_cuda(root):
            yield Finding("GPU", WARNING, why)
        return
    import torch

    capability = torch.cuda.get_device_capability()
    if lacks := torch_checks.architecture_problem(capability, torch.cuda.get_arch_list()):
        yield Finding("GPU", WARNING, lacks)
    failed = list(torch_checks.kernel_problems(device, sixteen_bit_type(device)))
    if failed:
        text = (
            f"{'; '.join(failed)}. This torch was not built for this GPU: install the one of this "
            "JetPack (docs/jetson.md)"
        )
        yield Finding("GPU kernels", BLOCKED, text)
    else:
        yield Finding("GPU kernels", OK, "one of each kind gives the CPU's results")


def check_board(root: Path) -> Iterator[Finding]:
    for name, fact in board_facts(root).items():
        yield Finding(name, OK, fact)


def check_speed(root: Path) -> Iterator[Finding]:
    for warning in warnings(root):
        yield Finding("speed", WARNING, warning)


def check_sixteen_bit() -> Iterator[Finding]:
    """On a CPU: which of the two types is faster. Which one a ring computes in is --dtype's to say:
    a text depends on it, and float16 ends at 65,504, which some models' activations exceed."""
    from edgespec.daemon.torch_checks import sixteen_bit_times
    from edgespec.model.tensors import best_device

    if best_device().type != "cpu":
        return
    times = sixteen_bit_times()
    share = times["float16"] / times["bfloat16"]
    text = f"products in float16 take {share:.2f} of bfloat16's time on this CPU"
    if share > _MUCH_FASTER:
        yield Finding("16 bit", OK, text)
        return
    text += ": a ring of such boards is faster with `edgespec init --dtype float16`, if the model "
    yield Finding("16 bit", WARNING, text + "was made for it (Gemma was not)")


def check_swap(root: Path) -> Iterator[Finding]:
    from edgespec.daemon.storage import swap_disk, swaps

    found = swaps(root)
    if not found:
        text = "none; if memory runs out, a process is ended"
        yield Finding("swap", OK, text)
    for swap in found:
        size = f"{swap.bytes / _GIB:.1f} GiB at {swap.path}"
        disk = swap_disk(swap, root)
        if swap.is_memory:
            text = f"{size}: compressed in the memory itself, which helps programs, not weights"
            yield Finding("swap", OK, text)
        elif disk.is_card:
            text = (
                f"{size} on {disk}: it stalls the stage when it is used, and wears the card out; "
                "move it to NVMe or USB, or turn it off (swapoff)"
            )
            yield Finding("swap", WARNING, text)
        else:
            yield Finding(
                "swap", OK, f"{size} on {disk}; weights that are swapped out stall a stage"
            )


def check_memory(root: Path) -> Finding:
    from edgespec.model.tensors import best_device

    found = available_memory(best_device().type, root)
    text = f"{found.bytes / _GIB:.1f} GiB available to models ({found.source})"
    if found.bytes < _LEAST_MEMORY:
        text += ": less than edgespec itself takes; end other programs"
        return Finding("memory", BLOCKED, text)
    if found.bytes < _FEW_MEMORY:
        return Finding("memory", WARNING, f"{text}: enough for few layers; end other programs")
    return Finding("memory", OK, text)


_BEFORE_WEIGHTS = """
import sys, torch
from edgespec.kernels.gpu.usable import usable
device = torch.device(sys.argv[1])
for step in (
    lambda: torch.zeros(1, device=device),
    lambda: torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device),
    lambda: usable(device),
):
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print("done", flush=True)
    sys.stdin.readline()
"""
"""A process that takes of a GPU what each one does, and waits after every step."""


def check_gpu_memory(cluster: Path, root: Path = ROOT) -> Iterator[Finding]:
    """What each process takes of a GPU before its first weight and, of a coordinator, what it and
    each stage are planned to take besides; nothing without a GPU."""
    if not gpu_facts():
        return
    from edgespec.daemon.torch_checks import allocator_problem

    if problem := allocator_problem(root):
        yield Finding("GPU memory", WARNING, problem)
    taken = taken_before_weights("cuda", lambda: available_memory("cuda", root).bytes)
    parts = ", ".join(f"{size / 2**20:.0f} MiB {what}" for what, size in taken.items())
    before = sum(taken.values())
    text = f"a process takes {before / 2**20:.0f} MiB before its first weight: {parts}"
    yield Finding("GPU memory", OK, text)
    for name, need in planned_places(cluster):
        work = need.overhead - RUNTIME_BYTES
        each = {"weights": need.weights, "rows": need.cache, "work space": work}
        parts = ", ".join(f"{what} {size / _GIB:.2f}" for what, size in each.items())
        total = (before + need.weights + need.cache + work) / _GIB
        text = f"before weights {before / _GIB:.2f} GiB, {parts}: {total:.2f} by plan"
        yield Finding(f"GPU memory, {name}", OK, text)


def planned_places(cluster: Path) -> Iterator[tuple[str, Need]]:
    """D0 and the stages, and what each is planned to take; none where this coordinates nothing, or
    the planner does not know the model."""
    from edgespec.daemon.planning import planned_needs

    try:
        folder = ClusterFolder.open(cluster)
        if not folder.is_coordinator:
            return
        config = served_config(folder.settings, RingOptions("", "", 0, ""), None)
        needs = planned_needs(config, config.context, "what devices need is not known")
    except EdgespecError:
        return  # another finding says what is wrong with the folder
    if needs is not None:
        of = needs.model.of
        yield "D0", needs.coordinator()
        for number, (first, end) in enumerate(
            blocks_of(of.layers, config.stages, config.layers, of.bound), 1
        ):
            yield f"stage {number}", needs.stage(end - first, last=number == config.stages)


def taken_before_weights(device: str, free: Callable[[], int]) -> dict[str, int]:
    """By what it is for, bytes by which `free()`, asked in this process, falls as another one
    begins to use the device. Raises OSError if that one ends before."""
    free()  # this process's own part is taken by now
    taken, before = {}, free()
    command = [sys.executable, "-c", _BEFORE_WEIGHTS, device]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for what in ("of its context", "of torch's libraries", "of edgespec's kernels"):
            if child.stdout.readline() != "done\n":
                raise OSError(child.communicate()[1].strip().rpartition("\n")[2])
            now = free()
            taken[what], before = max(0, before - now), now
            child.stdin.write("\n")
            child.stdin.flush()
    return taken


def check_kernels() -> Finding:
    from edgespec.kernels import compiled

    problem = next(filter(None, map(compiled.complaint, ("products", "rows"))), "")
    if problem:
        return Finding("kernels", WARNING, problem)
    return Finding("kernels", OK, "compiled for this processor")


def check_quantisations() -> Iterator[Finding]:
    from edgespec.daemon.kernels import tried_kernels

    kernels = tried_kernels()
    for name in kernels.usable:
        if name != "none":
            yield Finding(name, OK, "runs here")
    for name, reason in kernels.unusable.items():
        yield Finding(name, WARNING, reason)
    if not kernels.has_four_bit:
        text = (
            "no 4-bit quantisation runs here: models have to fit in 8 or 16 bits, and `edgespec "
            "profile` has nothing to measure"
        )
        yield Finding("4 bit", WARNING, text)


def machine_memory(cluster: Path, root: Path = ROOT) -> Iterator[Finding]:
    """On a coordinator's machine that carries layers, too: whether both its processes fit.

    Nothing if it serves already, as what is available is less by then what they have.
    """
    from edgespec.daemon.own_stage import machine_needs
    from edgespec.model.tensors import best_device

    try:
        folder = ClusterFolder.open(cluster)
        if not folder.is_coordinator or not folder.settings.with_stage:
            return
        with folder.served():
            pass
        config = served_config(folder.settings, RingOptions("", "", 0, ""), None)
        needs = machine_needs(config)
    except EdgespecError:
        return  # it serves, or another finding says what is wrong with the folder
    if needs is None:
        return
    found = available_memory(best_device().type, root)
    both = needs.coordinator + needs.stage
    text = (
        f"coordinator ({needs.coordinator / _GIB:.2f} GiB) and stage {config.with_stage} with "
        f"layers {needs.first} to {needs.end - 1} ({needs.stage / _GIB:.2f} GiB) need "
        f"{both / _GIB:.2f} GiB, {found.bytes / _GIB:.2f} are available here"
    )
    if both > found.bytes:
        text += ": fewer layers for it (`edgespec init --layers`, or --devices, which plans them)"
    yield Finding("both here", WARNING if both > found.bytes else OK, text)


# --- surroundings -------------------------------------------------------------------------------


def check_cache(folder: Path) -> Finding:
    where = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not where.is_dir() or not os.access(where, os.W_OK | os.X_OK):
        text = (
            f"{folder} cannot be written ({where} is not yours to write); name another folder with "
            "--cache, here and for `edgespec join`"
        )
        return Finding("cache", BLOCKED, text)
    free = shutil.disk_usage(where).free
    text = f"{folder}, {free / _GIB:.1f} GiB free"
    if free < _LEAST_DISK:
        text += ": too little for the block of a large model; free some"
        return Finding("cache", WARNING, text)
    return Finding("cache", OK, text)


def check_disk(folder: Path, root: Path) -> Iterator[Finding]:
    """Which disk the cache lies on, and how fast that is."""
    from edgespec.daemon.storage import disk_of, speeds

    where = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = disk_of(where.stat().st_dev, root)
    try:
        written, read = speeds(where)
    except OSError as problem:
        text = f"{disk}; its speed cannot be measured: {problem.strerror or problem}"
        yield Finding("disk", WARNING, text)
        return
    text = f"{disk}: writes {written / 1e6:.0f} MB/s, reads back {read / 1e6:.0f} MB/s"
    if min(written, read) < _SLOW_DISK:
        text += (
            f"; a block of 3 GiB takes {3 * _GIB / written / 60:.0f} minutes to store and "
            f"{3 * _GIB / read / 60:.0f} to read at a start: NVMe or a USB-SSD is faster (--cache)"
        )
        yield Finding("disk", WARNING, text)
    else:
        yield Finding("disk", OK, text)


def check_port(port: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind((LOOPBACK, 0))
        except OSError as problem:
            text = f"no TCP port can be opened on {LOOPBACK}: {problem.strerror}"
            return Finding("port", BLOCKED, text)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended one does not count
        try:
            probe.bind((LOOPBACK, port))
        except OSError as problem:
            text = (
                f"{port} cannot be opened ({problem.strerror}): a coordinator may be running here; "
                "give a second one another --port"
            )
            return Finding("port", WARNING, text)
    return Finding("port", OK, f"{port} is free for a coordinator")
