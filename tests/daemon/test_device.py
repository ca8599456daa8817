"""What a device says of itself: fake trees of a Jetson, of a cold one, of one that says nothing."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from edgespec.daemon import device, doctor
from edgespec.daemon.device import (
    board_facts,
    interface_speed,
    is_jetson,
    last_level_cache,
    power_mode,
    warnings,
    zones,
)
from edgespec.daemon.memory import available_memory, yet_to_take
from edgespec.kernels import compiled

MODES = """
< POWER_MODEL ID=0 NAME=15W >
CPU_ONLINE CORE_0 1
< POWER_MODEL ID=1 NAME=25W >
< POWER_MODEL ID=2 NAME=MAXN_SUPER >
< POWER_MODEL ID=3 NAME=7W >
"""
MEMINFO = "MemTotal:        7802624 kB\nMemFree:          310000 kB\nMemAvailable:    6291456 kB\n"
CPUINFO = "".join(
    f"processor\t: {core}\nBogoMIPS\t: 62.50\nFeatures\t: fp\nCPU implementer\t: 0x41\n"
    "CPU part\t: 0xd42\npower management:\n\n"
    for core in range(6)
)


def write(root: Path, files: dict[str, str]) -> Path:
    """Lay out a tree of text files."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def nvpmodel(root: Path, script: str) -> None:
    """A program of that name."""
    write(root, {"usr/sbin/nvpmodel": f"#!/bin/sh\n{script}\n"})
    (root / "usr/sbin/nvpmodel").chmod(0o755)


@pytest.fixture
def jetson(tmp_path: Path) -> Path:
    """An Orin Nano in 15 W mode whose GPU is close to its limit."""
    thermal = "sys/class/thermal/thermal_zone"
    nvpmodel(tmp_path, "echo 'NVPM WARN: fan mode is not set!'; echo 'NV Power Mode: 15W'; echo 0")
    return write(
        tmp_path,
        {
            "proc/device-tree/model": "NVIDIA Jetson Orin Nano Developer Kit\0",
            "proc/cpuinfo": CPUINFO,
            "proc/meminfo": MEMINFO,
            "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3\nsecond line\n",
            "etc/nvpmodel.conf": MODES,
            f"{thermal}0/type": "cpu-thermal\n",
            f"{thermal}0/temp": "51500\n",
            f"{thermal}0/trip_point_0_type": "passive",
            f"{thermal}0/trip_point_0_temp": "99000",
            f"{thermal}1/type": "gpu-thermal\n",
            f"{thermal}1/temp": "95000\n",
            f"{thermal}1/trip_point_0_type": "active",
            f"{thermal}1/trip_point_0_temp": "50000",
            f"{thermal}1/trip_point_1_type": "critical",
            f"{thermal}1/trip_point_1_temp": "104500",
            f"{thermal}1/trip_point_2_type": "passive",
            f"{thermal}1/trip_point_2_temp": "99000",
            f"{thermal}2/type": "PMIC-Die\n",
            f"{thermal}2/temp": "100000\n",
            f"{thermal}3/type": "cv0-thermal\n",
            f"{thermal}3/temp": "-256000\n",
            f"{thermal}4/type": "cv1-thermal\n",
            f"{thermal}5/type": "tj-thermal\n",
            f"{thermal}5/temp": "86000\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "729600",
            "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "1510400",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": "1190400",
            "sys/class/devfreq/17000000.gpu/cur_freq": "306000000",
            "sys/class/devfreq/17000000.gpu/max_freq": "624750000",
            "sys/devices/system/cpu/cpu0/cache/index0/size": "64K",
            "sys/devices/system/cpu/cpu0/cache/index3/size": "2048K",
            "proc/net/route": "Iface\tDestination\nwlan0\t0001A8C0\neth0\t00000000\n",
            "sys/class/net/eth0/speed": "1000\n",
            "sys/class/net/eth1/speed": "2500\n",
            "sys/class/net/wlan0/speed": "-1\n",
        },
    )


def test_a_jetson_tells_what_it_is(jetson: Path) -> None:
    assert is_jetson(jetson)
    assert board_facts(jetson) == {
        "board": "NVIDIA Jetson Orin Nano Developer Kit",
        "L4T": "R36 (release), REVISION: 4.3",
        "power mode": "15W (fastest: MAXN_SUPER)",
        "CPU": "6 × Cortex-A78AE",
        "CPU clock": "1190 MHz now, 1510 MHz at most",
        "GPU clock": "306 MHz now, 625 MHz at most",
        "RAM": "7.4 GiB",
        "temperatures": "PMIC-Die 100 °C, cpu-thermal 52 °C, gpu-thermal 95 °C, tj-thermal 86 °C",
    }
    assert last_level_cache(jetson) == 2 * 2**20


