"""Rotary angles: cosines and sines of the rows' positions, for edgespec's own layers."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Angles:
    """Of one kind of layer. Reckoned in float32 whatever the layers compute in, as transformers
    does it, and rounded once."""

    def __init__(
        self, config: PretrainedConfig, kind: str | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`kind`: the layer type that has rotary settings of its own; None: all share one."""
        frequencies, factor = _frequencies(config, kind)
        both = torch.cat((frequencies, frequencies))
        signs = torch.ones_like(both)
        signs[: len(frequencies)] = -1
        self._frequencies = both.to(device)
        self._factor = float(factor)
        self._signs = (signs * factor).to(device)
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [R, 1, D] of `positions` int64 [R], in the layers' dtype.

        D: how many of a head's numbers are turned. Sines of the first half are negative: a head x
        is turned to x · cos + (its halves exchanged) · sin.
        """
        angles = positions.float()[:, None, None] * self._frequencies
        cosines, sines = angles.cos() * self._factor, angles.sin() * self._signs
        return cosines.to(self._dtype), sines.to(self._dtype)


def turn_heads(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> None:
    """Turn `heads` [..., head_dim], the first D numbers of each, where they are.

    `cosines`, `sines` [..., D]: as Angles makes them, with dimensions of 1 where heads share them.
    """
    dim = cosines.shape[-1]
    if dim < heads.shape[-1]:
        heads = heads.narrow(-1, 0, dim)
    exchanged = heads.roll(dim // 2, -1)
    heads.mul_(cosines).addcmul_(exchanged, sines)


def _frequencies(config: PretrainedConfig, kind: str | None) -> tuple[torch.Tensor, float]:
    """Frequencies float32 [D / 2], and what cosines and sines are multiplied by."""
    settings = config.rope_parameters if kind is None else config.rope_parameters[kind]
    rope = settings["rope_type"]
    if rope != "default":
        found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[rope](config, layer_type=kind)
        return found
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type == "phi3":
        dim = int(dim * settings.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, dim, 2, dtype=torch.float) / dim
    return 1.0 / settings["rope_theta"] ** steps, 1.0
