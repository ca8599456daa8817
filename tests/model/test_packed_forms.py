"""Packed forms: a matrix that a file packed stands for what the file says, and is multiplied so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases import case
from support.packed_forms import FORMS, Sample, sample

from edgespec.config import FILE, QUANTISATIONS, Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised import levels
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.quantised.linear import (
    _sliced,
    dequantised,
    held_bytes,
    linear_from,
    pack,
    stored,
    stored_parts,
)

EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Relative errors of a weight that the dtype's rounding may cause."""
PRODUCT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
GROUPS = (16, 32, 64, 96, 128, -1)  # -1: a whole row
SHAPES = ((1, 256), (70, 256), (65, 768))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_weight_is_what_its_form_says_whatever_the_groups() -> None:
    for name, form in FORMS.items():
        for group in GROUPS:
            if form.double and group not in (16, 32, 64, 128):
                continue
            if form.kind in ("iq4", "fp4") and group == 16:
                continue
            for out, columns in SHAPES:
                fits = replace(form, group=group)
                if group > 0 and columns % group:
                    continue
                one = sample(fits, out, columns, seed=out)
                for dtype, bound in EXACT.items():
                    with case(name, one.form.name, out, columns, dtype):
                        found = dequantised(one.packed, one.shape, one.form, dtype)
                        assert relative_error(found, one.weight) < bound


def test_a_layer_multiplies_by_the_weight() -> None:
    for name, form in FORMS.items():
        for group in (form.group, *([] if form.double else [-1])):
            one = sample(replace(form, group=group), 150, 512)
            for dtype, bound in PRODUCT.items():
                bias = torch.linspace(-1, 1, 150).to(dtype)
                layer = linear_from(one.packed, bias, one.shape, one.form, dtype, "cpu")
                for rows in (1, 5, 33, 100):
                    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
                    expected = x.double() @ one.weight.T + bias.double()
                    with case(name, one.form.name, dtype, rows):
                        assert relative_error(layer(x), expected) < bound
                        assert relative_error(layer(x[:1]), expected[:1]) < bound


def test_no_scale_is_rounded_to_the_dtype_of_the_rows() -> None:
    for name, form in FORMS.items():
        one = sample(form, 130, 512)
        layer = linear_from(one.packed, None, one.shape, one.form, torch.bfloat16, "cpu")
        unit = torch.eye(512, dtype=torch.bfloat16)
        with case(name):
            # Each result is one weight: nothing but rounding it to bfloat16 may show.
            assert torch.equal(layer(unit), one.weight.T.float().bfloat16())


def test_the_memory_of_a_layer_is_known_before() -> None:
    samples = [sample(form, 256, 512) for form in FORMS.values()]
    weight = torch.randn(256, 512)
    for name in ("int8", "int4", "int4-g32"):
        packed = pack(weight, QUANTISATIONS[name])
        samples.append(Sample(QUANTISATIONS[name], weight.shape, packed, weight))
    for one in samples:
        for dtype in (torch.float32, torch.bfloat16):
            layer = linear_from(one.packed, None, one.shape, one.form, dtype, "cpu")
            held = sum(part.nbytes for part in layer.buffers())
            with case(one.form.name, dtype):
                assert held <= held_bytes(one.form, one.shape, dtype) < 1.25 * held


def test_the_memory_of_a_layer_with_a_table_is_known_before() -> None:
    """Of those that are looked up in slices, as FP8 on a GPU."""
    for form in [form for form in FORMS.values() if form.kind in levels.KINDS]:
        one = sample(form, 64, 256)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            layer = _sliced(one.packed, None, one.shape, one.form, dtype, "cpu")
            held = sum(part.nbytes for part in layer.buffers())
            with case(one.form.name, dtype):
                assert held <= held_bytes(one.form, one.shape, dtype)


def test_a_gpu_is_told_that_it_has_no_kernel_for_fp8(caplog: pytest.LogCaptureFixture) -> None:
    one = sample(FORMS["FP8"], 64, 256)
    linear_from(one.packed, None, one.shape, one.form, torch.bfloat16, "meta")
    assert "no kernel for FP8 on a GPU" in caplog.text


def test_parts_that_do_not_fit_are_refused() -> None:
    one = sample(FORMS["Q4_1"], 64, 256)
    codes = torch.zeros(64, 256, dtype=torch.uint8)
    scales = {name: one.packed[name] for name in ("scales", "zeros")}
    for wrong, said in (
        ({"scales": scales["scales"]}, "'zeros' .* is missing"),
        (scales | {"zeros": scales["zeros"].float()}, r"'zeros' .* is torch.float32"),
        (scales | {"scales": scales["scales"][:2]}, r"'scales' .* of \[2, 8\]"),
        (scales | {"order": torch.arange(256)}, "'order' .* is torch.int64"),
    ):
        with pytest.raises(ModelError, match=said):
            stored(codes, one.form, wrong)
    for form, columns in ((FORMS["Q4_K"], 128), (FORMS["AWQ"], 96), (Quantisation("int4"), 64)):
        with pytest.raises(ModelError, match=f"{columns} columns; "):
            stored_parts(form, torch.Size((64, columns)))
    with pytest.raises(ModelError, match="'file' is no packed form of a matrix"):
        stored_parts(FILE, torch.Size((64, 64)))
