"""How fast this device reads memory, moves cache rows and reads its disk."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.daemon.layer_times import settled
from edgespec.daemon.timing import Clock, Sample, timed
from edgespec.errors import ConfigError
from edgespec.model.kv_cache import RowForm, TwoRegionCache

CACHE_ROWS = 2048
"""Rows of the cache of which every second one is gathered."""
MIB = 2**20
LEAST_BUFFER, MOST_BUFFER = 256 * MIB, 1024 * MIB
_LEAST_FILE, _MOST_FILE = 16 * MIB, 256 * MIB
_CHUNK = 4 * MIB
_FREE_SHARE = 0.1  # of the disk's free space that a measurement may take for a moment


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes a second, of how many bytes at a time, and the times they come from."""

    per_second: float
    bytes: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class DiskRate:
    """As Rate; `cached`: the share of the file that was in memory before it was read."""

    rate: Rate
    cached: float
    folder: str


def memory_rate(device: torch.device, *, room: int, beyond_cache: int, seconds: float) -> Rate:
    """Reading a buffer larger than the caches, for its sum."""
    size = int(_buffer_size(room, beyond_cache))
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)

    def work() -> None:
        buffer.sum()
        settled(device)

    return _rate(size, work, seconds)


def gather_rate(
    device: torch.device,
    dtype: torch.dtype,
    kv_heads: int,
    head_dim: int,
    *,
    room: int,
    beyond_cache: int,
    seconds: float,
) -> Rate:
    """Keeping every second row of a cache; each byte that moves is read and written."""
    row = 2 * kv_heads * head_dim * dtype.itemsize
    layers = max(1, math.ceil(_buffer_size(room, beyond_cache) / (row * CACHE_ROWS)))
    cache = TwoRegionCache(
        first_layer=0,
        forms=[RowForm(kv_heads, head_dim)] * layers,
        reserve=CACHE_ROWS,
        dtype=dtype,
        device=device,
    )
    cache.advance(CACHE_ROWS)
    order = torch.arange(0, CACHE_ROWS, 2).numpy()

    def work() -> None:
        cache.gather(0, order)
        settled(device)
        cache.advance(CACHE_ROWS - len(order))

    moved = 2 * (len(order) - 1) * row * layers  # the first row stays where it is
    return _rate(moved, work, seconds)


def _buffer_size(room: int, beyond_cache: int) -> float:
    return min(max(beyond_cache, LEAST_BUFFER), MOST_BUFFER, room / 4)


def _rate(size: int, work: Callable[[], object], seconds: float) -> Rate:
    sample = timed({0: work}, seconds)[0]
    return Rate(size / sample.median, size, sample)


# --- disk ---------------------------------------------------------------------------------------


def disk_rate(folder: Path, clock: Clock = time.perf_counter, most: int = _MOST_FILE) -> DiskRate:
    """Reading a file of random bytes that was written there a moment ago, after asking the kernel
    to forget it.

    Raises ConfigError if there is no room for a file that says anything, or it cannot be written.
    """
    where = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        size = int(min(most, shutil.disk_usage(where).free * _FREE_SHARE)) // _CHUNK * _CHUNK
        if size < _LEAST_FILE:
            raise ConfigError(
                f"{where} has too little free space to measure its disk; free "
                f"{_LEAST_FILE / _FREE_SHARE / MIB:.0f} MiB"
            )
        with tempfile.NamedTemporaryFile(dir=where, prefix=".edgespec-disk-") as file:
            descriptor = file.fileno()
            for _ in range(size // _CHUNK):
                os.write(descriptor, os.urandom(_CHUNK))
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            cached = resident(descriptor, size)
            seconds = _read_time(descriptor, clock)
    except OSError as problem:
        raise ConfigError(f"cannot measure the disk of {where}: {problem.strerror}") from None
    return DiskRate(Rate(size / seconds, size, Sample((seconds,))), cached, str(where))


def _read_time(descriptor: int, clock: Clock) -> float:
    chunk = bytearray(_CHUNK)
    os.lseek(descriptor, 0, os.SEEK_SET)
    start = clock()
    while os.readv(descriptor, [chunk]):
        pass
    return clock() - start


def resident(descriptor: int, size: int) -> float:
    """The share of a file's pages that the kernel holds in memory (mincore); 1 if unknown."""
    pages = -(-size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    with mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        start = ctypes.c_ubyte.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(start))
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), states)
        del start  # the map cannot be closed while something points into it
    return 1.0 if failed else sum(state & 1 for state in states) / pages
