"""Made-up matrices: codes and scales drawn by chance, in any form, to try and to time it."""

from __future__ import annotations

import torch

from edgespec.config import Quantisation
from edgespec.model.quantised.linear import stored_parts
from edgespec.model.quantised.rounding import Packed


def made_up(form: Quantisation, shape: torch.Size, seed: int = 0) -> Packed:
    """The stored form of a weight [out, in] that is nobody's.

    Raises ModelError if the shape does not fit the form.
    """
    generator = torch.Generator().manual_seed(seed)
    packed = {}
    for name, (size, dtype) in stored_parts(form, shape).items():
        if dtype.is_floating_point:
            packed[name] = ((torch.rand(size, generator=generator) + 0.1) / 64).to(dtype)
        elif name == "order":
            packed[name] = torch.randperm(shape[1], generator=generator).to(dtype)
        else:
            all_of = torch.iinfo(dtype) if name in ("codes", "tiles") else None
            least, most = (all_of.min, all_of.max + 1) if all_of else (0, 16)
            packed[name] = torch.randint(least, most, size, generator=generator, dtype=dtype)
    return packed
