"""Partition: a model's layers over the stages of a ring."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from edgespec.errors import ConfigError


def blocks_of(
    layers: int, stages: int, split: Sequence[int] = (), bound: int = 0
) -> list[tuple[int, int]]:
    """The layers of every stage as (first, end): so many each as `split` says, or evenly.

    `bound`: so many last layers have to be on one stage. Raises ConfigError if the split is not one
    of these layers over these stages, or divides those, and for fewer layers than stages.
    """
    if not split:
        even = split_layers(layers, stages)
        if even[-1][1] - even[-1][0] >= bound:
            return even
        if stages > layers - bound + 1:
            raise ConfigError(
                f"{stages} stages for a model of {layers} layers, {_together(layers, bound)}; give "
                f"at most {layers - bound + 1} stages"
            )
        return [*split_layers(layers - bound, stages - 1), (layers - bound, layers)]
    if len(split) != stages or min(split) < 1 or sum(split) != layers:
        raise ConfigError(
            f"layers {','.join(map(str, split))} are no split of {layers} layers over {stages} "
            f"stage(s); give {stages} whole number(s) of at least 1 that add up to {layers}"
        )
    if split[-1] < bound:
        raise ConfigError(
            f"layers {','.join(map(str, split))} divide a model of {layers} layers, "
            f"{_together(layers, bound)}; give the last stage at least {bound}"
        )
    return _ranges(split)


def _together(layers: int, bound: int) -> str:
    return (
        f"of which the last {bound} have to be on one stage (they read the keys of those from "
        f"number {layers - bound} on)"
    )


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


def fitted_split(layers: int, most: Sequence[int], bound: int = 0) -> tuple[int, ...] | None:
    """How many layers each device gets: at most `most`, and as equal as that allows; the last one
    at least `bound`.

    None if they cannot hold all layers, or there are fewer layers than devices.
    """
    left, split = layers, [0] * len(most)
    smallest_first = sorted(range(len(most)), key=lambda device: most[device])
    for done, device in enumerate(smallest_first):
        split[device] = min(most[device], -(-left // (len(most) - done)))
        left -= split[device]
    if left or min(split, default=0) < 1 or most[-1] < bound:
        return None
    if split[-1] >= bound:
        return tuple(split)
    others = fitted_split(layers - bound, most[:-1])
    return None if others is None else (*others, bound)
