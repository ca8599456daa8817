"""Facts about this device: board, power mode, temperatures, clocks, network, caches.

Everything is read below a root folder, "/" except in tests. Facts that the system does not report
are left out, never guessed.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")
HOT = 85.0
"""Degrees Celsius from which a zone without trip points counts as hot; boards throttle above."""
NEAR_TRIP = 5.0
"""Degrees below its own trip point at which a zone counts as hot."""

_MODEL_FILES = ("proc/device-tree/model", "sys/firmware/devicetree/base/model")
_NVPMODEL_FILES = ("usr/sbin/nvpmodel", "usr/bin/nvpmodel")
TOOL_SECONDS = 5.0
_VCGENCMD_FILES = ("usr/bin/vcgencmd", "opt/vc/bin/vcgencmd")
_THROTTLED_FILES = "sys/devices/platform/soc*/*firmware/get_throttled"
_THROTTLED = {
    0x1: "the supply voltage is too low (the firmware says so), which lowers the clock: a stronger "
    "power supply, and a shorter cable",
    0x2: "the firmware limits the CPU's clock",
    0x4: "the firmware has slowed the CPU down, for heat or low voltage",
    0x8: "the soft temperature limit is reached: cool the board",
}
"""Bits of a Raspberry Pi's `get_throttled` that say what holds now; higher ones what was."""
_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x4e", "0x004"): "NVIDIA Carmel",
}
"""(implementer, part) in /proc/cpuinfo of an Arm core → its name."""


@dataclass(frozen=True, slots=True)
class Zone:
    """A temperature sensor. `limit`: the trip point at which the board slows down, if known."""

    name: str
    celsius: float
    limit: float | None

    @property
    def is_hot(self) -> bool:
        """Whether throttling is likely. The PMIC's zone of old Jetsons always says 100."""
        if self.name.startswith("PMIC"):
            return False
        return self.celsius >= (HOT if self.limit is None else self.limit - NEAR_TRIP)


@dataclass(frozen=True, slots=True)
class PowerMode:
    """A Jetson's nvpmodel mode, and the fastest one that its configuration offers ("" unknown)."""

    name: str
    fastest: str
    fastest_id: str

    def __str__(self) -> str:
        return self.name + (f" (fastest: {self.fastest})" if self.fastest else "")


def is_jetson(root: Path = ROOT) -> bool:
    """Whether this is a Jetson, whose GPU has no memory of its own."""
    model = _model(root).lower()
    return (root / "etc/nv_tegra_release").exists() or "jetson" in model or "tegra" in model


def board_facts(root: Path = ROOT) -> dict[str, str]:
    """Facts about this device by name, in the order in which they are shown."""
    facts = {
        "board": _model(root),
        "L4T": system_text(root / "etc/nv_tegra_release").partition("\n")[0].lstrip("# "),
        "power mode": str(power_mode(root) or ""),
        "CPU": _cpu(root),
        "CPU clock": _cpu_clock(root),
        "GPU clock": _gpu_clock(root),
        "RAM": _ram(root),
        "temperatures": ", ".join(f"{zone.name} {zone.celsius:.0f} °C" for zone in zones(root)),
    }
    return {name: fact for name, fact in facts.items() if fact}


