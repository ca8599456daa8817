"""Triton's compiler without a device: kernels are compiled as a launch would, and not launched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from support.triton_device import Device, launching_into
from triton.runtime.jit import JITFunction

SHARED = 99 * 1024
"""Bytes of shared memory that a program may have on 8.6 and 8.9, which have the least; an Orin has
163 KiB (NVIDIA's programming guide)."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """What launches would have launched: triton's compiled kernels, which all fit."""
    found: list[Any] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "__getitem__", launching_into(found))
    triton.runtime.driver.set_active(Device())
    yield found
    for one in found:
        assert one.metadata.shared <= SHARED, (one.metadata.name, one.metadata.shared)
