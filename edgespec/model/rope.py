"""Rotary angles: cosines and sines of the rows' positions, for edgespec's own layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from edgespec.model.model_config import FULL, ModelConfig
from edgespec.planning.text_part import DELTA, GROUPED

_PARTIAL = ("phi3", "glm4", *GROUPED, *DELTA)
"""Types that turn a part of each head where their angles are the usual ones too."""

Rotary = tuple[torch.Tensor, ...]
"""What layers of one kind are told of the rows' positions: tensors [R, ...]."""


class Angles:
    """Of one kind of layer. Reckoned in float32 whatever the layers compute in, as transformers
    does it, and rounded once."""

    def __init__(
        self, config: ModelConfig, kind: str | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`kind`: the layer type that has rotary settings of its own; None: all share one."""
        frequencies, factor = _frequencies(config, kind)
        both = torch.cat((frequencies, frequencies))
        signs = torch.ones_like(both)
        signs[: len(frequencies)] = -1
        self.frequencies, self.factor = frequencies.float().contiguous(), float(factor)
        self.dtype = dtype
        # By steps of positions (Ministral 3, as Llama 4 has it): all that there can be.
        self._steps, louder = 1, config.rope_parameters.get("llama_4_scaling_beta")
        self._scales: torch.Tensor | None = None
        if louder is not None and config.model_type == "ministral3":
            self._steps = int(config.rope_parameters["original_max_position_embeddings"])
            steps = torch.arange(int(config.max_position_embeddings) // self._steps + 1)
            scales = (1 + louder * torch.log(1 + steps)).to(dtype)
            self._scales = scales.to(device, torch.promote_types(dtype, torch.float32))
        self._both = both.to(device)
        self._signs = (signs * factor).to(device)

    def scales(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What queries at `positions` int64 [R] are multiplied by, if they are: [R]."""
        if self._scales is None:
            return ()
        return (self._scales[(positions // self._steps).clamp(max=len(self._scales) - 1)],)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cosines and sines [R, 1, D] of `positions` int64 [R], in the layers' dtype, and `scales`.

        D: how many of a head's numbers are turned. Sines of the first half are negative: a head x
        is turned to x · cos + (its halves exchanged) · sin.
        """
        angles = positions.float()[:, None, None] * self._both
        cosines, sines = angles.cos() * self.factor, angles.sin() * self._signs
        return cosines.to(self.dtype), sines.to(self.dtype), *self.scales(positions)


def apply_rotary(
    heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, paired: bool = False
) -> None:
    """Rotary `heads` [..., head_dim], the first D numbers of each, where they are.

    `cosines`, `sines` [..., D]: as Angles makes them, with dimensions of 1 where heads share them.
    `paired`: neighbours are turned together, not those of two halves.
    """
    dim = cosines.shape[-1]
    if dim < heads.shape[-1]:
        heads = heads.narrow(-1, 0, dim)
    if paired:
        halves = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        apply_rotary(halves, cosines, sines)
        heads.copy_(halves.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2))
        return
    exchanged = heads.roll(dim // 2, -1)
    heads.mul_(cosines).addcmul_(exchanged, sines)


def head_dim_of(config: ModelConfig, kind: str | None) -> int:
    """Numbers of one attention head's keys in layers of a kind."""
    if config.model_type == "gemma4_text" and kind == FULL:
        return int(config.global_head_dim)
    return int(config.head_dim)


def _frequencies(config: ModelConfig, kind: str | None) -> tuple[torch.Tensor, float]:
    """Frequencies float32 [D / 2], and what cosines and sines are multiplied by."""
    settings = config.rope_parameters if kind is None else config.rope_parameters[kind]
    form, dim = settings["rope_type"], head_dim_of(config, kind)
    if form == "dynamic":  # with a number that fixes it (see families)
        steps = torch.arange(0, dim, 2, dtype=torch.float) / dim
        stretched = settings["rope_theta"] * settings["alpha"] ** (dim / (dim - 2))
        return 1.0 / stretched**steps, 1.0
    if form == "proportional":  # of the whole head, of which the last pairs stay as they are
        pairs = dim // 2
        turned = int(settings.get("partial_rotary_factor", 1.0) * dim // 2)
        steps = torch.arange(0, 2 * turned, 2, dtype=torch.float) / dim
        frequencies = torch.zeros(pairs)
        frequencies[:turned] = 1.0 / settings["rope_theta"] ** steps
        return frequencies / (settings.get("factor") or 1.0), 1.0
    if form != "default" or config.model_type in _PARTIAL:
        dim = int(dim * settings.get("partial_rotary_factor", 1.0))
    steps = torch.arange(0, dim, 2, dtype=torch.float) / dim
    frequencies = 1.0 / settings["rope_theta"] ** steps
    if form == "yarn":
        return _ramped(settings, dim), _louder(settings)
    if form == "longrope":  # of a short sequence, as longer ones are not run (see text_part)
        name, short = "original_max_position_embeddings", settings["short_factor"]
        trained = settings.get(name, config.original_max_position_embeddings)
        factor = settings.get("factor") or config.max_position_embeddings / trained
        louder = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
        stretched = torch.tensor(short, dtype=torch.float) * settings["rope_theta"] ** steps
        return 1.0 / stretched, settings.get("attention_factor") or louder
    if form == "linear":
        frequencies = frequencies / settings["factor"]
    elif form == "llama3":
        frequencies = _stretched(frequencies, settings)
    return frequencies, 1.0


def _ramped(settings: Mapping[str, Any], dim: int) -> torch.Tensor:
    """YaRN's (arXiv 2309.00071, section 3.2): waves that turn `beta_slow` times in the trained
    length or less are longer by a factor, those of `beta_fast` stay, those between shade over."""
    base, trained = settings["rope_theta"], settings["original_max_position_embeddings"]

    def place(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = place(settings.get("beta_fast") or 32)
    high = place(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = 0.001 if low == high else high - low
    waves: torch.Tensor = base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    stays = 1 - ((torch.arange(dim // 2, dtype=torch.float) - low) / span).clamp(0, 1)
    longer: torch.Tensor = settings["factor"] * waves
    return 1.0 / longer * (1 - stays) + 1.0 / waves * stays


def _louder(settings: Mapping[str, Any]) -> float:
    """What cosines and sines are multiplied by where YaRN stretches waves (section 3.4)."""
    given, factor = settings.get("attention_factor"), settings["factor"]
    if given is not None:
        return float(given)

    def scale(share: float) -> float:
        return 0.1 * share * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, whole = settings.get("mscale"), settings.get("mscale_all_dim")
    return scale(own) / scale(whole) if own and whole else scale(1.0)


def _stretched(frequencies: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3's: long waves are longer by a factor, short ones stay, those between shade over."""
    factor, trained = settings["factor"], settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    stretched = torch.where(waves > trained / low, frequencies / factor, frequencies)
    share = (trained / waves - low) / (high - low)
    shaded = (1 - share) * stretched / factor + share * stretched
    between = (waves >= trained / high) & (waves <= trained / low)
    return torch.where(between, shaded, stretched)
