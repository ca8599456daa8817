"""Health of this device: temperature, memory, throttling; read by a thread.

A sensor may be slow, or hang: that must not delay the heartbeats of a stage's loop.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from edgespec.daemon.device import (
    HOT,
    NEAR_TRIP,
    ROOT,
    Zone,
    firmware_limits,
    meminfo,
    system_number,
    system_text,
    zones,
)
from edgespec.daemon.memory import available_memory
from edgespec.ring.health import HEALTH_S
from edgespec.wire.messages import Health

log = logging.getLogger(__name__)

_PROCESSORS = re.compile(r"cpu|gpu|processor|devfreq", re.IGNORECASE)
"""Kinds of cooling device that cool by computing less; others are fans."""

_CHIPS = re.compile(r"cpu|gpu|core|k10temp|zenpower|soc|thermal|acpitz", re.IGNORECASE)
"""Chips of psutil that report the processor's temperature; others are disks and the like."""

STALE_LOOKS = 3
"""Readings that may be missed before the last one is no longer reported."""

SELDOM_S = 10.0
"""Seconds between two readings of which nobody wants to know."""

UNKNOWN = Health(0.0, 0.0, 0, 0, 0.0, False, "")


class SensorReader:
    """Reads the sensors while it is entered: as often as somebody wants to know, if that is not
    more often than every HEALTH_S seconds, and every SELDOM_S.

    `device_type`: where the model is, "cpu" or "cuda". Everything is read below `root`.
    """

    def __init__(
        self, device_type: str = "cpu", root: Path = ROOT, every: float = HEALTH_S
    ) -> None:
        self._device_type = device_type
        self._root = root
        self._every = every
        self._clocks: dict[str, int] = {}  # the highest limit of each since the start
        self._latest: Health | None = None
        self._asked_at: float | None = None  # since the last reading
        self._asked, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="edgespec-health", daemon=True)

    def __enter__(self) -> SensorReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._asked.set()
        self._thread.join(self._every)  # it may hang in a sensor

    def latest(self) -> Health | None:
        """The last reading, from which on the next one is wanted; None before the first one.
        UNKNOWN if that one does not come."""
        now = time.monotonic()
        if (asked_at := self._asked_at) is None:  # the other thread may set it at any time
            asked_at = self._asked_at = now
        self._asked.set()
        is_late = self._latest is not None and now - asked_at > STALE_LOOKS * self._every
        return UNKNOWN if is_late else self._latest

    def look(self) -> Health:
        """Read now; of the sensors the one nearest to its limit. Unknown figures are 0."""
        found = _zones(self._root)
        zone = min(found, key=_room, default=None)
        total, free = _memory(self._device_type, self._root)
        why = "; ".join(self._throttling(found))
        return Health(
            temperature=zone.celsius if zone else 0.0,
            limit=(zone.limit or 0.0) if zone else 0.0,
            memory=total,
            free=free,
            busy=0.0,
            throttled=bool(why),
            text=why,
        )

    def _run(self) -> None:
        fails = False
        while True:
            next_at = time.monotonic() + self._every
            try:
                self._latest, self._asked_at = self.look(), None
                fails = False
            except Exception:  # no descriptor left, or an unknown kind of device
                if not fails:
                    log.exception("how this device is cannot be told; it is tried again")
                fails = True
            self._asked.wait(SELDOM_S)
            self._asked.clear()
            if self._end.wait(max(0.0, next_at - time.monotonic())):
                return

    def _throttling(self, found: list[Zone]) -> Iterator[str]:
        """Why the device computes slower than it was set up to, in words."""
        for zone in found:
            if zone.limit is not None and zone.celsius >= zone.limit:
                yield f"{zone.name} has {zone.celsius:.0f} °C and slows down at {zone.limit:.0f}"
        yield from firmware_limits(self._root)
        for name in _cooling(self._root):
            yield f"{name} is held back to cool it"
        for clock in sorted((self._root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
            # A power mode lowers the limit too, but permanently: `edgespec doctor` reports that.
            now = system_number(clock / "scaling_max_freq") or 0
            most = self._clocks[clock.name] = max(now, self._clocks.get(clock.name, 0))
            if 0 < now < most:
                yield f"the CPU clock is limited to {now / 1e3:.0f} of {most / 1e3:.0f} MHz"
                return  # all cores together are one reason


def _zones(root: Path) -> list[Zone]:
    found = [zone for zone in zones(root) if not zone.name.startswith("PMIC")]
    return found or (_sensors() if root == ROOT else [])


def _sensors() -> list[Zone]:
    """The processor's temperatures by psutil, for systems without thermal zones."""
    reads: dict[str, list[Any]] = getattr(psutil, "sensors_temperatures", dict)()
    return [
        Zone(chip, one.current, one.critical or one.high or None)
        for chip, sensors in reads.items()
        if _CHIPS.search(chip)
        for one in sensors
        if -40.0 < one.current < 150.0
    ]


def _room(zone: Zone) -> float:
    """°C below the temperature at which its part slows down."""
    return (HOT + NEAR_TRIP if zone.limit is None else zone.limit) - zone.celsius


def _cooling(root: Path) -> Iterator[str]:
    """The active cooling devices that slow a processor down."""
    kinds = {
        system_text(folder / "type")
        for folder in (root / "sys/class/thermal").glob("cooling_device*")
        if (system_number(folder / "cur_state") or 0) > 0
    }
    yield from sorted(kind for kind in kinds if _PROCESSORS.search(kind))


def _memory(device_type: str, root: Path) -> tuple[int, int]:
    """Bytes that models have here, and those that are free."""
    free = available_memory(device_type, root)
    if "GPU" in free.source:
        import torch

        total = torch.cuda.mem_get_info()[1]
    else:
        total = meminfo("MemTotal", root) or int(psutil.virtual_memory().total)
    return total, min(free.bytes, total)
