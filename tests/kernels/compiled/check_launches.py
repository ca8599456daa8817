"""Launches past Triton's dispatch give the driver what Triton would: kernel, grid and arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support.gpu_code import launch_states
from support.state_forms import TINY_DELTA
from support.triton_device import Launched, RecordingDevice
from triton.runtime.jit import JITFunction

from edgespec.kernels.gpu import launch, rows
from edgespec.kernels.gpu.attention import attention
from edgespec.kernels.gpu.code_words import Codes
from edgespec.kernels.gpu.launch import Launcher
from edgespec.kernels.gpu.places import Places
from edgespec.kernels.gpu.plain_product import plain_product
from edgespec.kernels.gpu.products import CodesProduct

HALF, BRAIN = torch.float16, torch.bfloat16
DEVICE = RecordingDevice()
"""One for all: what was compiled once is launched where it was first."""


class Launches:
    """What was launched, and how often Triton's dispatch was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        triton.runtime.driver.set_active(DEVICE)
        by_triton = JITFunction.run

        def run(kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
            self.asked += 1
            return by_triton(kernel, *args, **kwargs)

        monkeypatch.setattr(JITFunction, "run", run)

    def of(self, work: Callable[[], object]) -> tuple[list[Launched], int]:
        """What `work` launches, and how much of it by Triton's dispatch."""
        DEVICE.launched.clear()
        self.asked = 0
        work()
        return list(DEVICE.launched), self.asked


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launches:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return Launches(monkeypatch)


def by_dispatch(launches: Launches, work: Callable[[], object]) -> list[Launched]:
    """What Triton's dispatch launches for the same."""

    def dispatch(launcher: Launcher, grid: Any, _device: int, tensors: Any, numbers: Any) -> None:
        launcher._kernel[grid](*tensors, *numbers, **launcher._constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launcher, "launch", dispatch)
        return launches.of(work)[0]


def attend(count: int, pieces: int, dtype: torch.dtype) -> Callable[[], object]:
    keys = [torch.zeros(2, 64 * (1 + piece), 16, dtype=dtype) for piece in range(pieces)]
    slots = torch.zeros(count, 64 * pieces, dtype=torch.int32)
    places = Places(slots, slots[0], slots[0, :1], torch.zeros(count, dtype=torch.int64))
    query = torch.zeros(count, 6, 16, dtype=dtype)[:, :4]
    return lambda: attention(query, keys, keys, places, 0.1)


def layer_parts(count: int, dtype: torch.dtype) -> list[Callable[[], object]]:
    """One of everything that a layer launches, with `count` rows."""
    x, gain = torch.zeros(count, 128, dtype=dtype), torch.zeros(128)
    angles = (torch.zeros(count, 1, 16, dtype=dtype),) * 2
    words = torch.zeros(1, 4, 1, 1024, dtype=torch.int16)
    numbers = torch.zeros(1, 128, dtype=torch.int32)
    codes = Codes(words, 96, 128, 64, numbers, HALF, numbers, HALF, "middle")
    heads = x.view(count, 8, 16)
    return [
        partial(CodesProduct(codes), x),
        partial(CodesProduct(codes, torch.zeros(96, dtype=dtype)), x),
        lambda: plain_product(x, torch.zeros(70, 128, dtype=dtype)),
        lambda: rows.norm(x, gain, 1e-5),
        lambda: rows.add(x, x, 1.0, None, gain, 1e-5),
        lambda: rows.rotate(heads, 4, 2, angles, None, 0.0),
        lambda: rows.gated(x, "silu"),
        attend(count, 1, dtype),
        attend(count, 2, dtype),
        lambda: launch_states(TINY_DELTA, dtype),
    ]


def same(found: list[Launched], wanted: list[Launched]) -> bool:
    """All but results, which are in new memory each time."""
    return [(one.name, one.grid, one.compiled, scalars(one)) for one in found] == [
        (one.name, one.grid, one.compiled, scalars(one)) for one in wanted
    ]


def scalars(one: Launched) -> list[Any]:
    return [
        value if isinstance(value, float) or value < 1 << 20 else "address" for value in one.args
    ]


def check_each_kind_is_dispatched_once(launches: Launches) -> None:
    for dtype in (BRAIN, HALF):
        for count in (1, 5, 16):
            for number, work in enumerate(layer_parts(count, dtype)):
                first, _ = launches.of(work)
                again, asked = launches.of(work)
                assert (len(first), asked) == (len(again), 0), (dtype, count, number)
                assert first, number
                wanted = by_dispatch(launches, work)
                assert same(first, wanted), (dtype, count, number)
                assert same(again, wanted), (dtype, count, number)


def check_arguments_are_those_of_this_launch(launches: Launches) -> None:
    """Of a known kind: other tensors, and another number of rows."""
    weight = torch.zeros(70, 128, dtype=BRAIN)
    launches.of(lambda: plain_product(torch.zeros(17, 128, dtype=BRAIN), weight))
    other, x = torch.ones(70, 128, dtype=BRAIN), torch.zeros(33, 128, dtype=BRAIN)
    (one,), asked = launches.of(lambda: plain_product(x, other))
    assert asked == 0
    assert one.grid == (3, 3, 1)
    assert one.args[:2] == [x.data_ptr(), other.data_ptr()]
    assert one.args[3:] == [33, 70, 128]


def check_what_is_not_aligned_goes_by_triton(launches: Launches) -> None:
    weight = torch.zeros(70, 128, dtype=BRAIN)
    held = torch.zeros(1 + 5 * 128, dtype=BRAIN)
    aligned, shifted = held[:-1].view(5, 128), held[1:].view(5, 128)
    (code,), _ = launches.of(lambda: plain_product(aligned, weight))
    for _ in range(2):
        (one,), asked = launches.of(lambda: plain_product(shifted, weight))
        assert asked == 1
        assert one.compiled != code.compiled
        (one,), asked = launches.of(lambda: plain_product(aligned, weight))
        assert (asked, one.compiled) == (0, code.compiled)


def check_numbers_are_told_apart_as_far_as_triton_does() -> None:
    """What Triton compiles differs at most where these differ."""
    specialised: dict[object, set[object]] = {}
    for number in (*range(-3, 70), 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 16, 2**35, 2**35 + 1):
        triton_sees = number == 1, number % 16 == 0, number >= 2**31
        specialised.setdefault(launch._kind(number), set()).add(triton_sees)
    assert all(len(seen) == 1 for seen in specialised.values())
    assert launch._kind(1.0) == launch._kind(0.5) != launch._kind(1)
