"""Made-up matrices: codes and scales drawn by chance, in any form, to try and to time it."""

from __future__ import annotations

import torch

from edgespec.config import Quantisation
from edgespec.model.quantised.linear import stored_parts
from edgespec.model.quantised.rounding import Packed


def made_up(form: Quantisation, shape: torch.Size, seed: int = 0) -> Packed:
    """The stored form of a weight [out, in] of "int4" or "int8" that is nobody's.

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
            least, most = {"codes": (-100, 101), "tiles": (0, 256)}.get(name, (0, 16))
            packed[name] = torch.randint(least, most, size, generator=generator, dtype=dtype)
    return packed
