"""Partition: every layer has exactly one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ConfigError
from edgespec.planning.partition import split_layers


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
