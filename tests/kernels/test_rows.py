"""Compiled rows: what they compute, and that nothing beside a row changes a bit of it."""

from __future__ import annotations

import ctypes
import math
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case

from edgespec.kernels import compiled
from edgespec.kernels.rows import (
    CLAMPED,
    LAST,
    PAIRED,
    UNGATED,
    WHOLE,
    RowKernels,
    Runs,
    compiled_rows,
    joined,
)
from edgespec.model.row_math import Taps
from edgespec.model.tree_attention import Visibility, tree_mask

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
WIDTHS = (1, 5, 33, 64, 100, 576)


@pytest.fixture(scope="module")
def kernels() -> RowKernels:
    found = compiled_rows()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def some(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Equal but for one rounding."""
    off = (found.double() - exact).abs() / exact.abs().clamp(min=1)
    assert float(off.max()) < ROUNDING[found.dtype]


def test_16_bit_numbers_are_read_and_rounded_as_torch_does(kernels: RowKernels) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    borders = torch.tensor([1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0xFFFF])
    for dtype in (torch.float16, torch.bfloat16):
        rows = every.view(dtype)[None]
        # Adding nothing reads a number and rounds it again.
        same = kernels.add(rows, torch.zeros_like(rows), 1.0)
        whole = ~rows.isnan()
        assert torch.equal(same[whole], rows[whole] + 0)
        assert torch.equal(same.isnan(), rows.isnan())
        # Sums of two have more digits than either: at, above and below the middle of two numbers.
        other = every.roll(int(borders[3])).view(dtype)[None].nan_to_num(0, 0, 0)
        for scale in (1.0, 2.0**-8, 2.0**-11):
            found = kernels.add(rows, other, scale)
            exact = torch.addcmul(rows.float(), other.float(), torch.tensor(scale)).to(dtype)
            finite = ~exact.isnan()
            assert torch.equal(found[finite], exact[finite])


def test_norms_sums_and_gates_are_the_formulas(kernels: RowKernels) -> None:
    for dtype in DTYPES:
        for n in WIDTHS:
            with case(dtype, n):
                rows, more, gain = some(5, n, dtype=dtype), some(5, n, seed=1, dtype=dtype), some(n)

                def normed(x: torch.Tensor, gain: torch.Tensor = gain) -> torch.Tensor:
                    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
                    return x.double() * scale * gain

                if dtype != torch.float64:
                    near(kernels.norm(rows, gain, 1e-5), normed(rows))
                    summed, then = kernels.add_and_norm(rows, more, 0.3, gain, gain, 1e-5)
                    near(summed, rows.double() + 0.3 * normed(more))
                    near(then, normed(summed))
                    assert torch.equal(summed, kernels.add(rows, more, 0.3, gain, 1e-5))
                near(kernels.add(rows, more, 0.3), rows.double() + 0.3 * more.double())
                both = torch.cat((rows * 4, more), 1)
                gate, up = both.double().chunk(2, 1)
                for name, exact in (
                    ("silu", torch.nn.functional.silu(gate)),
                    ("gelu", torch.nn.functional.gelu(gate)),
                    ("gelu_pytorch_tanh", torch.nn.functional.gelu(gate, approximate="tanh")),
                ):
                    near(kernels.gated(both, name), exact * up)


def test_gates_hold_for_all_sizes_of_numbers(kernels: RowKernels) -> None:
    gate = torch.linspace(-120, 120, 9600).reshape(8, -1)
    both = torch.cat((gate, torch.ones_like(gate)), 1)
    exact = torch.nn.functional.silu(gate.double())
    found = kernels.gated(both, "silu")
    assert float((found.double() / exact - 1)[gate.abs() < 86].abs().max()) < 1e-6
    assert float((found.double() - exact).abs()[gate < -86].max()) < 1e-33
    infinite = torch.tensor([[math.inf, -math.inf, math.nan, 1.0, 1.0, 1.0]])
    made = kernels.gated(infinite, "silu")[0]
    assert made[0] == math.inf
    assert made[2].isnan()
    alone = kernels.gated(torch.tensor([[math.inf, -math.inf, math.nan, -2.0, 3.0]]), UNGATED)
    assert torch.equal(alone.nan_to_num(7.0, 8.0), torch.tensor([[8.0, 0.0, 7.0, 0.0, 9.0]]))


def test_heads_are_normed_and_turned_by_their_positions(kernels: RowKernels) -> None:
    positions = torch.tensor([0, 1, 7, 100_000])
    frequencies = 10_000.0 ** -(torch.arange(0, 16, 2) / 16)
    cosines, sines = kernels.angles(positions, frequencies, 1.25)
    angles = (positions.float()[:, None] * frequencies).double()
    assert torch.allclose(cosines.double(), angles.cos() * 1.25, atol=3e-7)
    assert torch.allclose(sines.double(), angles.sin() * 1.25, atol=3e-7)
    for dtype in DTYPES[:3]:
        for gains in (None, (some(20), some(20, seed=1))):
            qkv = some(4, 4 + 2 * 2, 20, seed=2, dtype=dtype)
            exact = qkv.double()
            if gains is not None:
                scale = torch.rsqrt(exact[:, :6].square().mean(-1, keepdim=True) + 1e-6)
                of = torch.cat((gains[0].repeat(4, 1), gains[1].repeat(2, 1)))
                exact[:, :6] *= scale * of
            one, other = exact[:, :6, :8].clone(), exact[:, :6, 8:16].clone()
            c, s = cosines.double()[:, None], sines.double()[:, None]
            exact[:, :6, :8] = one * c - other * s
            exact[:, :6, 8:16] = other * c + one * s
            kernels.rotate(qkv, 4, 2, (cosines, sines), gains, 1e-6)
            near(qkv, exact)


def test_all_heads_are_normed_as_one_row_or_behind_their_turning(kernels: RowKernels) -> None:
    """And neighbours are turned together, and queries multiplied by a number of their row."""
    cosines, sines = kernels.angles(torch.arange(4), torch.tensor([1.0, 0.3, 0.1]), 1.0)
    c, s, times = cosines.double()[:, None], sines.double()[:, None], torch.linspace(1, 2, 4)
    for dtype in DTYPES[:3]:
        for ways in range(8):
            heads = (4, 2) if ways & WHOLE else (1, 1)
            gains = some(heads[0] * 10), some(heads[1] * 10, seed=1)
            qkv = some(4, 8, 10, seed=2, dtype=dtype)
            parts = list(qkv.double().split((4, 2, 2), 1))
            for number, gain in enumerate(gains):
                for last in (False, True):
                    if last == bool(ways & LAST):
                        rows = parts[number].flatten(1).unflatten(1, (-1, gain.shape[0]))
                        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
                        parts[number] = (rows * scale * gain).flatten(1).view(4, -1, 10)
                    if not last:
                        apart = slice(0, 6, 2), slice(1, 6, 2)
                        own = apart if ways & PAIRED else (slice(0, 3), slice(3, 6))
                        one, other = (parts[number][..., at].clone() for at in own)
                        parts[number][..., own[0]] = one * c - other * s
                        parts[number][..., own[1]] = other * c + one * s
            parts[0] *= times[:, None, None]
            with case(dtype, ways):
                kernels.rotate(qkv, 4, 2, (cosines, sines, times), gains, 1e-6, ways)
                near(qkv, torch.cat(parts, 1))


def test_layer_norms_and_the_clamped_gate_are_the_formulas(kernels: RowKernels) -> None:
    for dtype in DTYPES[:3]:
        for n in WIDTHS:
            rows, gain = some(5, n, dtype=dtype) + 3, some(n)
            exact = torch.nn.functional.layer_norm(rows.double(), [n], gain.double(), None, 1e-5)
            both = torch.cat((rows - 3, some(5, n, seed=1, dtype=dtype)), 1) * 4
            gate, up = both.double().chunk(2, 1)
            gate = gate.clamp(max=2.5)
            gated = (up.clamp(-2.5, 2.5) + 1) * gate * torch.sigmoid(1.702 * gate)
            with case(dtype, n):
                if n > 1:
                    near(kernels.norm(rows, gain, 1e-5, centred=True), exact)
                near(kernels.gated(both, CLAMPED, (1.702, 2.5)), gated)


def test_runs_are_those_of_the_mask(kernels: RowKernels) -> None:
    random = np.random.default_rng(3)
    for rows, slots in ((1, 1), (3, 40), (30, 9), (64, 700)):
        for share in (0.02, 0.5, 1.0):
            mask = torch.from_numpy(random.random((rows, slots)) < share)
            places = torch.from_numpy(np.sort(random.integers(0, slots, slots)))
            at = torch.from_numpy(random.integers(0, slots, rows))
            for window in (None, 1, 5):
                runs = kernels.runs(mask[None, None], at, places, window)
                seen = mask if window is None else mask & (at[:, None] - places[None] < window)
                found = torch.zeros_like(mask)
                for row in range(rows):
                    for first, last in runs.ends[runs.firsts[row] : runs.firsts[row + 1]].tolist():
                        assert not found[row, max(0, first - 1) : last].any(), "runs do not touch"
                        found[row, first:last] = True
                assert torch.equal(found, seen)


class Attended:
    """Rows of some requests over what each holds, and what they see."""

    def __init__(self, kernels: RowKernels, dtype: torch.dtype, head_dim: int) -> None:
        self.kernels, self.dtype, self.head_dim = kernels, dtype, head_dim

    def some(self, *shape: int, seed: int) -> torch.Tensor:
        return some(*shape, self.head_dim, seed=seed, dtype=self.dtype)

    def runs(self, mask: torch.Tensor) -> Runs:
        nothing = torch.zeros(max(mask.shape), dtype=torch.int64)
        return self.kernels.runs(mask, nothing, nothing, None)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | tuple[torch.Tensor, ...],
        value: torch.Tensor | tuple[torch.Tensor, ...],
        mask: torch.Tensor,
        **how: float | torch.Tensor | None,
    ) -> torch.Tensor:
        keys = (key,) if isinstance(key, torch.Tensor) else key
        values = (value,) if isinstance(value, torch.Tensor) else value
        softcap, sinks = how.get("softcap"), how.get("sinks")
        return self.kernels.attention(
            query, [keys], [values], [len(query)], self.runs(mask), 0.3, softcap, sinks
        )


FORMS = ({}, {"softcap": 2.0}, {"sinks": some(6, seed=9)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_sees_its_slots_in_their_order_and_nothing_else(
    kernels: RowKernels, dtype: torch.dtype
) -> None:
    """Rows among others, in a cache with more slots in other places and in pieces, and alone."""
    random = np.random.default_rng(1)
    for head_dim in (8, 20, 68):
        attended = Attended(kernels, dtype, head_dim)
        for rows, slots in ((2, 3), (5, 70), (40, 300)):
            query = attended.some(rows, 6, seed=1)
            key, value = attended.some(1, 2, slots, seed=2), attended.some(1, 2, slots, seed=3)
            mask = torch.from_numpy(random.random((rows, slots)) < 0.7)
            mask[:, 0] = True
            cut = tuple(np.sort(random.integers(1, slots, 2)).tolist())
            sizes = [n for n in (cut[0], cut[1] - cut[0], slots - cut[1]) if n]
            in_pieces = key.split(sizes, 2), value.split(sizes, 2)
            for form in FORMS:
                with case(head_dim, rows, slots, form):
                    whole = attended(query, key, value, mask, **form)
                    assert torch.equal(attended(query, *in_pieces, mask, **form), whole)
                    for row in range(0, rows, 1 + rows // 7):
                        seen = mask[row].nonzero()[:, 0]
                        own = key[:, :, seen], value[:, :, seen]
                        every = torch.ones(1, len(seen), dtype=torch.bool)
                        alone = attended(query[row : row + 1], *own, every, **form)
                        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_the_formula(kernels: RowKernels, dtype: torch.dtype) -> None:
    attended = Attended(kernels, dtype, 20)
    query, key, value = (
        attended.some(*shape, seed=seed)
        for seed, shape in enumerate(((9, 6), (1, 2, 150), (1, 2, 150)))
    )
    mask = tree_mask(130, np.tri(9, 20, dtype=np.bool_))[0, 0]
    for form in FORMS:
        found = attended(query, key, value, mask, **form).view(9, 6, 20)
        for head in range(6):
            scores = query[:, head].double() @ key[0, head // 3].double().T * 0.3
            if "softcap" in form:
                scores = torch.tanh(scores / 2.0) * 2.0
            scores = scores.masked_fill(~mask, -math.inf)
            if "sinks" in form:
                sink = FORMS[2]["sinks"][head].double().expand(9, 1)
                weights = torch.softmax(torch.cat((scores, sink), 1), 1)[:, :-1]
            else:
                weights = torch.softmax(scores, 1)
            near(found[:, head], weights @ value[0, head // 3].double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_reads_the_last_rows_on_a_path(
    kernels: RowKernels, dtype: torch.dtype
) -> None:
    """Two requests, one of them in pieces: the formula, and torch's way of the same."""
    taps, sums = 3, torch.float64 if dtype == torch.float64 else torch.float32
    trees, parts = [[-1, 0, 1, 2, 2, 4], [-1, 0, 0, 2, 3]], []  # by row, its parent
    for number, parents in enumerate(trees):
        sees, depth = np.eye(len(parents), dtype=np.bool_), []
        for row, parent in enumerate(parents):
            sees[row] |= sees[parent] if parent >= 0 else False
            depth.append(int(sees[row].sum()) - 1)
        before = 70 * number
        slots = torch.arange(before + len(parents))
        slots[before:] = before + torch.tensor(depth)
        parts.append(Visibility(tree_mask(before, sees), slots[before:], slots))
    for width in WIDTHS:
        one = Taps(some(width, 1, taps, seed=1, dtype=dtype), some(width, seed=2, dtype=dtype))
        held = [some(1, 1, len(part.slots), width, seed=3, dtype=dtype) for part in parts]
        mixed = some(11, 3 * width, seed=4, dtype=dtype)
        runs = joined([kernels.runs(part.mask(), part.rows, part.slots, taps) for part in parts])
        pieces = [(held[0],), held[1].split([40, 35], 2)]
        found = kernels.convolved(pieces, [6, 5], runs, one.weights, one.bias, mixed)
        assert one.weights.dtype == sums
        gates = mixed[:, width : 2 * width].split([6, 5])
        by_torch = [one(*each) for each in zip(pieces, gates, parts, strict=True)]
        exact = []
        for number, part in enumerate(parts):
            for row, sees in enumerate(part.mask()[0, 0]):
                path = sees.nonzero()[:, 0][-taps:]
                read = held[number][0, 0, path].double() * one.weights[-len(path) :].double()
                exact.append((read.sum(0) + one.bias.double()) * gates[number][row].double())
        with case(width):
            near(found, torch.stack(exact))
            near(torch.cat(by_torch), torch.stack(exact))


def test_requests_and_threads_change_nothing(kernels: RowKernels) -> None:
    attended = Attended(kernels, torch.bfloat16, 64)
    parts = []
    for number, (rows, slots) in enumerate(((64, 900), (1, 40), (17, 500))):
        query = attended.some(rows, 6, seed=number)
        held = attended.some(2, 2, slots, seed=number)
        mask = tree_mask(slots - rows, np.tri(rows, dtype=np.bool_))[0, 0]
        parts.append((query, held[:1], held[1:], mask))
    alone = torch.cat([attended(*part) for part in parts])
    runs = joined([attended.runs(part[3]) for part in parts])
    queries, keys, values, _ = zip(*parts, strict=True)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found = kernels.attention(
                torch.cat(queries), [(k,) for k in keys], [(v,) for v in values],
                [len(query) for query in queries], runs, 0.3, None, None,
            )  # fmt: skip
            assert torch.equal(found, alone)
        # Few rows of one key head: their queries are shared out.
        rows, mask = attended.some(16, 5, seed=4), tree_mask(884, np.tri(16, dtype=np.bool_))[0, 0]
        held = attended.some(2, 1, 900, seed=5)
        shared = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            shared.append(attended(rows, held[:1], held[1:], mask))
        assert all(torch.equal(one, shared[0]) for one in shared)
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.parametrize("less", ["-mno-avx512f", "-mno-avx2"])
def test_narrower_vectors_change_no_bit(
    kernels: RowKernels, less: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() != "x86_64" or " avx2 " not in compiled.cpu():
        pytest.skip("no wider vectors here")
    compiler = next(filter(None, map(shutil.which, compiled.COMPILERS)))
    monkeypatch.setattr(compiled, "OPTIONS", (*compiled.OPTIONS, less))
    made = tmp_path / "rows.so"
    source = Path(compiled.__file__).with_name("rows.c")
    made.write_bytes(compiled.compile_source(compiler, source))
    narrow = RowKernels(ctypes.CDLL(str(made)))
    mask = tree_mask(130, np.tri(30, 60, 30, dtype=np.bool_))[0, 0]
    for dtype in DTYPES:
        for head_dim in (6, 64, 100):
            wide, other = (Attended(k, dtype, head_dim) for k in (kernels, narrow))
            query = wide.some(30, 6, seed=1)
            held = wide.some(2, 2, 190, seed=2).split(1)
            gate_up, gain = some(30, 2 * head_dim, seed=3, dtype=dtype), some(2 * head_dim, seed=4)
            gain = gain.double() if dtype == torch.float64 else gain
            for form in FORMS:
                with case(dtype, head_dim, form):
                    found = other(query, *held, mask, **form)
                    assert torch.equal(wide(query, *held, mask, **form), found)
            normed, gated = narrow.norm(gate_up, gain, 1e-6), narrow.gated(gate_up, "silu")
            assert torch.equal(kernels.norm(gate_up, gain, 1e-6), normed)
            assert torch.equal(kernels.gated(gate_up, "silu"), gated)


def test_what_is_damaged_stays_visible(kernels: RowKernels) -> None:
    attended = Attended(kernels, torch.float32, 8)
    query, key = attended.some(2, 2, seed=0), attended.some(1, 2, 5, seed=1)
    mask = torch.ones((2, 5), dtype=torch.bool)
    mask[0, 3] = False
    key[:, :, 3] = math.nan
    found = attended(query, key, key, mask)
    assert not found[0].isnan().any(), "a slot that a row does not see may hold anything"
    assert found[1].isnan().all()
