"""Partition: a model's layers over the stages of a ring."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from edgespec.errors import ConfigError


def blocks_of(layers: int, stages: int, split: Sequence[int] = ()) -> list[tuple[int, int]]:
    """The layers of every stage as (first, end): so many each as `split` says, or evenly.

    Raises ConfigError if the split is not one of these layers over these stages, and for fewer
    layers than stages.
    """
    if not split:
        return split_layers(layers, stages)
    if len(split) != stages or min(split) < 1 or sum(split) != layers:
        raise ConfigError(
            f"layers {','.join(map(str, split))} are no split of {layers} layers over {stages} "
            f"stage(s); give {stages} whole number(s) of at least 1 that add up to {layers}"
        )
    return _ranges(split)


def parse_split(text: str) -> tuple[int, ...]:
    """The numbers of "10,12,10"; none of "". Raises ConfigError for anything else."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdecimal() for part in parts):
        raise ConfigError(
            f"layers is {text!r}; give one number for each stage, with commas: 10,12,10"
        )
    return tuple(int(part) for part in parts)


def split_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """Consecutive layers for every stage as (first, end), as equal as can be, the longer first.

    Raises ConfigError if there are fewer layers than stages.
    """
    if stages > layers:
        raise ConfigError(
            f"{stages} stages for a model of {layers} layers; a stage needs at least one layer"
        )
    short, extra = divmod(layers, stages)
    return _ranges([short + (stage < extra) for stage in range(stages)])


def _ranges(split: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(split, initial=0)))


def fitted_split(layers: int, most: Sequence[int]) -> tuple[int, ...] | None:
    """How many layers each device gets: at most `most`, and as equal as that allows.

    None if they cannot hold all layers, or there are fewer layers than devices.
    """
    left, split = layers, [0] * len(most)
    smallest_first = sorted(range(len(most)), key=lambda device: most[device])
    for done, device in enumerate(smallest_first):
        others = len(most) - done
        split[device] = min(most[device], -(-left // others))
        left -= split[device]
    return tuple(split) if not left and min(split, default=0) > 0 else None
