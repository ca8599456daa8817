"""What doctor finds out about torch, disks, swap and a Raspberry Pi; and that no system, however
odd, makes it fail."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from edgespec.daemon import device, doctor, storage, torch_checks
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.daemon.device import firmware_limits, warnings, zones
from edgespec.daemon.health import SensorReader
from edgespec.daemon.memory import available_memory
from edgespec.net.discovery_interfaces import own_interfaces

THERMAL = "sys/class/thermal/thermal_zone0"
FIRMWARE = "sys/devices/platform/soc/soc:firmware/get_throttled"


def write(root: Path, files: dict[str, str]) -> Path:
    """Lay out a tree of text files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


# --- torch --------------------------------------------------------------------------------------


def test_a_pre_release_is_older_than_its_release() -> None:
    for version in ("2.6.0rc1", "2.6.0a0+df5bbc09d1.nv24.11", "2.5.0a0+872d972e41.nv24.8", "2.5.1"):
        assert doctor.is_before(version, "2.6"), version
    for version in (
        "2.6.0",
        "2.6",
        "2.6.0+cu126",
        "2.7.0a0+ecf3bae40a.nv25.02",
        "2.13.0",
        "2.6.1rc1",
    ):
        assert not doctor.is_before(version, "2.6"), version


def test_what_a_process_takes_of_a_gpu_before_its_weights_is_told_by_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a real process, which uses the processor here, and a GPU whose memory is made up."""
    nowhere = tmp_path / "none"
    assert list(doctor.check_gpu_memory(nowhere, tmp_path)) == [], "there is none here"
    free = iter([2000, 1000, 700, 640, 650])
    taken = doctor.taken_before_weights("cpu", lambda: next(free) << 20)
    assert [size >> 20 for size in taken.values()] == [300, 60, 0]
    with pytest.raises(OSError, match="device"):
        doctor.taken_before_weights("nothing", lambda: 0)
    monkeypatch.setattr(doctor, "gpu_facts", lambda: {"GPU": "Orin"})
    monkeypatch.setattr(doctor, "taken_before_weights", lambda *_: taken)
    (found,) = doctor.check_gpu_memory(nowhere, tmp_path)
    assert found.text.startswith("a process takes 360 MiB before its first weight: 300 MiB of its")
    # Of a coordinator, what is planned for each place besides.
    settings = ClusterSettings(stages=2, layers="5,3", context=512)
    cluster = ClusterFolder.create(tmp_path / "cluster", settings)
    _, *places = doctor.check_gpu_memory(cluster.path, tmp_path)
    assert [one.name for one in places] == [
        f"GPU memory, {p}" for p in ("D0", "stage 1", "stage 2")
    ]
    for one in places:
        words = "before weights 0.35 GiB, weights (.*), rows (.*), work space (.*): (.*) by plan"
        numbers = re.fullmatch(words, one.text)
        assert numbers is not None
        parts = [float(number) for number in numbers.groups()]
        assert sum(parts[:3]) + 0.35 == pytest.approx(parts[3], abs=0.021)
    assert "weights 0.00" not in places[1].text
    # On a board whose driver lacks what an environment asks of torch's allocator.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert len(list(doctor.check_gpu_memory(nowhere, tmp_path))) == 1
    found, _ = doctor.check_gpu_memory(nowhere, jetson(tmp_path / "orin"))
    assert (found.state, found.text[-8:]) == ("warning", "unset it")


def test_a_torch_that_cannot_speak_with_numpy_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_checks.numpy_problem() == ""

    def raises(_: object) -> torch.Tensor:
        raise RuntimeError("Numpy is not available\nmore")

    monkeypatch.setattr(torch, "from_numpy", raises)
    said = torch_checks.numpy_problem()
    assert "cannot exchange arrays (Numpy is not available)" in said
    assert "pip install 'numpy<2'" in said
    assert doctor.import_problem() == said


def jetson(root: Path, release: str = "R36 (release), REVISION: 4.3") -> Path:
    return write(root, {"etc/nv_tegra_release": f"# {release}, GCID: 1\n"})


def test_why_torch_does_not_use_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_checks.why_no_cuda(tmp_path) == ""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "a build for the CPU, so that the GPU is idle" in torch_checks.why_no_cuda(
        write(tmp_path / "pc", {"dev/nvidia0": ""})
    )
    board = jetson(tmp_path / "jetson")
    assert "tools/constraints.py" in torch_checks.why_no_cuda(board)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "is built for CUDA 13.0, and L4T R36 has CUDA 12" in torch_checks.why_no_cuda(board)
    newer = jetson(tmp_path / "newer", "R39 (release), REVISION: 2.0")
    assert "for CUDA 13.0 " in torch_checks.why_no_cuda(newer)
    write(newer, {"dev/nvhost-gpu": ""})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "may not open /dev/nvhost-gpu: sudo usermod -aG video" in torch_checks.why_no_cuda(newer)


def test_which_jetpack_is_too_old(tmp_path: Path) -> None:
    releases = {"R36 (release), REVISION: 3.0": True, "R35 (release), REVISION: 5.0": True}
    releases |= {"R36 (release), REVISION: 4.0": False, "R39 (release), REVISION: 2.0": False}
    for number, (release, is_old) in enumerate(releases.items()):
        said = torch_checks.jetpack_problem(jetson(tmp_path / str(number), release))
        assert bool(said) == is_old, release
        assert not is_old or "upgrade JetPack first" in said
    assert torch_checks.jetpack_problem(tmp_path) == ""
    assert torch_checks.jetpack_problem(jetson(tmp_path / "odd", "Rxx")) == ""


def test_which_gpus_a_build_has_code_for() -> None:
    orin, thor = (8, 7), (11, 0)
    assert torch_checks.architecture_problem(orin, ["sm_80", "sm_90"]) == ""  # as 8.0 runs on 8.7
    assert torch_checks.architecture_problem(orin, ["compute_75"]) == ""
    assert torch_checks.architecture_problem(thor, ["sm_100", "sm_110"]) == ""
    said = torch_checks.architecture_problem(orin, ["sm_90", "sm_100", "sm_120"])
    assert "has no code for compute capability 8.7, only sm_90" in said
    assert torch_checks.architecture_problem(orin, ["sm_75", "sm_90a", "odd"])


def test_every_kind_of_kernel_is_tried_and_named_if_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = torch.device("cpu")
    for dtype in ("bfloat16", "float16"):
        assert list(torch_checks.kernel_problems(here, dtype)) == []
    real = torch_checks.kernels_by_name
    first = iter(range(10**6))

    def broken(dtype: torch.dtype) -> object:
        def no_image(_: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUDA error: no kernel image is available\nCompile with ...")

        # The first run is the device's, the second the CPU's.
        return real(dtype) | {
            "a sort": no_image,
            "a softmax": lambda x: x.softmax(-1) + (next(first) % 2 == 0),
        }

    monkeypatch.setattr(torch_checks, "kernels_by_name", broken)
    assert list(torch_checks.kernel_problems(here, "bfloat16")) == [
        "a softmax gives wrong results",
        "a sort fails: CUDA error: no kernel image is available",
    ]


def test_both_types_of_16_bit_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times = torch_checks.sixteen_bit_times()
    assert set(times) == {"bfloat16", "float16"}
    assert min(times.values()) > 0
    for float16, state in ((0.5, doctor.WARNING), (0.95, doctor.OK), (3.0, doctor.OK)):
        given = {"bfloat16": 1.0, "float16": float16}
        monkeypatch.setattr(torch_checks, "sixteen_bit_times", lambda given=given: given)
        (found,) = doctor.check_sixteen_bit()
        assert found.state == state
        assert f"take {float16:.2f} of bfloat16's time" in found.text
        assert ("--dtype float16" in found.text) == (state == doctor.WARNING)


# --- heat and power -----------------------------------------------------------------------------


def test_a_lone_critical_trip_is_no_limit(tmp_path: Path) -> None:
    pi = {f"{THERMAL}/type": "cpu-thermal", f"{THERMAL}/temp": "84000"}
    pi |= {f"{THERMAL}/trip_point_0_type": "critical", f"{THERMAL}/trip_point_0_temp": "110000"}
    (zone,) = zones(write(tmp_path, pi))
    assert (zone.limit, zone.is_hot) == (None, False)
    write(tmp_path, {f"{THERMAL}/temp": "86000"})
    (zone,) = zones(tmp_path)
    assert zone.is_hot


def test_a_raspberry_pi_says_why_it_is_held_back(tmp_path: Path) -> None:
    assert firmware_limits(tmp_path) == []
    for text, words in {
        "50005\n": ["supply voltage is too low", "slowed the CPU down"],
        "0x80008": ["soft temperature limit"],
        "50000": [],  # it was so since the start, and is no longer
        "0": [],
        "nonsense": [],
        "": [],
    }.items():
        found = firmware_limits(write(tmp_path, {FIRMWARE: text}))
        assert len(found) == len(words), text
        assert all(word in line for word, line in zip(words, found, strict=True))
    health = SensorReader(root=write(tmp_path, {FIRMWARE: "4"})).look()
    assert health.throttled
    assert "slowed the CPU down" in health.text


def test_its_program_is_asked_where_the_kernel_has_no_file(tmp_path: Path) -> None:
    script = "#!/bin/sh\n[ $1 = get_throttled ] && echo throttled=0x2\n"
    write(tmp_path, {"usr/bin/vcgencmd": script})
    (tmp_path / "usr/bin/vcgencmd").chmod(0o755)
    assert firmware_limits(tmp_path) == ["the firmware limits the CPU's clock"]


def test_clocks_that_may_not_rise_are_warned_of(tmp_path: Path) -> None:
    policy = "sys/devices/system/cpu/cpufreq/policy0"
    clocks = {f"{policy}/scaling_max_freq": "1510400", f"{policy}/cpuinfo_max_freq": "1984000"}
    (said,) = warnings(write(tmp_path, clocks))
    assert "may rise to 1510 of 1984 MHz only" in said
    write(tmp_path, {f"{policy}/scaling_max_freq": "1984000"})
    assert warnings(tmp_path) == []
    write(tmp_path, {f"{policy}/scaling_governor": "powersave"})
    assert "governor is powersave" in warnings(tmp_path)[0]
    write(tmp_path, {f"{policy}/scaling_driver": "intel_pstate"})
    assert warnings(tmp_path) == []


# --- swap and disks -----------------------------------------------------------------------------


def test_swap_in_memory_and_on_a_card(tmp_path: Path) -> None:
    heading = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    rows = "/dev/zram0 partition 1048576 0 5\n/dev/mmcblk0p2 partition 2097152 0 -2\n"
    write(tmp_path, {"proc/swaps": heading + rows})
    memory, card = doctor.check_swap(tmp_path)
    assert (memory.state, card.state) == (doctor.OK, doctor.WARNING)
    assert "1.0 GiB at /dev/zram0: compressed in the memory itself" in memory.text
    assert "2.0 GiB at /dev/mmcblk0p2" in card.text
    assert "wears the card out" in card.text
    (none,) = doctor.check_swap(tmp_path / "empty")
    assert none.text.startswith("none")


def test_the_kind_of_disk_a_folder_lies_on(tmp_path: Path) -> None:
    def disk(folder: str, files: dict[str, str]) -> storage.Disk:
        write(tmp_path, {f"{folder}/{name}": text for name, text in files.items()})
        link = tmp_path / "sys/dev/block/179:2"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / folder)
        return storage.disk_of(os.makedev(179, 2), tmp_path)

    write(tmp_path, {"sys/devices/a/mmcblk0/device/type": "SD\n"})
    card = disk("sys/devices/a/mmcblk0/mmcblk0p2", {"partition": "2\n"})
    assert (str(card), card.is_card) == ("mmcblk0, SD card", True)
    assert str(disk("sys/devices/b/nvme0n1", {"size": "1"})) == "nvme0n1, NVMe"
    assert str(disk("sys/devices/usb1/sda", {"size": "1"})) == "sda, USB disk"
    assert storage.disk_of(os.makedev(0, 40), tmp_path).name == ""


def test_a_disk_is_measured_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "TRIED_BYTES", 2 << 20)
    (found,) = doctor.check_disk(tmp_path / "not" / "yet", tmp_path)
    assert "MB/s" in found.text
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(storage, "speeds", lambda _: (20e6, 90e6))
    (slow,) = doctor.check_disk(tmp_path, tmp_path)
    assert slow.state == doctor.WARNING
    assert "writes 20 MB/s, reads back 90 MB/s; a block of 3 GiB takes 3 minutes" in slow.text

    def full(_: Path) -> tuple[float, float]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "speeds", full)
    (found,) = doctor.check_disk(tmp_path, tmp_path)
    assert "cannot be measured: No space left on device" in found.text


# --- odd systems --------------------------------------------------------------------------------


def test_without_what_psutil_reads_there_are_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENOSYS for an interface's state (gVisor, emulation), and no /proc/meminfo."""

    def not_there() -> None:
        raise OSError(38, "Function not implemented")

    for name in ("net_if_stats", "net_if_addrs", "virtual_memory"):
        monkeypatch.setattr(psutil, name, not_there)
    assert own_interfaces() == []
    assert device.interface_of("127.0.0.1") == ""
    assert available_memory("cpu", tmp_path).bytes > 0


