"""The two-region cache against a list of rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiers import examples

from edgespec.errors import LocalProtocolError
from edgespec.model.kv_cache import STEP, RowForm, SharedCaches, Stem, TwoRegionCache
from edgespec.tree.stems import LEAST_ROWS, Stems

FIRST, LAYERS, HEADS, DIM = 3, 2, 2, 4


def new_cache(reserve: int = 4) -> TwoRegionCache:
    return TwoRegionCache(
        first_layer=FIRST,
        forms=[RowForm(HEADS, DIM)] * LAYERS,
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


def test_slots_are_given_as_they_are_used_and_growing_keeps_rows() -> None:
    cache, held, copied = new_cache(reserve=100), [], 0
    assert cache.capacity == 2 * STEP
    for label in range(1500):
        before = cache.capacity
        if label % 700 == 0 or label + 1 > before:
            write(cache, held, [label])
        else:
            cache.place(torch.tensor([position(label)]))
            for layer in range(LAYERS):
                cache.update(stacked([label], layer, 0), stacked([label], layer, 1), FIRST + layer)
            cache.advance(1)
        held.append(label)
        copied += before if cache.capacity > before else 0
        assert label + 1 <= cache.capacity <= max(2 * STEP, 1.125 * (label + 1) + STEP)
    assert copied < 9 * len(held), "each row is copied eight times or so"


def test_growing_between_two_layers_keeps_the_first_layers_rows() -> None:
    cache = new_cache(reserve=2)
    labels = list(range(STEP - 2))
    write(cache, [], labels)
    cache.update(stacked([7, 8], 0, 0), stacked([7, 8], 0, 1), FIRST)
    # Nothing says that the second layer brings no more rows than the first.
    cache.update(stacked([7, 8, 9], 1, 0), stacked([7, 8, 9], 1, 1), FIRST + 1)
    cache.advance(2)
    keys, _ = cache.update(stacked([9], 0, 0), stacked([9], 0, 1), FIRST)
    assert torch.equal(keys, stacked([*labels, 7, 8, 9], 0, 0))


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


def test_stems_are_held_once_and_read_by_all_who_hold_them() -> None:
    """Forks of forks, each with rows of its own, against lists of rows."""
    caches, stems = SharedCaches(new_cache), Stems()
    held: dict[int, list[int]] = {1: []}
    caches.open(1, 4)
    stems.open(1)

    def grow(request: int, labels: list[int]) -> None:
        if not caches[request].stems:
            write(caches[request], held[request], labels)
        else:
            cache = caches[request]
            places = cache.place(torch.tensor([position(label) for label in labels]))
            assert places.tolist() == [position(label) for label in held[request] + labels]
            for layer in range(LAYERS):
                new = stacked(labels, layer, 0), stacked(labels, layer, 1)
                for kind, pieces in enumerate(cache.update(*new, FIRST + layer)):
                    assert isinstance(pieces, tuple)
                    assert torch.equal(
                        torch.cat(pieces, 2), stacked(held[request] + labels, layer, kind)
                    )
            cache.advance(len(labels))
        held[request] += labels

    def fork(request: int, base: int, rows: int) -> tuple[int, int, int, int]:
        how = stems.fork(request, base, rows, stems.shareable(base, rows), len(held[base]))
        caches.fork(request, base, how)
        held[request] = held[base][:rows]
        return how.split, how.frozen, how.stems, how.copied

    def check() -> None:
        for request in held:
            cache = caches[request]
            assert cache.length == len(held[request])
            assert [stem.rows for stem in cache.stems] == [n for n, _ in stems.shares(request)]
        rows = sum(map(len, held.values())) - stems.saved
        assert caches.rows == rows
        spare = sum(caches[r].capacity - len(held[r]) for r in held)
        assert caches.nbytes == (rows + spare) * LAYERS * 2 * HEADS * DIM * 4

    grow(1, list(range(200)))
    assert fork(2, 1, 120) == (0, 120, 1, 0), "rows of its own become a stem"
    check()
    grow(1, [300, 301])
    grow(2, list(range(400, 440)))
    assert fork(3, 2, 120) == (0, 0, 1, 0), "a whole stem"
    grow(3, [500])
    assert fork(4, 3, 60) == (60, 0, 1, 0), "the stem is split for all"
    assert [len(caches[n].stems) for n in (1, 2, 3, 4)] == [2, 2, 2, 1]
    assert [n for n, _ in stems.shares(1)] == [60, 60]
    assert [n for _, n in stems.shares(1)] == [4, 3]
    assert fork(5, 1, 60 + LEAST_ROWS - 1) == (0, 0, 1, LEAST_ROWS - 1), "few rows are copied"
    check()
    for request in range(1, 6):
        grow(request, [600 + request])
        # Its newest rows change places, and one goes.
        start = len(held[request]) - 1
        caches[request].gather(start, np.array([], np.int64))
        held[request].pop()
    check()
    with pytest.raises(LocalProtocolError, match="shared rows"):
        caches[1].gather(119, np.array([], np.int64))
    for request in (1, 3, 2):
        caches.close(request)
        stems.close(request)
        del held[request]
        check()
    assert stems.saved == 60
    for request in (4, 5):
        caches.close(request)
        stems.close(request)
    assert (caches.rows, caches.nbytes, stems.saved) == (0, 0, 0)


def test_a_stem_is_a_copy_of_its_rows() -> None:
    cache = new_cache(reserve=4)
    write(cache, [], list(range(100)))
    cache.freeze(90)
    (stem,) = cache.stems
    assert isinstance(stem, Stem)
    assert (stem.rows, cache.length, cache.capacity) == (90, 100, 90 + STEP)
    assert stem.nbytes == 90 * LAYERS * 2 * HEADS * DIM * 4
