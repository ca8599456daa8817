"""What models make of the kernels, interpreted: every packed form, and a layer's attention."""

from __future__ import annotations

import pytest
import torch
from support.cases import case
from support.packed_forms import FORMS

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.kernels.gpu.usable import trial
from edgespec.model.kv_cache import RowForm, TwoRegionCache
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.quantised.linear import dequantised, held_bytes, linear_from
from edgespec.model.quantised.selftest import made_up
from edgespec.model.quantised.triton_linear import TritonLinear, fits
from edgespec.model.tree_attention import (
    AttentionForm,
    JointVisibility,
    Visibility,
    seen_attention,
)
from edgespec.model.triton_rows import TritonRows

SHAPE = torch.Size((70, 512))
NAMED = [one for one in QUANTISATIONS.values() if one.kind != "none"]
EVERY = [one for one in dict.fromkeys([*NAMED, *FORMS.values()]) if one.kind != "fp8"]


def check_fp8_is_left_to_slices() -> None:
    assert not fits(FORMS["FP8"], SHAPE)


@pytest.mark.parametrize("form", EVERY, ids=lambda form: form.name)
def check_packed_forms(form: Quantisation) -> None:
    assert fits(form, SHAPE)
    packed = made_up(form, SHAPE)
    weight = dequantised(packed, SHAPE, form, torch.float64)
    layer = TritonLinear(packed, None, SHAPE, form, torch.float16, "cpu")
    rows = torch.randn(2, SHAPE[1], generator=torch.Generator().manual_seed(0)).half()
    # nf4's levels are rounded to the rows' dtype.
    limit = 2e-3 if form.kind == "nf4" else 5e-4
    assert relative_error(layer(rows), rows.double() @ weight.T) < limit


def check_the_memory_of_a_layer_is_known_before() -> None:
    """Tiles and steps that a matrix does not fill, too."""
    for form in EVERY:
        for shape in (SHAPE, torch.Size((70, 800))):
            if shape[1] % max(form.group, 256 * form.double, 1) or not fits(form, shape):
                continue
            packed = made_up(form, shape)
            for dtype in (torch.float16, torch.float32):
                both = (TritonLinear, linear_from)  # a GPU's, and a CPU's
                layers = [make(packed, None, shape, form, dtype, "cpu") for make in both]
                held = max(sum(part.nbytes for part in layer.buffers()) for layer in layers)
                with case(form.name, shape, dtype):
                    assert held <= held_bytes(form, shape, dtype) < 1.5 * held


@pytest.mark.thorough
def check_trial() -> None:
    assert trial(torch.device("cpu")) == ""


@torch.inference_mode()
@pytest.mark.parametrize(
    ("held_as", "dtype"),
    [
        (torch.float16, torch.float16),
        (torch.int8, torch.float16),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def check_attention_of_requests(held_as: torch.dtype, dtype: torch.dtype) -> None:
    """Rows of two requests, one of which begins with a stem."""
    caches = []
    for seed, length in enumerate((70, 5)):
        cache = TwoRegionCache(first_layer=0, forms=[RowForm(2, 16)], reserve=80, dtype=held_as)
        generator = torch.Generator().manual_seed(seed)
        cache.place(torch.arange(length))
        cache.append(torch.randn(2, 2, length, 16, generator=generator).half(), 0)
        cache.advance(length)
        caches.append(cache)
    caches[0].freeze(64)
    parts, held, count = [], [], 3
    for cache in caches:
        positions = cache.length + torch.tensor([0, 1, 1])
        mask = torch.ones(1, 1, count, cache.length + count, dtype=torch.bool)
        mask[0, 0, :, cache.length :] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
        parts.append(Visibility(mask, positions, cache.place(positions)))
        generator = torch.Generator().manual_seed(9)
        held.append(cache.append(torch.randn(2, 2, count, 16, generator=generator).half(), 0))
    keys, values = ([pair[number] for pair in held] for number in range(2))
    query = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    seen, form = JointVisibility(parts, [count, count]), AttentionForm(0.25, window=40)
    result = TritonRows().attention(query, keys, values, seen, form)
    expected = seen_attention(query.double(), keys, values, seen, form)
    assert result.dtype == dtype
    assert relative_error(result, expected) < (1e-3 if dtype == torch.float16 else 1e-5)