def test_it_warns_of_heat_and_of_a_slow_mode(jetson: Path) -> None:
    hot = [zone.name for zone in zones(jetson) if zone.is_hot]
    assert hot == ["gpu-thermal", "tj-thermal"]  # near its trip point; beyond 85 without one
    gpu, junction, mode = warnings(jetson)
    assert gpu.startswith("gpu-thermal is at 95 °C: ")
    assert junction.startswith("tj-thermal is at 86 °C: ")
    assert mode.startswith("the power mode is 15W, not MAXN_SUPER: `sudo nvpmodel -m 2`")


def test_a_cool_jetson_in_its_fastest_mode_is_not_warned_of(jetson: Path) -> None:
    nvpmodel(jetson, "echo 'NV Power Mode: MAXN_SUPER'; echo 2")
    for zone in (1, 5):
        write(jetson, {f"sys/class/thermal/thermal_zone{zone}/temp": "60000"})
    assert warnings(jetson) == []


def test_without_its_configuration_no_mode_is_called_slow(jetson: Path) -> None:
    (jetson / "etc/nvpmodel.conf").unlink()
    mode = power_mode(jetson)
    assert mode is not None
    assert (mode.name, mode.fastest) == ("15W", "")
    assert board_facts(jetson)["power mode"] == "15W"
    assert not [one for one in warnings(jetson) if "power mode" in one]


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense", "sleep 60", "printf '\\377'"])
def test_an_nvpmodel_that_does_not_answer_is_left_out(
    jetson: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "TOOL_SECONDS", 0.3)
    nvpmodel(jetson, script.replace("sleep", "exec sleep"))
    assert power_mode(jetson) is None
    assert "power mode" not in board_facts(jetson)


def test_an_nvpmodel_that_cannot_be_run_is_left_out(jetson: Path) -> None:
    (jetson / "usr/sbin/nvpmodel").chmod(0o644)
    assert power_mode(jetson) is None


def test_modes_of_an_older_board_are_ordered_by_their_watts(jetson: Path) -> None:
    modes = "< POWER_MODEL ID=0 NAME=MODE_15W_6CORE >\n< POWER_MODEL ID=8 NAME=MODE_20W_4CORE >\n"
    write(jetson, {"etc/nvpmodel.conf": modes})
    mode = power_mode(jetson)
    assert mode is not None
    assert (mode.fastest, mode.fastest_id) == ("MODE_20W_4CORE", "8")


def test_a_device_that_tells_nothing_has_no_facts(tmp_path: Path) -> None:
    assert board_facts(tmp_path) == {}
    assert warnings(tmp_path) == []
    assert last_level_cache(tmp_path) == 0
    assert not is_jetson(tmp_path)


def test_a_pc_has_a_processor_with_a_name(tmp_path: Path) -> None:
    info = (
        "processor : 0\nmodel name : Fast CPU @ 3 GHz\nflags :\n\nprocessor : 1\nmodel name : x\n"
    )
    assert board_facts(write(tmp_path, {"proc/cpuinfo": info})) == {"CPU": "2 × Fast CPU @ 3 GHz"}


def test_this_machine_can_be_read() -> None:
    assert "RAM" in board_facts()
    assert isinstance(warnings(), list)


def test_the_speed_of_an_interface(jetson: Path) -> None:
    assert interface_speed("", jetson) == ("eth0", 1e9)  # the default route's
    assert interface_speed("eth1", jetson) == ("eth1", 2.5e9)
    assert interface_speed("wlan0", jetson) is None
    assert interface_speed("none0", jetson) is None
    (jetson / "proc/net/route").unlink()
    assert interface_speed("", jetson) is None


# --- memory -------------------------------------------------------------------------------------


def test_memory_is_what_the_system_says_is_available(jetson: Path) -> None:
    found = available_memory("cpu", jetson)
    assert found.bytes == 6291456 * 1024
    assert "MemAvailable" in found.source


def test_a_jetson_s_gpu_has_what_the_system_has(
    jetson: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: pytest.fail("asked the driver"))
    assert available_memory("cuda", jetson).bytes == 6291456 * 1024


def test_a_gpu_with_memory_of_its_own_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(is_integrated=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5 * 2**30, 8 * 2**30))
    found = available_memory("cuda", tmp_path)
    assert (found.bytes, found.source) == (5 * 2**30, "free of the GPU's 8.0 GiB, by its driver")


def test_mapped_files_are_still_to_be_taken(tmp_path: Path) -> None:
    text = "VmRSS:\t  900 kB\nRssAnon:\t  300 kB\nRssFile:\t  600 kB\n"
    write(tmp_path, {"proc/self/status": text})
    assert yet_to_take(1000 << 10, "cpu", tmp_path) == 700 << 10
    assert yet_to_take(200 << 10, "cpu", tmp_path) == 0


