"""Partition: a model's layers over the stages of a ring."""

from __future__ import annotations

from edgespec.errors import ConfigError


def split_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """Consecutive layers for every stage as (first, end), as equal as can be, the longer first.

    Raises ConfigError if there are fewer layers than stages.
    """
    if stages > layers:
        raise ConfigError(
            f"{stages} stages for a model of {layers} layers; a stage needs at least one layer"
        )
    short, extra = divmod(layers, stages)
    blocks = []
    first = 0
    for stage in range(stages):
        end = first + short + (1 if stage < extra else 0)
        blocks.append((first, end))
        first = end
    return blocks
