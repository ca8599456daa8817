"""A mixture as compiled code runs it is what torch makes of it; each row by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.cases import case

from edgespec.config import Quantisation
from edgespec.kernels.rows import CLAMPED, compiled_rows
from edgespec.model.matrices import Product, plain_product
from edgespec.model.mixture import BIAS, ROUTER, Mixture, MixtureForm, SharedMlp
from edgespec.model.row_math import BATCHED, CompiledRows, RowMath
from edgespec.model.source import TensorSource

CPU = torch.device("cpu")
HIDDEN, INNER, WIDE = 24, 20, 28
PLAIN = MixtureForm(HIDDEN, INNER, 8, 3, biased=False, normed=True, softmax=True)
FORMS = {
    "softmax": PLAIN,
    "not normed": replace(PLAIN, normed=False, scaling=1.7),
    "sigmoid": replace(PLAIN, softmax=False, least=1e-6, biased=True),
    "wide, in groups": replace(
        PLAIN, softmax=False, biased=True, wide=True, groups=4, kept_groups=2, scaling=2.5
    ),
    "best of a group": replace(PLAIN, normed=False, groups=4, kept_groups=2, best=1),
    "floor": replace(PLAIN, wide=True, biased=True, floor=0.9),
    "clamped": replace(PLAIN, clamp=(1.702, 0.4), affine=True),
    "ungated": replace(PLAIN, gated=False),
    "all of them": replace(PLAIN, active=8),
}


class Drawn:
    """A source of the random tensors of a form, but for those that are given."""

    path, mapped = Path("drawn"), False

    def __init__(self, form: MixtureForm, **given: torch.Tensor) -> None:
        random = torch.Generator().manual_seed(4)
        shapes = form.shapes().items()
        self._tensors = {n: torch.randn(shape, generator=random) * 0.5 for n, shape in shapes}
        self._tensors |= given

    def form(self, name: str) -> Quantisation:
        return Quantisation()

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def mixture(
    form: MixtureForm, dtype: torch.dtype, math: RowMath, shared: str = "", **given: torch.Tensor
) -> Mixture:
    """One with an MLP beside it, if `shared`: "all" of it counts, or a "share"."""
    activation = CLAMPED if form.affine else "silu" if form.gated else "relu2"
    source, beside = cast(TensorSource, Drawn(form, **given)), None
    if shared:
        beside = mlp(dtype)
        beside = beside if shared == "share" else beside._replace(share=None)
    return Mixture(form, activation, "", source, dtype, CPU, math, beside)


def mlp(dtype: torch.dtype) -> SharedMlp:
    random = torch.Generator().manual_seed(9)
    both, down, share = (
        plain_product((torch.randn(shape, generator=random) * 0.5).to(dtype))
        for shape in ((2 * WIDE, HIDDEN), (HIDDEN, WIDE), (1, HIDDEN))
    )
    return SharedMlp(WIDE, both, down, share)


@pytest.fixture(scope="module")
def math() -> CompiledRows:
    kernels = compiled_rows()
    if kernels is None:
        pytest.skip("there is no C compiler")
    return CompiledRows(kernels)


BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.15, torch.float16: 0.02}


def test_it_is_what_torch_makes_of_it_and_each_row_is_by_itself(math: CompiledRows) -> None:
    for dtype, bound in BOUNDS.items():
        for name, form in FORMS.items():
            for shared in ("", "all", "share") if form.gated and not form.affine else ("",):
                with case(dtype, name, shared):
                    rows = torch.randn(17, HIDDEN, generator=torch.Generator().manual_seed(2))
                    rows = rows.to(dtype)
                    made, exact = (mixture(form, dtype, how, shared) for how in (math, BATCHED))
                    assert made.compiled is not None
                    assert exact.compiled is None
                    found, wanted = made(rows), exact(rows).double()
                    off = (found.double() - wanted).abs() / (1 + wanted.abs())
                    # In 16 bit a row whose last two are nearly equal may go through another.
                    few = dtype in (torch.bfloat16, torch.float16)
                    assert float(off.amax(1).sort().values[-3 if few else -1]) < bound
                    assert torch.equal(torch.cat([made(row[None]) for row in rows]), found)
                    assert torch.equal(made(rows.flip(0)).flip(0), found)


def test_of_equal_experts_the_first_are_taken(math: CompiledRows) -> None:
    form = replace(PLAIN, active=2)
    alike: dict[str, Any] = {ROUTER: torch.ones(8, HIDDEN)}
    rows = torch.randn(3, HIDDEN)
    two = replace(form, experts=2)
    first = Drawn(form, **alike)
    given = {name: first.tensor(name) for name in two.shapes()} | {ROUTER: torch.ones(2, HIDDEN)}
    wanted = mixture(two, torch.float32, math, **given)(rows)
    assert torch.equal(mixture(form, torch.float32, math, **alike)(rows), wanted)


def test_what_is_no_number_stays_in_its_row(math: CompiledRows) -> None:
    """And no expert is chosen twice: there is room for so many rows of each."""
    bias = torch.tensor([0, torch.nan, -torch.inf, 0, -torch.inf, 0, torch.nan, 0])
    form = replace(PLAIN, groups=4, kept_groups=2, biased=True)
    for seed in range(20):
        rows = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(seed))
        broken = rows.clone()
        broken[2] = torch.nan
        for given in ({BIAS: torch.zeros(8)}, {BIAS: bias}):
            made = mixture(form, torch.float32, math, **given)
            whole, found = made(rows), made(broken)
            assert found[2].isnan().all()
            assert torch.equal(found[[0, 1, 3]], whole[[0, 1, 3]])


def test_a_share_that_is_not_compiled_is_not_left_out(math: CompiledRows) -> None:
    """All of the MLP counted."""
    beside = mlp(torch.float32)._replace(share=cast(Product, lambda rows: rows[:, :1]))
    parts = PLAIN, "silu", "", cast(TensorSource, Drawn(PLAIN)), torch.float32, CPU
    made, exact = (Mixture(*parts, how, beside) for how in (math, BATCHED))
    assert made.compiled is None
    rows = torch.randn(3, HIDDEN)
    assert torch.allclose(made(rows), exact(rows), atol=1e-5)


def test_a_bias_chooses_and_does_not_count(math: CompiledRows) -> None:
    form = replace(PLAIN, active=1, biased=True, normed=False)
    rows, last = torch.randn(3, HIDDEN), torch.zeros(8)
    last[7] = 9.0
    made = mixture(form, torch.float32, math, **{BIAS: last})
    gate_up, down = made.experts[7]
    router = Drawn(form).tensor(ROUTER)
    shares = (rows @ router.T).softmax(1)[:, 7:]
    exact = down(math.gated(gate_up(rows), "silu")) * shares
    assert torch.allclose(made(rows), exact, atol=1e-6)
