"""Quantised linear: what is packed is near the weight, and every way to multiply agrees with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiers import examples

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.errors import ModelError
from edgespec.model.quantised import int4_kernels, nf4
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.quantised.linear import dequantised, linear_from, pack, stored_parts

NAMES = [name for name, one in QUANTISATIONS.items() if one.kind != "none"]
PLAIN_TORCH = [name for name in NAMES if not name.startswith("nf4")]
DTYPES = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
"""Relative errors of a product that rounding in the dtype may cause."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=NAMES)
def quantisation(request: pytest.FixtureRequest) -> Quantisation:
    if request.param.startswith("nf4"):
        pytest.importorskip("bitsandbytes")
    return QUANTISATIONS[request.param]


def weight_of(out: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed weights with a few far outliers, float32."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, columns, generator=generator) * 0.02
    weight[:: max(1, out // 3), 5] = 0.3
    return weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_what_is_packed_is_what_is_announced(
    quantisation: Quantisation, dtype: torch.dtype
) -> None:
    weight = weight_of(150, 256).to(dtype)
    before = weight.clone()
    packed = pack(weight, quantisation)
    assert torch.equal(weight, before), "the caller's weight, perhaps a mapped file, was written to"
    found = {name: (part.shape, part.dtype) for name, part in packed.items()}
    assert found == stored_parts(quantisation, weight.shape)
    assert all(part.is_contiguous() and part.device.type == "cpu" for part in packed.values())


def test_no_weight_is_off_by_more_than_half_a_step(quantisation: Quantisation) -> None:
    weight = weight_of(150, 256)
    exact = dequantised(
        pack(weight, quantisation), weight.shape, quantisation, torch.float64
    ).float()
    group = quantisation.group or weight.shape[1]
    grouped = weight.view(150, -1, group)
    spread, greatest = grouped.amax(2) - grouped.amin(2), grouped.abs().amax(2)
    # Half of the widest gap between neighbouring values, plus what rounding a scale may cost.
    bound = {
        "int8": greatest / 254 * 1.02 + greatest / 256,
        "int4": spread / 30 * 1.02 + spread / 256 + greatest / 256,
        "nf4": greatest * 0.16,
    }[quantisation.kind]
    if quantisation.double:
        bound = bound * 1.1 + grouped.abs().amax() / 64
    error = (exact - weight).abs().view(150, -1, group).amax(2)
    assert (error <= bound).all()


def test_finer_groups_are_nearer() -> None:
    weight = weight_of(128, 512)
    errors = []
    for name in ("int8", "int4-g32", "int4", "int4-g128"):
        one = QUANTISATIONS[name]
        exact = dequantised(pack(weight, one), weight.shape, one, torch.float32)
        errors.append(float((exact - weight).norm() / weight.norm()))
    assert errors == sorted(errors)
    assert errors[-1] < 0.2


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_constant_weights_are_kept(quantisation: Quantisation, value: float) -> None:
    weight = torch.full((65, 128), value)
    exact = dequantised(pack(weight, quantisation), weight.shape, quantisation, torch.float32)
    assert torch.allclose(exact, weight, rtol=0.005)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_layer_multiplies_by_the_dequantised_weight(
    quantisation: Quantisation, dtype: torch.dtype, with_bias: bool
) -> None:
    weight = weight_of(150, 256)  # the last tile of rows is not full
    bias = torch.linspace(-1, 1, 150).to(dtype) if with_bias else None
    packed = pack(weight, quantisation)
    exact = dequantised(packed, weight.shape, quantisation, torch.float64)
    layer = linear_from(packed, bias, weight.shape, quantisation, dtype, "cpu")
    assert not list(layer.parameters())
    for rows in (1, 2, 4, 5, 16, 33, 64, 100):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = x.double() @ exact.T
        if bias is not None:
            expected += bias.double()
        result = layer(x)
        assert result.dtype == dtype
        assert relative_error(result, expected) < DTYPES[dtype]


@examples(25)
@given(
    name=st.sampled_from(PLAIN_TORCH),
    out=st.integers(1, 140),
    groups=st.integers(1, 3),
    rows=st.integers(1, 20),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_any_shape(
    name: str, out: int, groups: int, rows: int, seed: int, dtype: torch.dtype
) -> None:
    one = QUANTISATIONS[name]
    weight = weight_of(out, groups * (one.group or 7), seed)
    packed = pack(weight, one)
    exact = dequantised(packed, weight.shape, one, torch.float64)
    layer = linear_from(packed, None, weight.shape, one, dtype, "cpu")
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(seed)).to(dtype)
    expected = x.double() @ exact.T
    # A result may be small by cancellation, while its error is that of its largest summands.
    size = (x.double().abs() @ exact.abs().T).square().mean().sqrt()
    error = (layer(x).double() - expected).square().mean().sqrt()
    assert float(error) <= DTYPES[dtype] * float(size)


@pytest.mark.parametrize("name", ["int4-g32", "int4", "int4-g128"])
def test_columns_that_no_group_fits_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"48 columns; choose .*int8"):
        pack(torch.zeros(64, 48), QUANTISATIONS[name])


def test_nf4_refuses_columns_that_its_group_does_not_fit() -> None:
    with pytest.raises(ModelError, match="48 columns; choose int8"):
        stored_parts(QUANTISATIONS["nf4"], torch.Size((64, 48)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(quantisation: Quantisation, value: float) -> None:
    weight = weight_of(70, 128)
    weight[69, 3] = value
    with pytest.raises(ModelError, match="not finite"):
        pack(weight, quantisation)


def test_tiles_hold_rows_32_apart_in_one_byte() -> None:
    codes = torch.randint(16, (70, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tiles = torch.zeros(2, 32, 32, dtype=torch.uint8)
    int4_kernels.store(codes, tiles)
    assert tiles[0, 7, 3] == codes[3, 7] | codes[35, 7] << 4
    assert tiles[1, 9, 5] == codes[69, 9]
    assert not tiles[1, :, 6:].any()
    assert torch.equal(int4_kernels.codes_of(tiles)[:70], codes)


def test_what_is_mapped_is_not_copied() -> None:
    for name, part in (("int4", "tiles"), ("int8", "codes")):
        one = QUANTISATIONS[name]
        packed = pack(weight_of(128, 128), one)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            layer = linear_from(packed, None, torch.Size((128, 128)), one, dtype, "cpu")
            held = dict(layer.named_buffers())
            assert held["weight"].data_ptr() == packed[part].data_ptr()
            assert held["scales"].data_ptr() == packed["scales"].data_ptr()


def test_nf4_is_bitsandbytes_own_quantisation() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight = weight_of(40, 512)
    weight[3, :64] = 0
    for name in ("nf4", "nf4-dq"):
        one = QUANTISATIONS[name]
        packed = pack(weight, one)
        codes, state = functional.quantize_4bit(
            weight, blocksize=64, quant_type="nf4", compress_statistics=one.double
        )
        assert torch.equal(packed["codes"].flatten(), codes.flatten())
        assert torch.equal(packed["scales"].flatten(), state.absmax)
        whole = functional.dequantize_4bit(codes, state)
        assert torch.equal(dequantised(packed, weight.shape, one, torch.float32), whole)


def test_nf4_slices_begin_anywhere_in_shared_scales() -> None:
    pytest.importorskip("bitsandbytes")
    one = QUANTISATIONS["nf4-dq"]
    packed = pack(weight_of(300, 192), one)
    layer = nf4.Nf4Linear(packed, None, torch.Size((300, 192)), one, torch.float32, "cpu")
    whole = layer.weight_rows(0, 300)
    for first, end in ((0, 1), (85, 86), (100, 250), (299, 300)):
        assert torch.equal(layer.weight_rows(first, end), whole[first:end])


def test_a_missing_or_broken_library_concerns_nf4_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_of(64, 64)
    for error, said in (
        (ModuleNotFoundError("No module", name="bitsandbytes"), "pip install bitsandbytes"),
        (ModuleNotFoundError("No module", name="scipy"), "cannot be imported"),
        (OSError("libcudart.so.12 is missing"), "libcudart.so.12 is missing"),
    ):

        def fail(name: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(nf4.importlib, "import_module", fail)
        nf4.library.cache_clear()
        with pytest.raises(ModelError, match=said):
            pack(weight, QUANTISATIONS["nf4"])
        pack(weight, QUANTISATIONS["int4"])
    nf4.library.cache_clear()


_GUARDED = """
import ctypes, mmap, os, sys, torch
from edgespec.config import Quantisation
from edgespec.model.matrices import plain_product
from edgespec.model.quantised.linear import linear_from, pack
torch.set_num_threads(1)
PAGE, kept = mmap.PAGESIZE, []
protect = ctypes.CDLL(None).mprotect
def at_the_end(part):
    memory = mmap.mmap(-1, (-(-part.nbytes // PAGE) + 1) * PAGE)
    kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert protect(ctypes.c_void_p(start + len(memory) - PAGE), PAGE, 0) == 0
    begin = len(memory) - PAGE - part.nbytes
    copy = torch.frombuffer(memory, dtype=part.dtype, count=part.numel(), offset=begin)
    return copy.view(part.shape).copy_(part)
for columns in (7, 24, 64, 96):
    for name in sys.argv[1:]:
        one = Quantisation.parse(name)
        if columns % (one.group or 1):
            continue
        weight = torch.ones(70, columns)
        packed = {name: at_the_end(part) for name, part in pack(weight, one).items()}
        layer = linear_from(packed, None, weight.shape, one, torch.bfloat16, "cpu")
        for rows in (1, 5, 70):
            layer(at_the_end(torch.ones(rows, columns, dtype=torch.bfloat16)))
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        multiply = plain_product(at_the_end(torch.ones(70, columns, dtype=dtype)))
        for rows in (1, 5, 70):
            multiply(at_the_end(torch.ones(rows, columns, dtype=dtype)))
print("unharmed", flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_nothing_is_read_behind_the_end_of_a_weight() -> None:
    names = PLAIN_TORCH if importlib.util.find_spec("bitsandbytes") is None else NAMES
    run = subprocess.run(
        [sys.executable, "-c", _GUARDED, *names],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, "unharmed\n"), run.stderr


_PEAK = """
import resource, sys, torch
from edgespec.config import Quantisation
from edgespec.model.quantised.linear import pack
torch.set_num_threads(1)
one = Quantisation.parse(sys.argv[1])
pack(torch.ones(64, 128), one)
weight = torch.ones(11008, 4096, dtype=torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
packed = pack(weight, one)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024 - sum(part.nbytes for part in packed.values()))
"""


@pytest.mark.slow
def test_packing_needs_some_tens_of_megabytes(quantisation: Quantisation) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, quantisation.name],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    beside = int(run.stdout)
    print(f"{quantisation.name}: {beside / 2**20:.0f} MiB beside weight and result")
    assert beside < 64 * 2**20
