"""Partition: every layer has exactly one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ConfigError
from edgespec.planning.partition import blocks_of, fitted_split, split_layers
from edgespec.planning.uneven import bound_layers


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


@given(st.integers(2, 60), st.lists(st.integers(0, 60), min_size=1, max_size=6), st.data())
def test_bound_layers_are_on_the_last_device(
    layers: int, most: list[int], data: st.DataObject
) -> None:
    bound = data.draw(st.integers(0, layers))
    split = fitted_split(layers, most, bound)
    others = layers - max(bound, 1) if len(most) > 1 else 0
    room = most[-1] >= bound and sum(most) >= layers and min(most) > 0
    assert (split is not None) == (room and len(most) - 1 <= others)
    if split is not None:
        assert (sum(split), split[-1] >= bound) == (layers, True)
        assert blocks_of(layers, len(split), split, bound)[-1][1] == layers


@pytest.mark.parametrize(
    ("stages", "split", "expected"),
    [
        (1, (), [(0, 35)]),
        (2, (), [(0, 13), (13, 35)]),
        (3, (), [(0, 7), (7, 13), (13, 35)]),
        (2, (5, 30), [(0, 5), (5, 35)]),
        (2, (14, 21), "divide a model of 35 layers, of which the last 22 have to be on one stage"),
        (15, (), "15 stages .* from number 13 on.; give at most 14 stages"),
    ],
)
def test_a_split_that_divides_bound_layers_is_refused(
    stages: int, split: tuple[int, ...], expected: list[tuple[int, int]] | str
) -> None:
    kinds = [*"ssssf"] * 7  # as Gemma 4 E2B has them, of which the last 20 have no keys
    bound = bound_layers(kinds, 20)
    assert (bound, bound_layers([*"sssssf"] * 7, 18), bound_layers(kinds, 0)) == (22, 20, 0)
    if isinstance(expected, list):
        assert blocks_of(35, stages, split, bound) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        blocks_of(35, stages, split, bound)
