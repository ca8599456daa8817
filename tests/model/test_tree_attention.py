"""The attention function against the formula, for every kind of mask."""

import math

import numpy as np
import pytest
import torch
from support.cases import case

from edgespec.model.row_codes import CODED, as_held, decoded
from edgespec.model.tree_attention import (
    AttentionForm,
    JointVisibility,
    Visibility,
    tree_attention,
    tree_mask,
)


def seen_by(mask: torch.Tensor) -> Visibility:
    """Of rows and slots whose positions nobody asks for."""
    return Visibility(mask, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def forms() -> tuple[AttentionForm, ...]:
    """One of each kind, for 4 heads."""
    plain = AttentionForm(0.3)
    return plain, plain._replace(softcap=2.0), plain._replace(sinks=torch.randn(4))


def by_formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """One row and head at a time, over the visible slots alone."""
    rows, heads, dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(rows, heads, dim, dtype=query.dtype)
    for head in range(heads):
        for index in range(rows):
            seen = mask[0, 0, index].nonzero()[:, 0]
            scores = (key[0, head // group, seen] @ query[index, head]) * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(scores, dim=0)
            out[index, head] = weights @ value[0, head // group, seen]
    return out.flatten(1)


def test_keys_and_values_may_be_narrower_than_the_rows() -> None:
    query, both = torch.randn(3, 4, 16), torch.randn(2, 1, 2, 9, 16)
    seen = seen_by(torch.ones(1, 1, 3, 9, dtype=torch.bool))
    for dtype in (torch.float16, torch.bfloat16, CODED):
        key, value = (as_held(one, CODED) if dtype == CODED else one.to(dtype) for one in both)
        pieces = [held.split((4, 5), 2) for held in (key, value)]
        wide = [decoded(held, 16, torch.float32) for held in (key, value)]
        for form in forms():
            expected = tree_attention(query, *wide, seen, form)
            with case(dtype, form):
                assert torch.equal(tree_attention(query, key, value, seen, form), expected)
                cut = tree_attention(query, *pieces, seen, form)
                torch.testing.assert_close(cut, expected)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_row_attends_to_what_it_sees(dtype: torch.dtype, softcap: float | None) -> None:
    for heads in ((4, 4), (4, 2), (6, 1)):
        for rows, slots in ((1, 1), (1, 40), (7, 7), (9, 60), (64, 64)):
            with case(heads, rows, slots):
                assert_attends_to_what_it_sees(heads, rows, slots, dtype, softcap)


def assert_attends_to_what_it_sees(
    heads: tuple[int, int], rows: int, slots: int, dtype: torch.dtype, softcap: float | None
) -> None:
    """Random rows with a random mask, compared with the formula."""
    generator = torch.Generator().manual_seed(rows * 100 + slots)
    query = torch.randn(rows, heads[0], 16, generator=generator, dtype=torch.float64)
    key = torch.randn(1, heads[1], slots, 16, generator=generator, dtype=torch.float64)
    value = torch.randn(1, heads[1], slots, 16, generator=generator, dtype=torch.float64)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = torch.rand(1, 1, rows, slots, generator=generator) > 0.6
    own = torch.arange(slots - rows, slots)
    mask[0, 0, torch.arange(rows), own] = True
    mask[0, 0, 0] = False
    mask[0, 0, 0, own[0]] = True  # one row sees itself alone
    scaling = 0.9 / math.sqrt(16)
    out = tree_attention(query, key, value, seen_by(mask), AttentionForm(scaling, softcap))
    assert out.dtype == dtype
    assert out.shape == (rows, heads[0] * 16)
    exact = by_formula(query.double(), key.double(), value.double(), mask, scaling, softcap)
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    if softcap is not None:  # the softmax is taken in float32, and scores pass through tanh
        tolerance = {torch.float64: 1e-6, torch.float32: 5e-6, torch.bfloat16: 5e-2}[dtype]
    assert (out.double() - exact).abs().max() < tolerance
    assert torch.equal(out[0, :16], value[0, 0, own[0]])


def test_views_into_a_larger_store_are_read_correctly() -> None:
    store = torch.randn(2, 100, 8)
    key = store.unsqueeze(0)[:, :, :30]
    query, seen = torch.randn(3, 4, 8), seen_by(torch.ones(1, 1, 3, 30, dtype=torch.bool))
    for form in forms():
        out = tree_attention(query, key, key, seen, form)
        dense = key.contiguous()
        whole = tree_attention(query, dense, dense, seen, form)
        assert torch.allclose(out, whole, atol=1e-6)


def test_slots_that_nobody_sees_may_hold_anything_finite() -> None:
    key = torch.randn(1, 2, 5, 8)
    query, mask = torch.randn(1, 4, 8), torch.ones(1, 1, 1, 5, dtype=torch.bool)
    mask[..., 2] = False
    spoilt = key.clone()
    spoilt[:, :, 2] = 1e30
    for form in forms():
        one = tree_attention(query, key, key, seen_by(mask), form)
        other = tree_attention(query, spoilt, spoilt, seen_by(mask), form)
        assert torch.equal(one, other)


def test_a_window_counts_positions_and_not_slots() -> None:
    # Slots: three committed rows, two children of the last, a child of the first child.
    slots = torch.tensor([0, 1, 2, 3, 3, 4])
    mask = tree_mask(3, np.array([[True, False, True]]))
    seen = Visibility(mask, slots[-1:], slots)
    assert seen.mask().tolist() == [[[[True, True, True, True, False, True]]]]
    assert seen.mask(3).tolist() == [[[[False, False, True, True, False, True]]]]
    assert seen.mask(2).tolist() == [[[[False, False, False, True, False, True]]]]
    assert seen.mask(1).tolist() == [[[[False, False, False, False, False, True]]]]
    assert torch.equal(seen.mask(99), seen.mask())


def test_a_window_of_the_attention_is_that_of_its_mask() -> None:
    slots = torch.arange(9)
    key, query = torch.randn(1, 2, 9, 8), torch.randn(2, 4, 8)
    mask = tree_mask(7, np.tri(2, dtype=np.bool_))
    seen = Visibility(mask, slots[-2:], slots)
    near = mask & (slots[-2:, None] - slots[None, :] < 4)
    out = tree_attention(query, key, key, seen, AttentionForm(0.3, window=4))
    assert torch.allclose(out, by_formula(query, key, key, near, 0.3), atol=1e-6)
    assert not torch.allclose(out, by_formula(query, key, key, mask, 0.3), atol=1e-3)


def test_every_kind_of_mask_is_made_once() -> None:
    seen = Visibility(
        tree_mask(2, np.eye(2, dtype=np.bool_)), torch.tensor([2, 2]), torch.arange(4)
    )
    assert seen.mask(2, group=3) is seen.mask(2, group=3)
    assert seen.mask(2, group=3).shape == (1, 1, 6, 4)
    assert torch.equal(seen.mask(2, group=3)[:, :, 4:], seen.mask(2))
    assert seen.mask(None, group=3) is not seen.mask(2, group=3)
    bias = seen.bias(torch.float32, 2, 3)
    assert seen.bias(torch.float32, 2, 3) is bias
    assert torch.equal(bias == 0, seen.mask(2, group=3))
    assert torch.equal(bias == float("-inf"), ~seen.mask(2, group=3))


def test_the_mask_shows_committed_slots_and_what_sees_says() -> None:
    sees = np.array([[True, False, True, False], [False, True, False, True]])
    mask = tree_mask(2, sees)
    assert mask.shape == (1, 1, 2, 6)
    assert mask[0, 0].tolist() == [
        [True, True, True, False, True, False],
        [True, True, False, True, False, True],
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "softcap", "sinks", "window"])
def test_keys_and_values_in_pieces_are_read_as_if_they_were_one(
    dtype: torch.dtype, form: str
) -> None:
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    plain = AttentionForm(0.3)
    how = {
        "plain": plain,
        "softcap": plain._replace(softcap=1.5),
        "sinks": plain._replace(sinks=some(4)),
        "window": plain._replace(window=9),
    }[form]
    for rows, slots in ((1, 20), (5, 40)):
        query, key, value = some(rows, 4, 8), some(1, 2, slots, 8), some(1, 2, slots, 8)
        places = torch.arange(slots)
        mask = tree_mask(slots - rows, np.tri(rows, dtype=np.bool_))
        seen = Visibility(mask, places[-rows:], places)
        whole = tree_attention(query, key, value, seen, how)
        for cuts in ([3, slots - 3], [1, 11, slots - 12]):
            pieces = tuple(key.split(cuts, 2)), tuple(value.split(cuts, 2))
            out = tree_attention(query, *pieces, seen, how)
            assert out.shape == whole.shape
            assert out.is_contiguous()
            tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
            if form == "softcap":  # its softmax is taken in float32
                tolerance = max(tolerance, 1e-6)
            assert (out.double() - whole.double()).abs().max() < tolerance
        beside = JointVisibility([seen, seen], [rows, rows])
        queries = torch.cat([query, query])
        both = tree_attention(queries, [key, pieces[0]], [value, pieces[1]], beside, how)
        assert torch.equal(both[:rows], whole)
        assert torch.equal(both[rows:], out)
