"""Launches: on CUDA the host stays near the device; elsewhere nothing waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from edgespec.drafting.launches import AHEAD, Launches


class Layer:
    """A CUDA event: recorded behind a layer, then waited for."""

    recorded: list[Layer]
    awaited: list[Layer]

    def record(self) -> None:
        """Into the stream."""
        Layer.recorded.append(self)

    def synchronize(self) -> None:
        """Wait."""
        Layer.awaited.append(self)


@pytest.fixture(autouse=True)
def layers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for the device."""
    Layer.recorded, Layer.awaited = [], []
    monkeypatch.setattr(torch.cuda, "Event", Layer)
    return


def test_at_most_so_many_layers_are_launched_and_not_awaited() -> None:
    launches = Launches("cuda")
    for layer in range(8):
        launches.keep_near()
        assert len(Layer.recorded) == layer + 1
        assert Layer.recorded[: max(layer + 1 - AHEAD, 0)] == Layer.awaited, "the oldest first"


def test_no_event_is_made_without_cuda() -> None:
    Launches("cpu").keep_near()
    assert Layer.recorded == []
