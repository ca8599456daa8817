"""int8 in groups: multiplying by codes of 8 bits with a scale for each group of columns."""

from __future__ import annotations

import torch

from edgespec.config import Quantisation
from edgespec.model.quantised.group_scales import scale_and_zero
from edgespec.model.quantised.rounding import Packed
from edgespec.model.quantised.slices import SlicedLinear


class Int8GroupLinear(SlicedLinear):
    """Multiplies by slices."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def held(self, packed: Packed, quantisation: Quantisation, device: torch.device) -> Packed:
        self.group = quantisation.group
        scale, zero = scale_and_zero(packed, quantisation, 0, self.dtype)
        self.register_buffer("zeros", None if zero is None else zero.to(device), persistent=False)
        return {"codes": packed["codes"].to(device), "scales": scale.to(device)}

    def weight_rows(self, first: int, end: int) -> torch.Tensor:
        """code * scale + zero."""
        codes = self.codes[first:end].to(self.dtype).view(end - first, -1, self.group)
        weight = codes.mul_(self.scales[first:end].unsqueeze(2))
        if self.zeros is not None:
            weight.add_(self.zeros[first:end].unsqueeze(2))
        return weight.view(end - first, -1)