def gpu_facts() -> dict[str, str]:
    """Name, compute capability and memory of the GPU that torch would use; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    of = torch.cuda.get_device_properties(0)
    return {
        "GPU": of.name,
        "compute capability": f"{of.major}.{of.minor}",
        "GPU memory": f"{of.total_memory / 2**30:.1f} GiB",
    }


def warnings(root: Path = ROOT) -> list[str]:
    """Why this device may be slower than it could be, and what to do."""
    found = [
        f"{zone.name} is at {zone.celsius:.0f} °C: the device probably slows itself down; cool it "
        "(fan, heat sink) and measure again"
        for zone in zones(root)
        if zone.is_hot
    ]
    found += firmware_limits(root)
    found += _low_clocks(root)
    mode = power_mode(root)
    if mode is not None and mode.fastest and mode.name != mode.fastest:
        found.append(
            f"the power mode is {mode.name}, not {mode.fastest}: `sudo nvpmodel -m "
            f"{mode.fastest_id}`, then `sudo jetson_clocks`, makes the board faster"
        )
    return found


# --- temperatures and power ---------------------------------------------------------------------


def zones(root: Path = ROOT) -> list[Zone]:
    """The temperature sensors that can be read now, by name."""
    found = []
    for folder in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        milli = system_number(folder / "temp")
        name = system_text(folder / "type")
        # Zones of parts without power say -256 °C, or nothing.
        if name and milli is not None and -40_000 < milli < 150_000:
            found.append(Zone(name, milli / 1000, _trip(folder)))
    return sorted(found, key=lambda zone: zone.name)


def _trip(zone: Path) -> float | None:
    """The lowest temperature at which this zone makes its device slower; None if it has none. One
    that only ends the device (critical) is no such limit: a Raspberry Pi has that at 110 °C, and
    its firmware slows it down from 80."""
    limits = [
        system_number(file.with_name(file.name.replace("_type", "_temp")))
        for file in zone.glob("trip_point_*_type")
        if system_text(file) in ("passive", "hot")
    ]
    plausible = [milli / 1000 for milli in limits if milli and 40_000 < milli < 130_000]
    return min(plausible, default=None)


def firmware_limits(root: Path = ROOT) -> list[str]:
    """Why a Raspberry Pi's firmware holds it back now; empty if it does not, or is none."""
    flags = _throttled_flags(root)
    return [text for bit, text in _THROTTLED.items() if flags & bit]


def _throttled_flags(root: Path) -> int:
    """`get_throttled` of the firmware: from the kernel's file, or its program; 0 if unknown."""
    texts = [system_text(file) for file in sorted(root.glob(_THROTTLED_FILES))]
    program = next((root / file for file in _VCGENCMD_FILES if (root / file).is_file()), None)
    if not any(texts) and program is not None:
        texts = [_said_by(program, "get_throttled").partition("=")[2]]
    try:
        return int(next(filter(None, texts), "0"), 16)
    except ValueError:
        return 0


def _low_clocks(root: Path) -> Iterator[str]:
    """That the CPU's clock may not rise to what the processor can; one line for all cores."""
    for policy in sorted((root / "sys/devices/system/cpu/cpufreq").glob("policy*")):
        now = system_number(policy / "scaling_max_freq") or 0
        most = system_number(policy / "cpuinfo_max_freq") or 0
        if 0 < now < most:
            yield (
                f"the CPU's clock may rise to {now / 1e3:.0f} of {most / 1e3:.0f} MHz only, by the "
                "power mode or a setting"
            )
            return
        if system_text(policy / "scaling_governor") == "powersave" and most:
            low = system_number(policy / "scaling_min_freq") or 0
            driver = system_text(policy / "scaling_driver")
            if not driver.startswith("intel_pstate"):  # whose powersave follows the load
                yield (
                    f"the CPU's governor is powersave, which keeps its clock at {low / 1e3:.0f} of "
                    f"{most / 1e3:.0f} MHz; write performance or schedutil into "
                    "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"
                )
                return


def power_mode(root: Path = ROOT) -> PowerMode | None:
    """Output of `nvpmodel -q`; None if there is no nvpmodel, or it does not answer."""
    program = next((root / file for file in _NVPMODEL_FILES if (root / file).is_file()), None)
    if program is None:
        return None
    found = re.search(r"NV Power Mode:\s*(\S+)", _said_by(program, "-q"))
    if found is None:
        return None
    modes = re.findall(
        r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+)", system_text(root / "etc/nvpmodel.conf")
    )
    number, name = max(modes, key=lambda mode: _mode_rank(mode[1]), default=("", ""))
    return PowerMode(found[1], name, number)


