"""CUDA graphs, for measuring: work captured by torch, and what it asks of a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Captured(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Do it again, with the same tensors at the same addresses."""


class GraphMaker(Protocol):
    """Captures work; tests have one that works on a CPU."""

    def warm(self, work: Callable[[], None]) -> None:
        """Do work as it will be captured, so that libraries prepare what they may not prepare
        within a capture."""

    def capture(self, work: Callable[[], None]) -> Captured:
        """Capture work without doing it. Raises RuntimeError where torch or the device refuses.

        Tensors that the work allocates and somebody keeps stay where they are. All others share
        memory with what is captured before and after, so captured work must be replayed as a
        whole, in the order in which it was captured, by one thread.
        """


class CudaGraphs:
    """A GraphMaker for one CUDA device.

    A stream of its own: the legacy default stream cannot be captured, and cuBLAS prepares a
    workspace for each stream. One memory pool, so that graphs of many shapes need that of the
    largest. An error mode of "thread_local": other threads may allocate meanwhile.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # torch's own handle

    def warm(self, work: Callable[[], None]) -> None:
        own, current = self._own_stream(), torch.cuda.current_stream(self._device)
        own.wait_stream(current)
        with torch.cuda.stream(own):
            work()
        current.wait_stream(own)

    def capture(self, work: Callable[[], None]) -> Captured:
        graph = torch.cuda.CUDAGraph()
        stream = self._own_stream()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"),
        ):
            work()
        return graph

    def _own_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream


def graphs_on(device: torch.device) -> GraphMaker | None:
    """What captures work on that device; None where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None
