"""Checks whether edgespec can run on this device, and what would make it run better."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from edgespec import __version__
from edgespec.config import DEFAULT_PORT, LOOPBACK
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.device import ROOT, board_facts, gpu_facts, is_jetson, warnings
from edgespec.daemon.memory import available_memory
from edgespec.daemon.settings import RingOptions, served_config
from edgespec.errors import EdgespecError

OK, WARNING, BLOCKED = "ok", "warning", "blocked"

_GIB = 2**30
_LEAST_MEMORY = _GIB // 2  # the interpreter, torch, and nothing of a model
_FEW_MEMORY = 2 * _GIB
_LEAST_DISK = 4 * _GIB  # a 4-bit block of some layers


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
    yield from _versions()
    broken = _import_problem()
    if broken:
        yield Finding("import", BLOCKED, broken)
        return
    yield from _device(root)
    for name, fact in board_facts(root).items():
        yield Finding(name, OK, fact)
    for warning in warnings(root):
        yield Finding("speed", WARNING, warning)
    yield _memory(root)
    yield from machine_memory(cluster, root)
    yield _kernels()
    yield from _quantisations()
    yield _cache(cache)
    yield _port(port)


# --- software -----------------------------------------------------------------------------------


def _versions() -> Iterator[Finding]:
    yield Finding("python", OK, f"{platform.python_version()} ({sys.executable})")
    yield Finding("edgespec", OK, __version__)
    for requirement in metadata.requires("edgespec") or ():
        found = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
        if found:  # else it is one of an extra, for tests
            yield _version(found[1], found[2])


def _version(name: str, least: str) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, BLOCKED, f"not installed; pip install '{name}>={least}'")
    if _numbers(version) < _numbers(least):
        return Finding(name, BLOCKED, f"{version} is too old; pip install '{name}>={least}'")
    return Finding(name, OK, version)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of "2.13.0+cpu"."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _import_problem() -> str:
    """Why the libraries that compute cannot be loaded; "" if they can."""
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except Exception as problem:  # a wheel for another system fails in many ways
            return (
                f"{name} is installed but cannot be loaded ({problem}); install a build for this "
                "system (on a Jetson: NVIDIA's, for its JetPack)"
            )
    return ""


# --- device -------------------------------------------------------------------------------------


def _device(root: Path) -> Iterator[Finding]:
    from edgespec.daemon.kernels import sixteen_bit_type
    from edgespec.model.device import best_device

    device = best_device()
    yield Finding("device", OK, f"{device.type}, 16 bit is {sixteen_bit_type(device)}")
    for name, fact in gpu_facts().items():
        yield Finding(name, OK, fact)
    if device.type == "cpu" and is_jetson(root):
        text = (
            "torch does not see this Jetson's GPU and computes on the CPU; install NVIDIA's torch "
            "wheel for this JetPack"
        )
        yield Finding("GPU", WARNING, text)


def _memory(root: Path) -> Finding:
    from edgespec.model.device import best_device

    found = available_memory(best_device().type, root)
    text = f"{found.bytes / _GIB:.1f} GiB available to models ({found.source})"
    if found.bytes < _LEAST_MEMORY:
        text += ": less than edgespec itself takes; end other programs"
        return Finding("memory", BLOCKED, text)
    if found.bytes < _FEW_MEMORY:
        return Finding("memory", WARNING, f"{text}: enough for few layers; end other programs")
    return Finding("memory", OK, text)


def _kernels() -> Finding:
    from edgespec.kernels import compiled

    problem = next(filter(None, map(compiled.complaint, ("products", "rows"))), "")
    if problem:
        return Finding("kernels", WARNING, problem)
    return Finding("kernels", OK, "compiled for this processor")


def _quantisations() -> Iterator[Finding]:
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
    from edgespec.model.device import best_device

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


def _cache(folder: Path) -> Finding:
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


def _port(port: int) -> Finding:
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
