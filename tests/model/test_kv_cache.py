"""The two-region cache against a list of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiers import examples

from edgespec.errors import LocalProtocolError
from edgespec.model.kv_cache import TwoRegionCache

FIRST, LAYERS, HEADS, DIM = 3, 2, 2, 4


def new_cache(reserve: int = 4) -> TwoRegionCache:
    return TwoRegionCache(
        first_layer=FIRST,
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=DIM,
        reserve=reserve,
        dtype=torch.float32,
    )


def row(label: int, layer: int, kind: int) -> torch.Tensor:
    """A recognisable row [HEADS, DIM]."""
    base = label * 1000 + layer * 100 + kind * 50
    return base + torch.arange(HEADS * DIM, dtype=torch.float32).view(HEADS, DIM)


def stacked(labels: list[int], layer: int, kind: int) -> torch.Tensor:
    if not labels:
        return torch.zeros(1, HEADS, 0, DIM)
    return torch.stack([row(label, layer, kind) for label in labels], dim=1).unsqueeze(0)


def position(label: int) -> int:
    """A position that is neither the row's slot nor in the order of labels."""
    return label * 7 % 50


def write(cache: TwoRegionCache, held: list[int], labels: list[int]) -> None:
    places = cache.place(torch.tensor([position(label) for label in labels], dtype=torch.int64))
    assert places.tolist() == [position(label) for label in held + labels]
    for layer in range(LAYERS):
        keys, values = cache.update(
            stacked(labels, layer, 0), stacked(labels, layer, 1), FIRST + layer
        )
        assert torch.equal(keys, stacked(held + labels, layer, 0))
        assert torch.equal(values, stacked(held + labels, layer, 1))
    cache.advance(len(labels))


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[str, int, list[int]]]:
    """Writes of some rows, and gathers that keep any slots in any order."""
    length, found = 0, []
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            count = draw(st.integers(1, 7))
            found.append(("write", 0, list(range(count))))
            length += count
        else:
            start = draw(st.integers(0, length))
            slots = draw(st.permutations(range(length - start)))
            kept = list(slots)[: draw(st.integers(0, length - start))]
            if draw(st.booleans()):
                kept.sort()
            found.append(("gather", start, kept))
            length = start + len(kept)
    return found


@given(operations())
@examples(150)
def test_the_cache_holds_what_a_list_would(steps: list[tuple[str, int, list[int]]]) -> None:
    cache, label = new_cache(), 0
    held: list[int] = []
    for kind, start, numbers in steps:
        if kind == "write":
            labels = [label + number for number in numbers]
            label += len(labels)
            write(cache, held, labels)
            held += labels
        else:
            cache.gather(start, np.array(numbers, np.int64))
            held = held[:start] + [held[start + number] for number in numbers]
        assert cache.length == len(held)
    write(cache, held, [label])


def test_growing_at_least_doubles_and_keeps_rows() -> None:
    cache = new_cache(reserve=4)
    write(cache, [], [0, 1, 2, 3])
    assert cache.capacity == 4
    write(cache, [0, 1, 2, 3], [4])
    assert cache.capacity == 8
    write(cache, [0, 1, 2, 3, 4], list(range(5, 30)))
    assert cache.capacity == 30


def test_growing_between_two_layers_keeps_the_first_layers_rows() -> None:
    cache = new_cache(reserve=2)
    cache.update(stacked([7, 8], 0, 0), stacked([7, 8], 0, 1), FIRST)
    # Nothing says that the second layer brings no more rows than the first.
    cache.update(stacked([7, 8, 9], 1, 0), stacked([7, 8, 9], 1, 1), FIRST + 1)
    cache.advance(2)
    keys, _ = cache.update(stacked([9], 0, 0), stacked([9], 0, 1), FIRST)
    assert torch.equal(keys, stacked([7, 8, 9], 0, 0))


def test_a_stopped_block_leaves_finite_garbage() -> None:
    cache = new_cache(reserve=1)
    cache.advance(5)
    keys, values = cache.update(stacked([1], 0, 0), stacked([1], 0, 1), FIRST)
    assert keys.shape[2] == 6
    assert cache.place(torch.tensor([5])).tolist()[5:] == [5]
    assert keys.isfinite().all()
    assert values.isfinite().all()


@pytest.mark.parametrize(
    ("start", "order"), [(0, [3]), (2, [1]), (4, [0]), (-1, [0]), (0, [-1]), (4, [])]
)
def test_slots_that_are_not_in_use_are_refused(start: int, order: list[int]) -> None:
    cache = new_cache()
    write(cache, [], [0, 1, 2])
    with pytest.raises(LocalProtocolError, match="not in use"):
        cache.gather(start, np.array(order, np.int64))
    assert cache.length == 3
