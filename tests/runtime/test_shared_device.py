"""Shared device: two processes have an emulated device in turns, as they would have a board."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from support.board import EmulatedNode, Job, StageProcess, simulated

from edgespec.backends.compute import HEAD_LANE, OWN_LANE, STAGE_LANE
from edgespec.runtime.shared_device import COORDINATOR, SharedDevice, new_file

PART_S = 0.1
LOOK_AGAIN_S = 0.02
"""What decides is parts apart, so that each may notice what the other does as late as that."""


@pytest.fixture
def file() -> Iterator[int]:
    """A device that is free."""
    descriptor = new_file()
    yield descriptor
    with suppress(OSError):
        os.close(descriptor)


def draft(number: int, at: float) -> Job:
    return Job(number, "draft", at * PART_S, 4, 4 * PART_S)


def block(number: int, at: float, stop_at: float | None = None) -> Job:
    stop = None if stop_at is None else stop_at * PART_S
    return Job(number, "block", at * PART_S, 4, 4 * PART_S, stop)


def head(number: int, at: float) -> Job:
    return Job(number, "head", at * PART_S, 1, PART_S)


CASES = {
    "heads, then blocks, then drafts": ([draft(1, 0.0), head(3, 2.5)], [block(2, 0.5)]),
    "a draft goes on in parts": ([draft(1, 0.0)], [block(2, 0.5), block(3, 7.5)]),
    "no head interrupts a last part": ([head(1, 3.5)], [block(2, 0.0)]),
    "a block that makes way is aborted": ([head(1, 1.5)], [block(2, 0.0, stop_at=2.5)]),
    "a head goes before a draft that waits": ([draft(1, 0.5), head(2, 1.5)], [block(3, 0.0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_emulated_processes_share_a_device_as_simulated_nodes_do(
    file: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedDevice, "look_again_s", LOOK_AGAIN_S)
    own, of_stage = CASES[name]
    device = SharedDevice(file, COORDINATOR)
    with StageProcess(file, of_stage) as stage:
        ends = EmulatedNode(device, own, stage.go_on).play()
        stage.go_on()
    assert ends | stage.ends == pytest.approx(simulated(own, of_stage), abs=1e-6)


def test_what_a_dead_process_had_or_waited_for_is_free(file: int) -> None:
    device = SharedDevice(file, COORDINATOR)
    assert device.take(OWN_LANE, 1.0) == 0.0
    with StageProcess(file, [block(1, 0.0), block(2, 0.0)]) as stage:
        stage.step()
        assert device.outranked(OWN_LANE) is not None
        assert device.outranked(STAGE_LANE) is None
        device.give(2.0)
        stage.step()
        assert device.take(HEAD_LANE, 3.0) is None, "the stage has it"
    died = time.monotonic()
    free_at = device.take(HEAD_LANE, 3.0)
    assert free_at is not None
    assert died <= free_at <= time.monotonic(), "what it had begun is lost"
    with StageProcess(file, [block(1, 0.0)]) as stage:
        stage.step()
        assert device.outranked(OWN_LANE) is not None
    now = time.monotonic()
    device.give(now)
    assert device.take(OWN_LANE, 2.0) == now
    assert device.outranked(OWN_LANE) is None