def test_a_gpu_s_own_memory_is_counted_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"proc/self/status": "RssAnon:\t  300 kB\n"})
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100 << 10)
    for is_shared, left in ((False, 900), (True, 600)):
        properties = SimpleNamespace(is_integrated=int(is_shared))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, p=properties: p)
        assert yet_to_take(1000 << 10, "cuda", tmp_path) == left << 10


GIB = 2**30


def group(limit: int | str, usage: int, cached: int = 0, *, old: bool = False) -> dict[str, str]:
    """The files of a control group."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if not old:
        names = ("memory.max", "memory.current", "inactive_file")
    return {
        names[0]: f"{limit}\n",
        names[1]: f"{usage}\n",
        "memory.stat": f"anon 12\n{names[2]} {cached}\nslab 1\n",
    }


def tree(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_the_tightest_control_group_above_counts(jetson: Path) -> None:
    top = "sys/fs/cgroup"
    write(jetson, {"proc/self/cgroup": "0::/system.slice/edgespec.service\n"})
    write(jetson, tree(f"{top}/system.slice/edgespec.service", group("max", GIB)))
    write(jetson, tree(f"{top}/system.slice", group(4 * GIB, 2 * GIB, GIB)))
    found = available_memory("cpu", jetson)
    assert found.bytes == 3 * GIB  # 4 less 2 in use, of which 1 is cache
    assert found.source.startswith("memory.max of the control group")


def test_control_groups_of_the_first_version_and_of_a_container(jetson: Path) -> None:
    write(jetson, {"proc/self/cgroup": "5:devices:/a\n4:cpu,memory:/docker/abc\n"})
    # A container does not see its own path, but finds its group mounted at the root.
    write(jetson, tree("sys/fs/cgroup/memory", group(2 * GIB, GIB, old=True)))
    assert available_memory("cpu", jetson).bytes == GIB


def test_a_group_that_is_full_leaves_nothing_and_a_roomy_one_changes_nothing(jetson: Path) -> None:
    write(jetson, {"proc/self/cgroup": "0::/\n"})
    write(jetson, tree("sys/fs/cgroup", group(GIB, 2 * GIB)))
    assert available_memory("cpu", jetson).bytes == 0
    write(jetson, tree("sys/fs/cgroup", group(2**63 - 4096, GIB)))
    assert available_memory("cpu", jetson).bytes == 6291456 * 1024


def test_without_proc_the_system_is_asked(tmp_path: Path) -> None:
    assert available_memory("cpu", tmp_path).bytes > 0


# --- doctor's single findings -------------------------------------------------------------------


def test_versions_that_are_missing_or_too_old() -> None:
    assert doctor.check_version("torch", "2.6").state == doctor.OK
    old = doctor.check_version("torch", "99.1")
    assert old.state == doctor.BLOCKED
    assert "too old; pip install 'torch>=99.1'" in old.text
    gone = doctor.check_version("no-such-thing", "1")
    assert gone.state == doctor.BLOCKED
    assert "not installed" in gone.text


def test_too_little_memory_blocks(jetson: Path) -> None:
    assert doctor.check_memory(jetson).state == doctor.OK
    write(jetson, {"proc/meminfo": "MemAvailable: 1500000 kB\n"})
    assert doctor.check_memory(jetson).state == doctor.WARNING
    write(jetson, {"proc/meminfo": "MemAvailable: 300000 kB\n"})
    found = doctor.check_memory(jetson)
    assert found.state == doctor.BLOCKED
    assert "end other programs" in found.text


def test_a_missing_compiler_is_a_warning_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not compiled.complaint("products"):
        assert doctor.check_kernels().state == doctor.OK
    monkeypatch.setenv("PATH", "/nowhere")
    compiled.loaded.cache_clear()
    try:
        found = doctor.check_kernels()
    finally:
        compiled.loaded.cache_clear()
    assert found.state == doctor.WARNING
    assert "sudo apt install gcc" in found.text


def test_a_cache_folder_below_a_file_blocks(tmp_path: Path) -> None:
    assert doctor.check_cache(tmp_path / "not" / "yet").state in (doctor.OK, doctor.WARNING)
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("x", encoding="utf-8")
    found = doctor.check_cache(tmp_path / "file" / "blocks")
    assert found.state == doctor.BLOCKED
    assert "--cache" in found.text


def test_a_port_that_somebody_has_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = doctor.check_port(taken.getsockname()[1])
    assert found.state == doctor.WARNING
    assert "another --port" in found.text


def test_a_jetson_whose_gpu_torch_does_not_see_is_warned_of(
    jetson: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    states = {finding.name: finding.state for finding in doctor.check_device(jetson)}
    assert states == {"device": doctor.OK, "GPU": doctor.WARNING}
