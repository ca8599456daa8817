"""Compiled kernels: the C sources of this folder, built by the device's compiler when first used.

Each becomes a shared library in the user's cache, whose name says what it was made of: the source,
the compiler, its options and the CPU; its hash is beside it, as the loader of a torn one ends the
process. ctypes lets go of Python's lock while a function of it runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from edgespec.files import cache_folder, is_own, kept, sound

_log = logging.getLogger(__name__)

COMPILERS = ("cc", "gcc", "clang")
# GCC takes half of AVX-512's width by itself: attention of 16 rows took a fifth longer.
FOR_CPU = (
    ("-mcpu=native",)
    if platform.machine() == "aarch64"
    else ("-march=native", "-mprefer-vector-width=512")
)
# No -ffast-math: it lets the compiler choose an order of sums.
OPTIONS = (
    *FOR_CPU,
    *("-O3", "-std=gnu11", "-fopenmp", "-ffp-contract=fast", "-fPIC", "-shared"),
    *("-Wall", "-Wno-psabi"),
)
_SEAL = ".json"
"""Ending of the file with a library's hash."""

INSTALL = "install gcc (`sudo apt install gcc libc6-dev`)"


def load(name: str) -> ctypes.CDLL | None:
    """The functions of NAME.c; None where there is no compiler, or it fails, which is logged once.

    The first call on a machine compiles, which takes seconds; the first one of a process loads.
    """
    return loaded(name)[0]


def unbuilt() -> list[str]:
    """The names that `load` would compile first; none where there is no compiler."""
    compiler = _compiler()
    if compiler is None:
        return []
    folder = cache_folder() / "kernels"
    sources = sorted(Path(__file__).parent.glob("*.c"))
    return [one.stem for one in sources if not sound(folder, _name(compiler, one) + _SEAL)]


def complaint(name: str) -> str:
    """Why `load` gives None, and what to do about it; the empty string if it does not."""
    return loaded(name)[1]


@functools.cache
def loaded(name: str) -> tuple[ctypes.CDLL | None, str]:
    try:
        return built(Path(__file__).with_name(f"{name}.c")), ""
    except Unusable as problem:
        _log.warning("%s", problem)
        return None, str(problem)


class Unusable(Exception):
    """There is no compiler, or it cannot make what can be loaded."""


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def built(source: Path) -> ctypes.CDLL:
    compiler = _compiler()
    if compiler is None:
        raise Unusable(
            f"no C compiler found, so matrices are multiplied in a slower way; {INSTALL}"
        )
    folder = cache_folder() / "kernels"
    try:
        # A library is code that runs as this user: nobody else may have put it there.
        if is_own(folder) and os.access(folder, os.W_OK):
            name = _name(compiler, source)
            kept(folder, name + _SEAL, lambda: {name: compile_source(compiler, source)})
            return _opened(folder / name)
    except OSError as problem:
        _log.warning("cannot keep compiled kernels in %s (%s)", folder, problem.strerror)
    with tempfile.TemporaryDirectory() as once:  # a library that is loaded needs its file no more
        library = Path(once) / "once.so"
        library.write_bytes(compile_source(compiler, source))
        return _opened(library)


def _name(compiler: str, source: Path) -> str:
    return f"{source.stem}-{_digest(compiler, source)}.so"


def compile_source(compiler: str, source: Path) -> bytes:
    _log.info("compiling the kernels for this CPU (once); it may take a minute")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "made.so"
        command = [compiler, *OPTIONS, "-o", str(target), str(source), "-lm"]
        try:
            # For as long as it takes: a second on a PC, tens on a Raspberry Pi, minutes where ARM
            # is emulated. A compiler ends by itself.
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode == 0:
                return target.read_bytes()
        except OSError as problem:
            raise Unusable(
                f"{compiler} cannot compile {source.name} ({problem}); {INSTALL}"
            ) from None
    lines = run.stderr.strip().splitlines()
    errors = (line for line in lines if "error" in line)
    said = next(errors, lines[0] if lines else f"exit code {run.returncode}")
    raise Unusable(f"{compiler} cannot compile {source.name} ({said}); {INSTALL}")


def _opened(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as problem:
        raise Unusable(
            f"a compiled kernel cannot be loaded ({problem}); its file is as the compiler made it: "
            "if its folder does not allow programs, choose another with XDG_CACHE_HOME; else "
            f"{INSTALL}"
        ) from None


def _digest(compiler: str, source: Path) -> str:
    """Of all that the library depends on."""
    program = Path(compiler).resolve()
    state = program.stat()
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.glob("*.h"))):
        digest.update(path.read_bytes() + b"\0")
    for part in (*OPTIONS, str(program), str(state.st_size), str(state.st_mtime_ns), cpu()):
        digest.update(f"\0{part}".encode())
    return digest.hexdigest()[:32]


def cpu() -> str:
    """What the first processor is and can do, as Linux tells it."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text(errors="replace").split("\n\n", 1)[0] if told.exists() else ""
    fields = dict(line.partition(":")[::2] for line in lines.splitlines())
    kept = sorted((key.strip(), value) for key, value in fields.items() if key.strip() in _FACTS)
    return f"{platform.machine()} {kept}"


_FACTS = {"model name", "flags", "Features", "CPU implementer", "CPU part", "CPU variant"}
