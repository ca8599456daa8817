"""Triton without a GPU: kernels are compiled, and launched as far as that goes.

`Device` compiles, and hands what would be launched to a launcher of the test's own;
`launcher_device` has Triton's launcher, with a driver that does nothing.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITY = 87
"""That of an Orin."""


class Device:
    """A driver that knows what to compile for, and no more."""

    def __init__(self, capability: int = CAPABILITY) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        """A number for each kind of device, by which Triton keeps what it compiled."""
        return self._capability

    def get_current_stream(self, device: int) -> int:
        """Of no launch."""
        return 0


class Launched:
    """A launch as the device's driver is asked for it, with addresses for tensors."""

    def __init__(self, name: str, grid: tuple[int, ...], compiled: object, args: list[Any]) -> None:
        self.name, self.grid, self.compiled, self.args = name, grid, compiled, args


class RecordingDevice(Device):
    """Keeps what it is told to launch, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Launched] = []
        self.utils = self

    def get_device_properties(self, device: int) -> dict[str, int]:
        """As far as Triton asks, of a device with room for all."""
        return {"max_shared_mem": 1 << 20}

    def load_binary(self, name: str, code: object, *_: object) -> tuple[object, ...]:
        """The module, the function, its registers and spills, and threads that it may have."""
        return name, code, 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        """What is called to launch one compiled kernel."""
        # All names but those of constants, in the order of parameters.
        real = [kind != "constexpr" for kind in src.signature.values()]

        def run(x: int, y: int, z: int, _stream: int, function: object, *rest: Any) -> None:
            args = rest[4:]  # behind packed metadata, launch metadata and two hooks
            both = zip(args, real, strict=True)
            kept = [getattr(a, "data_ptr", lambda a=a: a)() for a, there in both if there]
            self.launched.append(Launched(metadata.name, (x, y, z), function, kept))

        return run


def launcher_device(folder: Path) -> Any:
    """A device with Triton's own launcher, built in `folder` by the C compiler that it needs."""
    library = folder / "libcuda.so.1"
    source = Path(__file__).parent / "cuda_driver.c"
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*command, str(library), str(source)], check=True)
    os.environ |= {"TRITON_LIBCUDA_PATH": str(folder), "TRITON_CACHE_DIR": str(folder / "cache")}
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    from triton.backends.nvidia import driver

    device: Any = Device()
    device.utils, device.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
    return device


def launching_into(found: list[Any]) -> Any:
    """What stands for JITFunction.__getitem__: all of a launch but the driver's part; what would
    have run goes into `found`."""

    def launch(self: JITFunction[Any], grid: object) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            found.append(self.run(*args, grid=grid, warmup=True, **kwargs))

        return compile_only

    return launch
