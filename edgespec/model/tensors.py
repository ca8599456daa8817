"""Conversions between wire tensors (bytes with dtype and shape) and torch tensors, and where the
latter are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from edgespec.errors import ModelError
from edgespec.types.tensor import Tensor

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
}
"""Wire names of the dtypes that models compute and exchange."""

_COMPUTES = ("float64", "float32", "bfloat16", "float16")
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def compute_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises ModelError for one that models do not compute in."""
    if name not in _COMPUTES:
        raise ModelError(f"cannot compute in {name!r}; use float32, float64, bfloat16 or float16")
    return TORCH_DTYPES[name]


def to_torch(tensor: Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """A torch tensor of the same dtype and shape, with memory of its own, on `device`.

    Raises ValueError for a dtype that models do not compute in (uint64).
    """
    if tensor.dtype not in TORCH_DTYPES:
        raise ValueError(f"a {tensor.dtype} tensor has no place in a model")
    dtype = TORCH_DTYPES[tensor.dtype]
    if not len(tensor.data):
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    # A copy, because wire buffers are read-only, may be unaligned and are reused by the transport.
    flat = torch.frombuffer(bytearray(tensor.data), dtype=dtype)
    return flat.reshape(tensor.shape).to(device)


def from_torch(tensor: torch.Tensor) -> Tensor:
    """The wire form of a dense tensor; shares memory with a contiguous one on the CPU.

    The caller must not write to `tensor` afterwards. Raises ValueError for other dtypes than
    those of TORCH_DTYPES.
    """
    if tensor.dtype not in _NAMES:
        raise ValueError(f"a {tensor.dtype} tensor cannot cross the wire")
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return Tensor(_NAMES[tensor.dtype], shape, b"")
    local = tensor.detach().cpu().contiguous()
    # numpy has no bfloat16: any 2-byte type carries the same bytes.
    array: np.ndarray = (local.view(torch.int16) if local.element_size() == 2 else local).numpy()
    return Tensor(_NAMES[tensor.dtype], shape, array.reshape(-1).data.cast("B"))


def one_view(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous tensors as one, along their first dimension, without a copy; None unless they lie
    one behind the other in one memory."""
    storage = parts[0].untyped_storage().data_ptr()
    for before, part in pairwise(parts):
        behind = before.storage_offset() + before.numel()
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != behind:
            return None
    shape = (sum(len(part) for part in parts), *parts[0].shape[1:])
    return parts[0].as_strided(shape, parts[0].stride())


def best_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
