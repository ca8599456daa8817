"""Which quantisations run on this device: every one is tried, and a reason kept if it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.config import NAMED, QUANTISATIONS
from edgespec.daemon.device import ROOT, is_jetson
from edgespec.model.quantised.selftest import usable_quantisations
from edgespec.model.tensors import best_device


@dataclass(frozen=True, slots=True)
class Kernels:
    """Names of quantisations ("none" among them) that gave the right result here; why others did
    not, "file" among them."""

    usable: tuple[str, ...]
    unusable: Mapping[str, str]

    @property
    def has_four_bit(self) -> bool:
        """Whether one of them packs in 4 bits."""
        return any(is_four_bit(name) for name in self.usable)


def is_four_bit(name: str) -> bool:
    """Whether weights of this quantisation take 4 bits each, scales aside."""
    return QUANTISATIONS[name].kind in ("int4", "nf4")


def sixteen_bit_type(device: torch.device) -> str:
    """bfloat16, but float16 on a GPU that is too old for it."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return "bfloat16"


def tried_kernels(root: Path = ROOT) -> Kernels:
    """Try every quantisation on the best device, in its 16-bit type; it takes some seconds."""
    device = best_device()
    complaints = usable_quantisations(sixteen_bit_type(device), device)
    unusable = {name: complaint for name, complaint in complaints.items() if complaint}
    for name in unusable:
        if NAMED[name].kind == "nf4" and is_jetson(root):
            unusable[name] += (
                " (bitsandbytes' wheels are not built for L4T: on a Jetson it has to be compiled; "
                "int4 needs no third party)"
            )
    return Kernels(tuple(name for name in QUANTISATIONS if name not in unusable), unusable)
