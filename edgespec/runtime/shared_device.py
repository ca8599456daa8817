"""Shared device: the time of one emulated device, which two processes of this machine share."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

COORDINATOR, STAGE = 0, 1
"""The two places."""

NONE = -1

_MUTEX = 0
"""The byte whose lock guards the figures. Those behind it are locked as long as the process of
that place lives."""


class _Figures(NamedTuple):
    """`free_at`: when the last part that ran on the device ended, `holder`: the place that has the
    use of it now; what either place waits for: its lane, and when that was asked for."""

    free_at: float = 0.0
    holder: int = NONE
    own_lane: int = NONE
    own_asked: float = 0.0
    stage_lane: int = NONE
    stage_asked: float = 0.0

    def waits(self, place: int) -> tuple[float, int, int] | None:
        """When what that place waits for could start, its lane and the place: the least is next."""
        lane = self.own_lane if place == COORDINATOR else self.stage_lane
        return None if lane == NONE else (max(self.asked_at(place), self.free_at), lane, place)

    def asked_at(self, place: int) -> float:
        """When what that place waits for was asked for."""
        return self.own_asked if place == COORDINATOR else self.stage_asked

    def without(self, place: int) -> _Figures:
        """That place has, and waits for, nothing."""
        left = self._replace(holder=NONE) if self.holder == place else self
        return left.waiting(place, NONE, 0.0)

    def waiting(self, place: int, lane: int, asked_at: float) -> _Figures:
        """That place waits for something."""
        if place == COORDINATOR:
            return self._replace(own_lane=lane, own_asked=asked_at)
        return self._replace(stage_lane=lane, stage_asked=asked_at)


_FORM = struct.Struct("=diidid")


class SharedDevice:
    """One of two processes that have the use of a device in turns (see emulated.DeviceTime).

    Their figures lie in a file without a name, which both have open and mapped. A process that
    died, in whatever state, is known by the kernel's having given back its lock: it then has and
    waits for nothing. Of one process there may be one object a file, used by one thread.
    """

    look_again_s = 0.001

    def __init__(self, descriptor: int, place: int) -> None:
        """Take a place, whose last process must have died; `descriptor`: of what `new_file` gave.

        Raises OSError if the file cannot be mapped.
        """
        self.descriptor = descriptor
        self._place, self._other = place, 1 - place
        self._figures = mmap.mmap(descriptor, _FORM.size)
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, 1 + place)
        with self._locked():
            self._write(self._read().without(place))

    def take(self, lane: int, asked_at: float) -> float | None:
        """See emulated.DeviceTime."""
        with self._locked():
            now = self._read().waiting(self._place, lane, asked_at)
            if self._makes_wait(now) and not self._other_lives():
                ended = time.monotonic() if now.holder == self._other else 0.0
                now = now.without(self._other)._replace(free_at=max(now.free_at, ended))
            waits = self._makes_wait(now)
            if not waits:
                now = now.without(self._place)._replace(holder=self._place)
            self._write(now)
            return None if waits else now.free_at

    def outranked(self, lane: int) -> float | None:
        """See emulated.DeviceTime."""
        with self._locked():
            now = self._read()
        theirs = now.waits(self._other)
        return None if theirs is None or theirs[1] >= lane else now.asked_at(self._other)

    def give(self, at: float) -> None:
        """See emulated.DeviceTime."""
        with self._locked():
            now = self._read()
            self._write(now.without(self._place)._replace(free_at=max(now.free_at, at)))

    def _makes_wait(self, now: _Figures) -> bool:
        """Whether the other process has the device, or comes first."""
        mine, theirs = now.waits(self._place), now.waits(self._other)
        assert mine is not None
        return now.holder == self._other or (theirs is not None and theirs < mine)

    def _other_lives(self) -> bool:
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1 + self._other)
        except OSError:
            return True
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, 1 + self._other)
        return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1, _MUTEX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, _MUTEX)

    def _read(self) -> _Figures:
        return _Figures(*_FORM.unpack_from(self._figures))

    def _write(self, now: _Figures) -> None:
        _FORM.pack_into(self._figures, 0, *now)


def new_file() -> int:
    """The descriptor of a file for a device that is free. Raises OSError."""
    with tempfile.TemporaryFile() as file:
        file.write(_FORM.pack(*_Figures()))
        file.flush()
        return os.dup(file.fileno())
