"""Partition: every layer has exactly one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ConfigError
from edgespec.planning.partition import fitted_split, split_layers


@given(st.integers(1, 200), st.integers(1, 200))
def test_layers_are_split_evenly_in_order_and_completely(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ConfigError, match=f"{stages} stages for a model of {layers} layers"):
            split_layers(layers, stages)
        return
    blocks = split_layers(layers, stages)
    assert len(blocks) == stages
    assert [i for first, end in blocks for i in range(first, end)] == list(range(layers))
    sizes = [end - first for first, end in blocks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 60), st.lists(st.integers(0, 30), min_size=1, max_size=8))
def test_a_fitted_split_is_the_most_equal_one_that_fits(layers: int, most: list[int]) -> None:
    split = fitted_split(layers, most)
    if sum(most) < layers or layers < len(most) or min(most) == 0:
        assert split is None
        return
    assert split is not None
    assert sum(split) == layers
    assert all(1 <= share <= limit for share, limit in zip(split, most, strict=True))
    # Nobody has two layers more than another who could take one of them.
    room = [share for share, limit in zip(split, most, strict=True) if share < limit]
    assert max(split) - min(room, default=max(split)) <= 1
