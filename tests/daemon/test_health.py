"""How a device is: fake trees of devices that are well, hot, throttled, or say nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from edgespec.daemon import health as module
from edgespec.daemon.device import ROOT
from edgespec.daemon.health import UNKNOWN, SensorReader
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Health

MEMINFO = "MemTotal:        7802624 kB\nMemFree:          310000 kB\nMemAvailable:    6291456 kB\n"
THERMAL, POLICIES = "sys/class/thermal", "sys/devices/system/cpu/cpufreq"


def write(root: Path, files: dict[str, str]) -> Path:
    """Lay out a tree of text files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """A Jetson in a slow power mode, at work and well."""
    return write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            f"{THERMAL}/thermal_zone0/type": "cpu-thermal\n",
            f"{THERMAL}/thermal_zone0/temp": "71500\n",
            f"{THERMAL}/thermal_zone0/trip_point_0_type": "passive\n",
            f"{THERMAL}/thermal_zone0/trip_point_0_temp": "99000\n",
            f"{THERMAL}/thermal_zone0/trip_point_1_type": "critical\n",
            f"{THERMAL}/thermal_zone0/trip_point_1_temp": "104500\n",
            f"{THERMAL}/thermal_zone1/type": "tj-thermal\n",
            f"{THERMAL}/thermal_zone1/temp": "72500\n",
            f"{THERMAL}/thermal_zone2/type": "cv0-thermal\n",
            f"{THERMAL}/thermal_zone2/temp": "-256000\n",
            f"{THERMAL}/thermal_zone3/type": "PMIC-Die\n",
            f"{THERMAL}/thermal_zone3/temp": "100000\n",
            f"{THERMAL}/cooling_device0/type": "cpufreq-cpu0\n",
            f"{THERMAL}/cooling_device0/cur_state": "0\n",
            f"{THERMAL}/cooling_device1/type": "pwm-fan\n",
            f"{THERMAL}/cooling_device1/cur_state": "3\n",
            f"{POLICIES}/policy0/cpuinfo_max_freq": "1984000\n",
            f"{POLICIES}/policy0/scaling_max_freq": "1510400\n",
            f"{POLICIES}/policy4/cpuinfo_max_freq": "1984000\n",
            f"{POLICIES}/policy4/scaling_max_freq": "1510400\n",
        },
    )


def test_a_board_that_is_well(board: Path) -> None:
    said = SensorReader(root=board).look()
    assert (said.temperature, said.limit) == (72.5, 0.0), "90 - 72.5 is nearer than 99 - 71.5"
    assert (said.memory, said.free) == (7802624 * 1024, 6291456 * 1024)
    assert (said.throttled, said.text) == (False, "")
    assert decode(encode(said)) == said


def test_the_sensor_nearest_to_its_limit_is_told(board: Path) -> None:
    write(board, {f"{THERMAL}/thermal_zone1/temp": "60000"})
    said = SensorReader(root=board).look()
    assert (said.temperature, said.limit) == (71.5, 99.0)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (
            {f"{THERMAL}/thermal_zone0/temp": "99500"},
            "cpu-thermal has 100 °C and slows down at 99",
        ),
        ({f"{THERMAL}/cooling_device0/cur_state": "2"}, "cpufreq-cpu0 is held back to cool it"),
        (
            {
                f"{THERMAL}/cooling_device0/type": "gpu-throttle-alert",
                f"{THERMAL}/cooling_device0/cur_state": "1",
            },
            "gpu-throttle-alert is held back to cool it",
        ),
        (
            {f"{POLICIES}/policy4/scaling_max_freq": "1190400"},
            "the CPU clock is limited to 1190 of 1510 MHz",
        ),
    ],
)
def test_a_throttled_board_says_why(board: Path, files: dict[str, str], why: str) -> None:
    monitor = SensorReader(root=board)
    assert not monitor.look().throttled
    write(board, files)
    said = monitor.look()
    assert (said.throttled, said.text) == (True, why)


def test_a_slow_power_mode_is_no_throttling_and_a_faster_one_is_learnt(board: Path) -> None:
    monitor = SensorReader(root=board)
    monitor.look()
    write(board, {f"{POLICIES}/policy0/scaling_max_freq": "1984000"})
    assert not monitor.look().throttled
    write(board, {f"{POLICIES}/policy0/scaling_max_freq": "1510400"})
    assert "1510 of 1984 MHz" in monitor.look().text