def test_a_check_that_fails_is_a_finding() -> None:
    def check() -> list[doctor.Finding]:
        raise NotImplementedError

    (found,) = doctor.guarded("swap", check)
    assert (found.name, found.state) == ("swap", doctor.WARNING)
    assert found.text == "this could not be looked at here (NotImplementedError)"


NAMES = (
    *("proc/meminfo", "proc/cpuinfo", "proc/swaps", "proc/self/cgroup", "proc/net/route"),
    *("proc/device-tree/model", "etc/nv_tegra_release", "etc/nvpmodel.conf", FIRMWARE),
    *(f"{THERMAL}/{name}" for name in ("type", "temp", "trip_point_0_type", "trip_point_0_temp")),
    *(
        f"sys/devices/system/cpu/cpufreq/policy0/{name}"
        for name in ("scaling_max_freq", "cpuinfo_max_freq", "scaling_governor")
    ),
    "sys/class/devfreq/17000000.gpu/cur_freq",
    "sys/devices/system/cpu/cpu0/cache/index0/size",
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current",
    "dev/nvidia0",
)
TEXTS = (
    *(
        b"",
        b"0",
        b"-1",
        b"99999999999999999999999",
        b"\xff\xfe\0\x80",
        b"R36 (release), REVISION: ",
    ),
    *(
        b"MemTotal: -5 kB\nMemAvailable: x kB\n",
        b"0::/a/../../b\nmemory:\n",
        b"passive",
        b"a\n" * 99,
    ),
    *(b"Filename\n/dev/x partition 12 0\n/dev/y\n\n", b"# R36 (release), REVISION: 4.3", b"0xzz"),
    *(b"Iface Destination\neth0 00000000\n\n", b"processor : \nmodel name", b"1 2 3 4 5 6 7"),
)


