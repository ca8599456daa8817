"""Files: written whole, and still so after a loss of power; what can be made again; locks.

Whatever is written to a disk may be torn there. So a file gets its name once its content is on the
disk, and what can be made again is compared with its hash before it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_CHUNK = 1 << 20


def cache_folder() -> Path:
    """The user's folder for what can be made again."""
    return _of_user("XDG_CACHE_HOME", ".cache")


def state_folder() -> Path:
    """The user's folder for what cannot."""
    return _of_user("XDG_STATE_HOME", ".local/state")


def _of_user(variable: str, usual: str) -> Path:
    root = os.environ.get(variable, "")
    return (Path(root) if os.path.isabs(root) else Path.home() / usual) / "edgespec"


def part_of(path: Path) -> Path:
    """Where a file is written until it is whole; a process that was killed may leave it."""
    return path.with_name(path.name + ".part")


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Write a file beside its place; at the end it is on the disk and takes its name.

    An exception leaves nothing behind. `mode`: its permissions, which it has from the start; None:
    the usual ones. No two processes may do so at a time. Raises OSError as writing does.
    """
    part = part_of(path)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o666 if mode is None else mode)

    try:
        part.unlink(missing_ok=True)
        with open(part, "xb", opener=opener) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
        settle(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: bytes | str, mode: int | None = None) -> None:
    """See `replacing`; a text is written as UTF-8."""
    with replacing(path, mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def settle(part: Path, path: Path) -> None:
    """Give what was written its name, so that both survive a loss of power. Raises OSError."""
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file's content, or the names in a folder, on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_hash(file: Path, progress: Callable[[int, int], None] | None = None) -> str:
    """SHA-256 of a file, 64 hex digits; `progress` hears of bytes. Raises OSError."""
    digest = hashlib.sha256()
    done, size = 0, file.stat().st_size
    with open(file, "rb", buffering=0) as stream:
        while piece := stream.read(_CHUNK):
            digest.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done, size)
    return digest.hexdigest()


# --- what can be made again -----------------------------------------------------------------------


def is_own(folder: Path) -> bool:
    """Make a folder for this user alone; or whether nobody else can have put files into the one
    that is there. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS_WRITE


def sound(folder: Path, seal: str) -> set[str]:
    """The files that `kept` made, if all are as they were written; else none. Raises OSError."""
    try:
        hashes: dict[str, str] = json.loads((folder / seal).read_bytes())
        if all(file_hash(folder / name) == told for name, told in hashes.items()):
            return set(hashes)
    except (FileNotFoundError, ValueError, RecursionError, AttributeError):
        pass  # never made, or torn itself: half of a JSON object is none
    return set()


def kept(folder: Path, seal: str, make: Callable[[], Mapping[str, bytes]]) -> set[str]:
    """The names of files in a folder (see `is_own`), which are made if they are not there or torn.

    `seal`: the file with their hashes, which is written last. One process makes them, and those
    beside it wait. Raises OSError if the disk refuses, and what `make` raises.
    """
    found = sound(folder, seal)
    if found:
        return found
    with locked(folder, lambda: None):
        found = sound(folder, seal)
        if not found:
            files = make()
            for name, content in files.items():
                write_whole(folder / name, content)
            hashes = {name: hashlib.sha256(files[name]).hexdigest() for name in files}
            write_whole(folder / seal, json.dumps(hashes))
            found = set(files)
    return found


# --- locks ----------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, busy: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file or folder that exists; it is gone when the process ends.

    If another process has it, `busy` is called, which may raise; else it is waited for. Raises
    OSError if the path cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # the lock goes with it