def _said_by(program: Path, *arguments: str) -> str:
    """What a board's own tool prints; "" if it does not answer."""
    try:
        done = subprocess.run(
            [str(program), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _mode_rank(name: str) -> tuple[bool, bool, float]:
    """Order of modes: MAXN has no limit of power (MAXN_SUPER higher clocks), others name theirs."""
    watts = re.search(r"(\d+)W", name)
    return name.startswith("MAXN"), "SUPER" in name, float(watts[1]) if watts else 0.0


# --- processor and memory -----------------------------------------------------------------------


def last_level_cache(root: Path = ROOT) -> int:
    """Bytes of the largest cache of the first core; 0 if unknown."""
    sizes = [0]
    for file in (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KMG]?)", system_text(file))
        if found:
            sizes.append(int(found[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[found[2]])
    return max(sizes)


def _model(root: Path) -> str:
    return next((text for file in _MODEL_FILES if (text := system_text(root / file))), "")


def _cpu(root: Path) -> str:
    entries = re.findall(
        r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", system_text(root / "proc/cpuinfo"), re.MULTILINE
    )
    cores = sum(name == "processor" for name, _ in entries)
    first = dict(reversed(entries))
    part = (first.get("CPU implementer", ""), first.get("CPU part", ""))
    name = first.get("model name") or _CORES.get(part) or " ".join(filter(None, part))
    return f"{cores} × {name}" if cores and name else name


def _cpu_clock(root: Path) -> str:
    folders = list((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    now = [khz for folder in folders if (khz := system_number(folder / "scaling_cur_freq"))]
    most = [khz for folder in folders if (khz := system_number(folder / "cpuinfo_max_freq"))]
    return _clock(max(now, default=0) * 1e3, max(most, default=0) * 1e3)


def _gpu_clock(root: Path) -> str:
    """The GPU's clock of a Jetson, where it is one of the devices whose clock is scaled."""
    for folder in sorted((root / "sys/class/devfreq").glob("*")):
        if re.search(r"gpu|ga10b|gv11b|gp10b|gm20b", folder.name):
            now, most = (system_number(folder / file) for file in ("cur_freq", "max_freq"))
            return _clock(now or 0, most or 0)
    return ""


def _clock(now: float, most: float) -> str:
    clocks = {"now": now, "at most": most}
    return ", ".join(f"{clock / 1e6:.0f} MHz {name}" for name, clock in clocks.items() if clock)


def _ram(root: Path) -> str:
    total = meminfo("MemTotal", root)
    return f"{total / 2**30:.1f} GiB" if total else ""


# --- network ------------------------------------------------------------------------------------


def interface_speed(name: str = "", root: Path = ROOT) -> tuple[str, float] | None:
    """(interface, bits a second) of `name`, or of the one that leads to the default route.

    None if there is none, or its driver does not report it (Wi-Fi, virtual interfaces).
    """
    routes = map(str.split, system_text(root / "proc/net/route").splitlines()[1:])
    name = name or next((route[0] for route in routes if route[1:2] == ["00000000"]), "")
    megabits = system_number(root / "sys/class/net" / name / "speed") if name else None
    return (name, megabits * 1e6) if megabits and megabits > 0 else None


def interface_of(own: str) -> str:
    """The network interface that has this address; "" if none has, or none can be read."""
    try:
        found = psutil.net_if_addrs()
    except OSError:
        return ""
    for name, addresses in found.items():
        if any(address.address == own for address in addresses):
            return str(name)
    return ""


# --- files --------------------------------------------------------------------------------------


def system_text(file: Path) -> str:
    """Content of a system file; "" if it is missing or cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip("\0 \n\t")
    except OSError:
        return ""


def meminfo(entry: str, root: Path) -> int:
    """Bytes of an entry in /proc/meminfo; 0 if it is not there."""
    found = re.search(rf"^{entry}:\s*(\d+) kB", system_text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def system_number(file: Path) -> int | None:
    """The whole number in a system file; None if there is none."""
    try:
        return int(system_text(file))
    except ValueError:
        return None
