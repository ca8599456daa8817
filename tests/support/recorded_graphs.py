"""A GraphMaker on a CPU: it records a capture's operations and does them again, tensor by tensor.

So what a CUDA graph would do wrong is wrong here: a number that the host knew at the capture stays
what it was, an operation that needs the host is refused, and memory that no operation of the graph
writes holds NaN. It records torch's operations alone, so layers are to be made with
`torch_products`: compiled kernels run on CPUs only, and no graph holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edgespec.kernels import products

REFUSED = ("_local_scalar_dense", "nonzero", "unique", "lift_fresh", "item", "equal", "is_nonzero")
"""Operations that wait for the device, or copy from the host's memory: no capture can hold them."""


@contextmanager
def torch_products() -> Iterator[None]:
    """Layers that are made meanwhile multiply by torch, as where nothing can compile."""
    with mock.patch.object(products, "_multiply", return_value=None):
        yield


class Recording(TorchDispatchMode):
    """What a capture did."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name.startswith(REFUSED):
            raise RuntimeError(f"{name} cannot be captured")
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, tensors(out)))
        return out


class RecordedGraph:
    """A Captured: its operations by turns, results into the memory that they had."""

    def __init__(self, recording: Recording) -> None:
        self.replays = 0
        self._operations = recording.operations
        for _, args, kwargs, out in self._operations:
            for tensor in fresh(out, args, kwargs):
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))

    def replay(self) -> None:
        """Do it again."""
        self.replays += 1
        for func, args, kwargs, out in self._operations:
            again = tensors(func(*args, **kwargs))
            kept = {id(tensor) for tensor in fresh(out, args, kwargs)}
            for old, new in zip(out, again, strict=True):
                if id(old) in kept:
                    old.copy_(new)


class RecordedGraphs:
    """A GraphMaker. `fail`: what a capture raises."""

    def __init__(self, fail: str = "") -> None:
        self.fail = fail
        self.warmed = 0
        self.captured: list[RecordedGraph] = []

    def warm(self, work: Callable[[], None]) -> None:
        self.warmed += 1
        work()

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        if self.fail:
            raise RuntimeError(self.fail)
        recording = Recording()
        with recording:
            work()
        self.captured.append(RecordedGraph(recording))
        return self.captured[-1]


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors in an operation's arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def fresh(out: list[torch.Tensor], *given: Any) -> list[torch.Tensor]:
    """Of an operation's results, those that are no views of what it was given."""
    old = {tensor.untyped_storage().data_ptr() for tensor in tensors(given)}
    return [tensor for tensor in out if tensor.untyped_storage().data_ptr() not in old]
