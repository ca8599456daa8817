"""Triton's compiler without a device: kernels are compiled as a launch would, and not launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CAPABILITY = 87
"""That of an Orin. What a kernel is compiled to differs in the number alone from 80 to 90, as none
of them asks for more than tensor cores of the first of these."""

SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on 8.6 and 8.9, which have the least; an Orin has
163 KiB (NVIDIA's programming guide)."""


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


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """What launches would have launched: triton's compiled kernels, which all fit."""
    found: list[Any] = []

    def launch(self: JITFunction[Any], grid: object) -> Any:
        def compile_only(*args: Any, **kwargs: Any) -> None:
            found.append(self.run(*args, grid=grid, warmup=True, **kwargs))

        return compile_only

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    triton.runtime.driver.set_active(Device())
    yield found
    for one in found:
        assert one.metadata.shared <= SHARED, (one.metadata.name, one.metadata.shared)
