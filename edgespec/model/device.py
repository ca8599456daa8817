"""Which device to compute on."""

from __future__ import annotations

import torch


def best_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
