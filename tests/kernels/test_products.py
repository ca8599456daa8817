"""Products: a row has the same bits alone and among others, in every form and every dtype."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import case
from support.packed_forms import FORMS as FILE_FORMS
from support.tiers import examples

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.kernels import compiled, products
from edgespec.model.matrices import plain_product
from edgespec.model.quantised.linear import dequantised, linear_from
from edgespec.model.quantised.selftest import made_up

FORMS = {**QUANTISATIONS, **FILE_FORMS, "ordered": replace(FILE_FORMS["AWQ"], ordered=True)}
DTYPES = {
    torch.float64: 1e-14,
    torch.float32: 2e-6,
    torch.float16: 1e-3,
    torch.bfloat16: 6e-3,
}
"""Relative errors that one rounding to the dtype may cause, and float32 sums."""
MOST = 64  # rows


@pytest.fixture(params=["compiled", "torch"], scope="module", autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """With compiled kernels, and as on a machine without a compiler."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(products, "_multiply", lambda: None)
        elif compiled.complaint("products"):
            pytest.skip("no C compiler here")
        yield request.param
    torch.set_num_threads(before)


def made(
    form: Quantisation, shape: torch.Size, dtype: torch.dtype, biased: bool, seed: int = 0
) -> tuple[products.RowProduct | torch.nn.Module, torch.Tensor, torch.Tensor | None]:
    """Some product, its weight in float64, and its bias."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(shape[0], generator=generator).to(dtype) if biased else None
    if form.kind == "none":
        weight = torch.randn(shape, generator=generator).to(dtype)
        return plain_product(weight, bias), weight.double(), bias
    packed = made_up(form, shape, seed)
    if "nested_map" in packed:
        packed["nested_map"] = torch.linspace(0.1, 1, 256)
    exact = dequantised(packed, shape, form, torch.float64)
    return linear_from(packed, bias, shape, form, dtype, "cpu"), exact, bias


def rows_of(count: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, columns, generator=generator) * 3).to(dtype)


def fitting(form: Quantisation, columns: int) -> int:
    """The next number of columns that the form fits."""
    unit = 256 if form.double and form.kind != "nf4" else max(form.group, 1)
    return -(-columns // unit) * unit


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_row_is_the_same_to_the_bit_in_any_company(way: str, dtype: torch.dtype) -> None:
    """Alone, first, last and in between, of 1 to 64 rows, whatever the others are."""
    for name, form in FORMS.items():
        if name.startswith("nf4"):
            pytest.importorskip("bitsandbytes")
        shape = torch.Size((150, fitting(form, 200)))
        multiply, exact, bias = made(form, shape, dtype, biased=True)
        assert bias is not None
        rows = rows_of(MOST, shape[1], dtype)
        whole = multiply(rows)
        expected = rows.double() @ exact.T + bias.double()
        error = (whole.double() - expected).norm() / expected.norm()
        strange = rows_of(MOST, shape[1], dtype, seed=1) * 100
        with case(name, dtype):
            assert float(error) < DTYPES[dtype]
            for row in range(MOST):
                assert torch.equal(multiply(rows[row : row + 1])[0], whole[row])
            for count in range(1, MOST + 1):
                assert torch.equal(multiply(rows[:count]), whole[:count])
            strange[-1] = rows[5]
            assert torch.equal(multiply(strange)[-1], whole[5])


@examples(60)
@given(
    name=st.sampled_from([name for name in FORMS if not name.startswith("nf4")]),
    out=st.integers(1, 200),
    columns=st.integers(1, 300),
    dtype=st.sampled_from(list(DTYPES)),
    biased=st.booleans(),
    count=st.integers(1, 80),
    cuts=st.lists(st.integers(0, 80), max_size=4),
    seed=st.integers(0, 999),
)
def test_how_rows_are_cut_changes_no_bit(
    name: str,
    out: int,
    columns: int,
    dtype: torch.dtype,
    biased: bool,
    count: int,
    cuts: list[int],
    seed: int,
) -> None:
    form = FORMS[name]
    shape = torch.Size((out, fitting(form, columns)))
    multiply, _, _ = made(form, shape, dtype, biased, seed)
    rows = rows_of(count, shape[1], dtype, seed)
    places = sorted({0, count, *(cut for cut in cuts if cut < count)})
    parts = [multiply(rows[first:end]) for first, end in pairwise(places)]
    assert torch.equal(torch.cat(parts), multiply(rows))


def test_several_products_at_once_change_no_bit(way: str) -> None:
    for name in ("none", "int4", "int8"):
        shape = torch.Size((150, fitting(FORMS[name], 200)))
        every = [made(FORMS[name], shape, torch.bfloat16, False, seed)[0] for seed in range(5)]
        each = products.EachProduct([getattr(one, "product", one) for one in every])
        rows = torch.stack([rows_of(3, shape[1], torch.bfloat16, seed) for seed in range(5)])
        alone = torch.stack([one(own) for one, own in zip(every, rows, strict=True)])
        try:
            for threads in (1, 3):
                torch.set_num_threads(threads)
                with case(name, threads):
                    assert torch.equal(each(rows), alone)
        finally:
            torch.set_num_threads(1)


def test_threads_change_no_bit(way: str) -> None:
    if way == "torch":
        pytest.skip("torch says nothing of how its threads share a product")
    for name in ("none", "int4", "int8"):
        form = FORMS[name]
        multiply, _, _ = made(form, torch.Size((1000, 256)), torch.bfloat16, biased=False)
        rows = rows_of(5, 256, torch.bfloat16)
        one = multiply(rows)
        try:
            torch.set_num_threads(3)
            three = multiply(rows)
        finally:
            torch.set_num_threads(1)
        with case(name):
            assert torch.equal(one, three)


def test_any_group_of_columns_and_every_number_of_them(way: str) -> None:
    for columns in (1, 7, 16, 17, 31, 33, 48, 100):
        for group in (1, 3, 16, 20, columns):
            if columns % group:
                continue
            for form in (FORMS["Q4_1"], FORMS["Q5_0, Q8_0"], FORMS["none"], FORMS["int8"]):
                fits = replace(form, group=group) if form.group else form
                multiply, exact, _ = made(fits, torch.Size((70, columns)), torch.float32, False)
                rows = rows_of(3, columns, torch.float32)
                expected = rows.double() @ exact.T
                size = (rows.double().abs() @ exact.abs().T).max()
                with case(fits.name, columns, group):
                    assert float((multiply(rows) - expected).abs().max() / size) < 1e-6


def test_what_is_not_finite_stays_so_in_its_own_row(way: str) -> None:
    for dtype in DTYPES:
        multiply, _, _ = made(FORMS["int4"], torch.Size((64, 64)), dtype, False)
        rows = rows_of(3, 64, dtype)
        clean = multiply(rows)
        rows[1, 5] = float("nan")
        found = multiply(rows)
        assert found[1].isnan().all()
        assert torch.equal(found[::2], clean[::2])


def test_sums_are_rounded_to_the_dtype_as_torch_rounds() -> None:
    """The nearest number, of two the even one; what is too great is infinite."""
    values = torch.cat(
        [
            torch.randn(4000, generator=torch.Generator().manual_seed(0)),
            2.0 ** torch.arange(-30, 20) * 1.0009765625,
            2.0 ** torch.arange(-30, 20) * (1 + 2**-8),
            torch.tensor([65519.0, 65520.0, 3e38, 0.0, -0.0]),
        ]
    )
    for dtype in (torch.float16, torch.bfloat16):
        # A bias alone is what is rounded: one column of zeros.
        weight = torch.zeros(len(values), 1, dtype=dtype)
        multiply = products.RowProduct(weight, (len(values), 1), dtype, bias=values)
        assert torch.equal(multiply(torch.zeros(1, 1, dtype=dtype))[0], values.to(dtype))
        shape = torch.Size((len(values), 32))
        form = FORMS["Q4_1"]
        tiled = linear_from(made_up(form, shape), values, shape, form, dtype, "cpu")
        assert torch.equal(tiled(torch.zeros(1, 32, dtype=dtype))[0], values.to(dtype))


def test_the_slower_way_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    compiled.loaded.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert compiled.load("products") is None
            assert compiled.load("products") is None
        assert "sudo apt install gcc" in compiled.complaint("products")
    finally:
        compiled.loaded.cache_clear()
    assert [record.message for record in caplog.records] == [
        "no C compiler found, so matrices are multiplied in a slower way; install gcc "
        "(`sudo apt install gcc libc6-dev`)"
    ]


@pytest.mark.parametrize("columns", [5, 13])
def test_without_a_compiler_odd_columns_change_no_bit(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: a row's bits depended on its place in the block of 16."""
    monkeypatch.setattr(products, "_multiply", lambda: None)
    for out, seed in product((1, 2, 64), range(20)):
        shape = torch.Size((out, columns))
        matrix, _, _ = made(FORMS["none"], shape, torch.float64, False, seed)
        rows = rows_of(2, columns, torch.float64, seed)
        assert torch.equal(torch.cat([matrix(rows[:1]), matrix(rows[1:])]), matrix(rows))
