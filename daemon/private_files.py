"""Private files, such as keys: readable by their owner only, written whole or not at all."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from edgespec.errors import AccessRefused, ConfigError
from edgespec.files import OTHERS_WRITE, locked, part_of, replacing
from edgespec.net.slowness import slowness

MOST_BYTES = 4 << 20
"""A file that is longer is not read: ours are far shorter."""

LOCK_WAIT_S = 1.0
"""Less than the silence after which a node counts as lost, as a coordinator may be waiting; longer
where all is slower (slowness), as that silence is."""

_RUN_AS = "run this as the one who made it, or with sudo"
_OTHERS_ANYTHING = 0o077


def make_folder(folder: Path) -> None:
    """Make a folder that only its owner can read, or use one that others cannot write to.

    Raises AccessRefused for one that others can write to, and ConfigError if it cannot be made.
    """
    try:
        if not folder.is_dir():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        elif not any(folder.iterdir()):
            folder.chmod(0o700)
        require_own(folder)
    except OSError as problem:
        raise ConfigError(f"cannot use the folder {folder}: {_reason(problem)}") from None


def require_own(folder: Path) -> None:
    """Raise AccessRefused for a folder in which others could replace files, or we cannot look."""
    try:
        mode = folder.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as problem:
        raise AccessRefused(f"cannot look into {folder}: {_reason(problem)}; {_RUN_AS}") from None
    if mode & OTHERS_WRITE:
        raise AccessRefused(
            f"others can write to the folder {folder}, and so put keys of their own there; "
            f"if that is not wanted: chmod go-w {folder}"
        )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep all other processes (and threads) from changing the files of a folder.

    Raises ConfigError if another process holds it for longer than `LOCK_WAIT_S`, times slowness.
    """
    limit = time.monotonic() + LOCK_WAIT_S * slowness()
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder, _busy))
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise ConfigError(
                        f"another edgespec is changing {folder}, and does not end; try again, or "
                        "look what it waits for"
                    ) from None
                time.sleep(0.005)
            except OSError as problem:
                raise ConfigError(f"cannot lock the folder {folder}: {_reason(problem)}") from None
        yield


def write_private(path: Path, text: str) -> None:
    """Replace a file whole, or not at all; others cannot read it at any time.

    The caller holds the folder (`held`). Written by root, it belongs to the folder's owner: a
    service that runs as a user of its own goes on reading it. Raises ConfigError if that fails.
    """
    try:
        with replacing(path, 0o600) as file:
            if os.geteuid() == 0:
                owner = path.parent.stat()
                os.chown(file.fileno(), owner.st_uid, owner.st_gid)
            file.write(text.encode())
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {_reason(problem)}") from None


def remove_private(path: Path) -> None:
    """Remove a file, and the temporary file of a killed process, if they exist."""
    try:
        for name in (path, part_of(path)):
            name.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigError(f"cannot remove {path}: {_reason(problem)}") from None


def read_private(path: Path, *, secret: bool) -> tuple[bytes, tuple[int, ...]] | None:
    """Content and `file_state` of a file; None if it is not there.

    Raises AccessRefused if others can write to it or, where it is `secret`, read it, or if we
    cannot; ConfigError if it is no plain file. What is far longer than ours is cut, and damaged.
    """
    try:
        # A link or a pipe in the place of the file is none of ours; a pipe would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            state = os.fstat(descriptor)
            _check_mode(path, state.st_mode, secret)
            return file.read(MOST_BYTES), _state_of(state)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise AccessRefused(f"{path} belongs to another user; {_RUN_AS}") from None
    except OSError as problem:
        raise ConfigError(f"cannot read {path}: {_reason(problem)}") from None


def file_state(path: Path) -> tuple[int, ...]:
    """Differs once a file is written, replaced or given other permissions; () if there is none."""
    try:
        return _state_of(os.stat(path))
    except OSError:
        return ()


def _state_of(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


def _check_mode(path: Path, mode: int, secret: bool) -> None:
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is no plain file; put a copy of it back, or remove it")
    if mode & (_OTHERS_ANYTHING if secret else OTHERS_WRITE):
        what = "read or change the secret key in" if secret else "change"
        raise AccessRefused(
            f"others can {what} {path} (its mode is {stat.S_IMODE(mode):04o}); if nobody has done "
            f"so: chmod 600 {path}"
        )


def _busy() -> None:
    raise BlockingIOError  # another process holds the folder


def _reason(problem: OSError) -> str:
    return problem.strerror or str(problem)
