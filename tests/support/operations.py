"""Counting the operations that torch is asked for: what a host has to launch on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WHOLE = ("rms_norm", "scaled_dot_product_attention")
"""Functions of which CUDA has a kernel, where a CPU build takes them apart."""

_MEMORY = ("aten::empty", "aten::_unsafe_view", "prim::")
"""How operations begin that compute nothing."""


class Counted(TorchDispatchMode):
    """`names`: of the operations so far, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.inside = 0  # WHOLE functions, of which the parts do not count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = func._schema
        views = (out.alias_info for out in schema.returns)
        view = any(alias is not None and not alias.is_write for alias in views)
        if not self.inside and not view and not schema.name.startswith(_MEMORY):
            self.names.append(schema.name)
        return func(*args, **(kwargs or {}))


class _Wholes(TorchFunctionMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self._counted = counted

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in WHOLE or self._counted.inside:
            return func(*args, **(kwargs or {}))
        self._counted.names.append(name)
        self._counted.inside += 1
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._counted.inside -= 1


def operations(work: Callable[[], object]) -> list[str]:
    """The operations of one call of `work`, which should have run before."""
    counted = Counted()
    # Not in inference mode, in which what consists of several operations is one.
    with torch.no_grad(), counted, _Wholes(counted):
        work()
    return counted.names
