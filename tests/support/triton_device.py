"""Triton's compiler without a device: kernels are compiled as a launch would, and not launched."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITY = 87
"""That of an Orin. What a kernel is compiled to differs in the number alone from 80 to 90, as none
of them asks for more than tensor cores of the first of these."""


class Device:
    """A driver that knows what to compile for, and no more."""

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        """The number of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Of no launch."""
        return 0


def launching_into(found: list[Any]) -> Any:
    """What stands for JITFunction.__getitem__: all of a launch but the driver's part; what would
    have run goes into `found`."""

    def launch(self: JITFunction[Any], grid: object) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            found.append(self.run(*args, grid=grid, warmup=True, **kwargs))

        return compile_only

    return launch
