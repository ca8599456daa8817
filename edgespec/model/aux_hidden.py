"""Taps: rows that enter some layers, in few bytes, for drafts that read more than the last one.

A tapped row travels as int8 with one float32 scale: H + 4 bytes where a float16 row takes 2 H.
Only guesses depend on it, so that what it loses costs no token.
"""

from __future__ import annotations

import numpy as np
import torch

from edgespec.errors import RemoteProtocolError
from edgespec.types.tensor import Tensor

SCALE_BYTES = 4


def packed(aux_hidden: list[torch.Tensor]) -> Tensor:
    """Rows [R, H] of one layer after the other, side by side: uint8 [R, layers · (H + 4)]."""
    parts: list[torch.Tensor] = []
    for rows in aux_hidden:
        wide = rows.float()
        scale = wide.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        parts.append(scale.contiguous().view(torch.uint8))
        parts.append((wide / scale).round().to(torch.int8).view(torch.uint8))
    side = torch.cat(parts, 1).cpu().contiguous()
    array: np.ndarray = side.numpy()
    return Tensor("uint8", tuple(side.shape), array.reshape(-1).data)


def unpacked(aux_hidden: Tensor, layers: int, hidden: int) -> torch.Tensor:
    """The rows by layer: float32 [R, layers, hidden].

    Raises RemoteProtocolError for a tensor that is not of so many layers, each so wide.
    """
    rows, wide = aux_hidden.shape if len(aux_hidden.shape) == 2 else (0, 0)
    if aux_hidden.dtype != "uint8" or wide != layers * (hidden + SCALE_BYTES):
        raise RemoteProtocolError(
            f"a tensor {aux_hidden.dtype}{list(aux_hidden.shape)} is no rows of {layers} layers "
            f"of {hidden} columns; give all stages the same model"
        )
    data = torch.frombuffer(bytearray(aux_hidden.data), dtype=torch.uint8)
    by_layer = data.reshape(rows, layers, wide // layers)
    scale = by_layer[..., :SCALE_BYTES].contiguous().view(torch.float32)
    return by_layer[..., SCALE_BYTES:].view(torch.int8).float() * scale