def test_several_reasons_are_all_told(board: Path) -> None:
    cool = f"{THERMAL}/cooling_device"
    write(board, {f"{cool}0/cur_state": "1", f"{cool}2/type": "gpu", f"{cool}2/cur_state": "4"})
    text = SensorReader(root=board).look().text
    assert text == "cpufreq-cpu0 is held back to cool it; gpu is held back to cool it"


def test_a_device_that_says_nothing(tmp_path: Path) -> None:
    said = SensorReader(root=tmp_path).look()
    assert (said.temperature, said.limit, said.throttled, said.text) == (0.0, 0.0, False, "")
    assert said.memory == psutil.virtual_memory().total
    assert 0 < said.free <= said.memory


def test_files_of_nonsense_are_nothing(board: Path) -> None:
    for file in board.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff\x00 nonsense")
    said = SensorReader(root=board).look()
    assert (said.temperature, said.limit, said.throttled, said.text) == (0.0, 0.0, False, "")


def test_without_zones_psutil_knows_the_processor_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def sensor(now: float, high: float | None, critical: float | None) -> SimpleNamespace:
        return SimpleNamespace(label="", current=now, high=high, critical=critical)

    reads = {
        "nvme": [sensor(99.0, 80.0, 85.0)],
        "coretemp": [sensor(50.0, 80.0, 100.0), sensor(-273.0, None, None)],
        "k10temp": [sensor(70.0, None, None)],
    }
    monkeypatch.setattr(module, "zones", lambda root: [])
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: reads, raising=False)
    said = SensorReader(root=ROOT).look()
    assert (said.temperature, said.limit) == (70.0, 0.0)
    reads["coretemp"][0].current = 95.0
    said = SensorReader(root=ROOT).look()
    assert (said.temperature, said.limit) == (95.0, 100.0)


def test_it_looks_again_and_again_while_it_is_entered(board: Path) -> None:
    with SensorReader(root=board, every=0.01) as monitor:
        await_until(lambda: monitor.latest() is not None)
        write(board, {f"{THERMAL}/thermal_zone1/temp": "81000"})
        await_until(lambda: getattr(monitor.latest(), "temperature", 0.0) == 81.0)
    await_until(lambda: not alive())  # and ends


def test_a_sensor_that_hangs_holds_nobody_up(board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang = threading.Event()
    monkeypatch.setattr(module, "zones", lambda root: hang.wait(600) or [])
    with SensorReader(root=board, every=0.01) as monitor:
        assert monitor.latest() is None
    assert alive(), "nobody waited for it"
    hang.set()
    await_until(lambda: not alive())


def test_a_device_that_cannot_be_looked_at_is_told_once(
    board: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[Path] = []

    def broken(root: Path) -> list[object]:
        looks.append(root)
        raise RuntimeError("a bug")

    monkeypatch.setattr(module, "zones", broken)
    with SensorReader(root=board, every=0.01) as monitor:
        await_until(lambda: monitor.latest() is None and len(looks) > 5)
    assert [record.getMessage() for record in caplog.records] == [
        "how this device is cannot be told; it is tried again"
    ]


def alive() -> bool:
    """Whether a monitor's thread runs."""
    return any(thread.name == "edgespec-health" for thread in threading.enumerate())


def await_until(condition: Callable[[], bool]) -> None:
    """Wait for it; fails the test if it does not come."""
    limit = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.005)


def test_a_look_that_fails_is_tried_again_and_old_values_are_none(board: Path) -> None:
    monitor = SensorReader(root=board, every=0.02)
    looks: list[str] = []
    look = monitor.look

    def failing() -> Health:
        looks.append("look")
        if len(looks) in range(2, 40):
            raise OSError(24, "Too many open files")
        return look()

    monitor.look = failing  # type: ignore[method-assign]
    with monitor:
        await_until(lambda: getattr(monitor.latest(), "temperature", 0.0) == 72.5)
        await_until(lambda: monitor.latest() == UNKNOWN)
        await_until(lambda: getattr(monitor.latest(), "temperature", 0.0) == 72.5)
    assert len(looks) >= 40