def odd_root(root: Path, rng: random.Random) -> None:
    """A tree in which any file may be missing, empty, rubbish, a folder, or a link to itself."""
    for name in NAMES:
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = rng.randrange(8)
        if kind == 0:
            file.mkdir()
        elif kind == 1:
            file.symlink_to(file)
        elif kind == 2:
            file.write_bytes(rng.randbytes(rng.randrange(200)))
        elif kind < 7:
            file.write_bytes(rng.choice(TEXTS))


def test_no_odd_system_makes_doctor_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "TRIED_BYTES", 1 << 20)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(60):
        root = tmp_path / str(number)
        odd_root(root, rng)
        checks = {
            "device": lambda root=root: doctor.check_device(root),
            "board": lambda root=root: doctor.check_board(root),
            "speed": lambda root=root: doctor.check_speed(root),
            "memory": lambda root=root: [doctor.check_memory(root)],
            "swap": lambda root=root: doctor.check_swap(root),
            "disk": lambda root=root: doctor.check_disk(root, root),
        }
        for name, check in checks.items():
            found = list(doctor.guarded(name, check))
            odd = [one.text for one in found if "could not be looked at" in one.text]
            assert not odd, (number, name, odd)  # these read files alone: nothing may raise
        SensorReader(root=root).look()
        assert np.isfinite([zone.celsius for zone in zones(root)]).all()
