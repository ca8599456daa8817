"""The attention function against the formula, for every kind of mask."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from edgespec.errors import ModelError
from edgespec.model.tree_attention import tree_attention, tree_mask


def by_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """One row and head at a time, over the visible slots alone."""
    _, heads, rows, dim = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(1, rows, heads, dim, dtype=query.dtype)
    for head in range(heads):
        for index in range(rows):
            seen = mask[0, 0, index].nonzero()[:, 0]
            scores = (key[0, head // group, seen] @ query[0, head, index]) * scaling
            weights = torch.softmax(scores, dim=0)
            out[0, index, head] = weights @ value[0, head // group, seen]
    return out


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (1, 40), (7, 7), (9, 60), (64, 64)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_row_attends_to_what_it_sees(
    heads: tuple[int, int], rows: int, slots: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + slots)
    query = torch.randn(1, heads[0], rows, 16, generator=generator, dtype=torch.float64)
    key = torch.randn(1, heads[1], slots, 16, generator=generator, dtype=torch.float64)
    value = torch.randn(1, heads[1], slots, 16, generator=generator, dtype=torch.float64)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    mask = torch.rand(1, 1, rows, slots, generator=generator) > 0.6
    own = torch.arange(slots - rows, slots)
    mask[0, 0, torch.arange(rows), own] = True
    mask[0, 0, 0] = False
    mask[0, 0, 0, own[0]] = True  # one row sees itself alone
    scaling = 0.9 / math.sqrt(16)
    out, weights = tree_attention(nn.Module(), query, key, value, mask, scaling)
    assert weights is None
    assert out.dtype == dtype
    assert out.shape == (1, rows, heads[0], 16)
    exact = by_formula(query.double(), key.double(), value.double(), mask, scaling)
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-2}[dtype]
    assert (out.double() - exact).abs().max() < tolerance
    assert torch.equal(out[0, 0, 0], value[0, 0, own[0]])


def test_views_into_a_larger_store_are_read_correctly() -> None:
    store = torch.randn(2, 100, 8)
    key = store.unsqueeze(0)[:, :, :30]
    query, mask = torch.randn(1, 4, 3, 8), torch.ones(1, 1, 3, 30, dtype=torch.bool)
    out, _ = tree_attention(nn.Module(), query, key, key, mask, 0.3)
    whole, _ = tree_attention(nn.Module(), query, key.contiguous(), key.contiguous(), mask, 0.3)
    assert torch.allclose(out, whole, atol=1e-6)


@pytest.mark.parametrize("extra", [{"softcap": 30.0}, {"sliding_window": 128}, {"dropout": 0.1}])
def test_what_it_would_leave_out_is_refused(extra: dict[str, float]) -> None:
    some = torch.zeros(1, 1, 1, 4)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(ModelError, match="does not compute"):
        tree_attention(nn.Module(), some, some, some, mask, 1.0, **extra)  # type: ignore[arg-type]


def test_the_mask_shows_committed_slots_and_what_sees_says() -> None:
    sees = np.array([[True, False, True, False], [False, True, False, True]])
    mask = tree_mask(2, sees)
    assert mask.shape == (1, 1, 2, 6)
    assert mask[0, 0].tolist() == [
        [True, True, True, False, True, False],
        [True, True, False, True, False, True],
    ]
