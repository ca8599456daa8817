"""Vectors of any width: products have the bits of docs/arithmetic.md on every kind of processor.

tests/kernels/multiply_file.c is the program for one that is emulated.
"""

from __future__ import annotations

import ctypes
import itertools
import platform
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.cases import case

from edgespec.kernels import compiled, products

NARROWER = {"AVX2": "-mno-avx512f", "SSE": "-mno-avx2"}
"""What keeps GCC from wider vectors."""
CROSS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")
MOST = 64  # rows
FEWER = 20  # rows where each takes long
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FORMS = ("plain", "plain tail", "int8", "int8 zeros", "int8 short groups", "nf4", "int4", "fp8")

pytestmark = pytest.mark.skipif(
    bool(compiled.complaint("products")), reason="no C compiler makes the products here"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Parts:
    """A matrix of one form by its parts: code * scale + zero, in groups of columns."""

    def __init__(self, form: str, dtype: torch.dtype, whole: bool, rows: int = MOST) -> None:
        """`whole`: of such numbers that no sum is rounded, in whatever order."""
        self.form, self.dtype = form, dtype
        self.out, self.columns, self.group, self.middle = 150, 192, 32, 0
        draw = torch.Generator().manual_seed(len(form))

        def some(*shape: int, least: int = -4, end: int = 5) -> torch.Tensor:
            numbers = torch.randint(least, end, shape, generator=draw)
            return numbers if whole else numbers + torch.rand(shape, generator=draw)

        if form == "plain tail":
            self.columns = 171
        if form == "int8 short groups":
            self.columns, self.group = 180, 20
        groups = self.columns // self.group
        self.scale = some(self.out, groups, least=1).float() / 2
        self.zero = some(self.out, groups).float() if form in ("int8 zeros", "int4") else None
        self.bias = some(self.out).to(dtype)
        self.levels = some(16).float()
        shape = (self.out, self.columns)
        if form.startswith("plain"):
            self.codes = some(*shape).to(dtype)
        elif form.startswith("int8"):
            self.codes = torch.randint(-7, 8, shape, generator=draw).to(torch.int8)
        elif form == "fp8":  # with numbers below the least normal one
            numbers = torch.randint(-7, 8, shape, generator=draw) / 512
            numbers[:, ::2] *= 8
            self.codes = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            self.codes = torch.randint(0, 16, shape, generator=draw).to(torch.uint8)
            self.middle = 8 if form == "int4" else 0
        if form == "int4":
            self.scale, self.zero = self.scale.half(), self.zero.half()  # type: ignore[union-attr]
        self.rows = some(rows, self.columns).to(dtype)

    def weight(self) -> torch.Tensor:
        """[out, columns] in the type that is reckoned in."""
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        if self.form.startswith("plain"):
            return self.codes.to(wide)
        scale = self.scale.double().repeat_interleave(self.group, 1)
        if self.form == "nf4":
            return (self.levels[self.codes.int()].double() * scale).float().to(wide)
        if self.form == "fp8":
            return (self.codes.view(torch.float8_e4m3fn).double() * scale).to(wide)
        zero = 0 if self.zero is None else self.zero.double().repeat_interleave(self.group, 1)
        return ((self.codes.double() - self.middle) * scale + zero).to(wide)

    def product(self) -> products.RowProduct:
        weight, kind, scales, zeros, group = self.codes, "", None, None, 0
        if not self.form.startswith("plain"):
            kind, scales, zeros, group = self.form[:4].strip(), self.scale, self.zero, self.group
        if self.form == "nf4":
            weight = self.codes[:, ::2] << 4 | self.codes[:, 1::2]
        if self.form == "int4":
            assert zeros is not None
            tiles = -(-self.out // products.TILE)
            more = tiles * products.TILE - self.out
            codes = torch.nn.functional.pad(self.codes, (0, 0, 0, more))
            low, high = codes.view(tiles, 2, products.TILE // 2, self.columns).unbind(1)
            weight = (low | high << 4).transpose(1, 2).contiguous()
            both = torch.stack((self.scale, zeros), -1).transpose(0, 1)
            scales, zeros = torch.nn.functional.pad(both, (0, 0, 0, more)).contiguous(), None
        return products.RowProduct(
            weight,
            (self.out, self.columns),
            self.dtype,
            codes=kind,
            scales=scales,
            zeros=zeros,
            group=group,
            middle=self.middle,
            levels=self.levels if kind == "nf4" else None,
            bias=self.bias,
            dequantised=lambda first, end: self.weight()[first:end],
        )


def fused(a: torch.Tensor, b: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """a * b + more in float32, rounded once but for near-ties in float64, which no case here is."""
    return (a.double() * b.double() + more.double()).float()


def by_order(parts: Parts) -> torch.Tensor:
    """The sums of docs/arithmetic.md, one after the other, of rows in float32."""
    rows = parts.rows[:, None]
    if parts.form == "int4":
        assert parts.zero is not None
        total = torch.zeros(MOST, parts.out)
        for group in range(parts.columns // parts.group):
            products_sum, rows_sum = torch.zeros(MOST, parts.out), torch.zeros(MOST, 1)
            for column in range(group * parts.group, (group + 1) * parts.group):
                code = parts.codes[:, column].float() - parts.middle
                products_sum = fused(rows[:, :, column], code, products_sum)
                rows_sum += rows[:, :, column]
            total = fused(parts.zero[:, group], rows_sum, total)
            total = fused(parts.scale[:, group], products_sum, total)
        return total + parts.bias
    lanes = torch.zeros(MOST, parts.out, 16)
    step = 32 if parts.form == "nf4" else 16
    weight, rows = (
        torch.nn.functional.pad(one, (0, -parts.columns % step)) for one in (parts.weight(), rows)
    )
    for first in range(0, weight.shape[1], step):
        for part in range(step // 16):
            columns = slice(first + part, first + step, step // 16)
            lanes = fused(rows[:, :, columns], weight[:, columns], lanes)
    while lanes.shape[2] > 1:
        lanes = lanes[:, :, : lanes.shape[2] // 2] + lanes[:, :, lanes.shape[2] // 2 :]
    return lanes[:, :, 0] + parts.bias


def comparable(dtype: torch.dtype) -> bool:
    """If other processors have this one's bits: not of bfloat16, where two columns go at a time."""
    return dtype != torch.bfloat16 or "avx512_bf16" not in compiled.cpu()


def test_sums_are_in_the_documented_order() -> None:
    if "x86" in platform.machine() and " fma " not in compiled.cpu():
        pytest.skip("no FMA here")
    for form in FORMS:
        parts = Parts(form, torch.float32, whole=False)
        with case(form):
            assert torch.equal(parts.product()(parts.rows), by_order(parts))


@pytest.mark.thorough
@pytest.mark.parametrize("width", list(NARROWER))
def test_narrower_vectors_change_no_bit(
    width: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 to 64 rows, also from what torch gives where no order of sums matters."""
    if platform.machine() != "x86_64" or " avx2 " not in compiled.cpu():
        pytest.skip("no wider vectors here")
    compiler = next(filter(None, map(shutil.which, compiled.COMPILERS)))
    monkeypatch.setattr(compiled, "OPTIONS", (*compiled.OPTIONS, NARROWER[width]))
    source = Path(compiled.__file__).with_name("products.c")
    made = tmp_path / "products.so"
    made.write_bytes(compiled.compile_source(compiler, source))
    library = ctypes.CDLL(str(made))
    native = products._multiply()
    assert native is not None
    narrow = library.multiply
    narrow.argtypes, narrow.restype = native.argtypes, native.restype  # type: ignore[attr-defined]
    for form in FORMS:
        for dtype in DTYPES:
            exact, parts = (Parts(form, dtype, whole) for whole in (True, False))
            for one in (exact, parts):
                product = one.product()
                ways = {"wide": product(one.rows)}
                product._multiply = narrow
                ways["narrow"] = product(one.rows)
                with case(form, dtype, "whole" if one is exact else "random"):
                    if one is exact or comparable(dtype):
                        assert torch.equal(ways["wide"], ways["narrow"])
                    if one is exact:
                        product._multiply = None
                        assert torch.equal(ways["wide"], product(one.rows))
                    if one is exact:
                        continue
                    for count in range(1, MOST):
                        assert torch.equal(product(one.rows[:count]), ways["narrow"][:count])


@pytest.mark.thorough
@pytest.mark.parametrize("core", ["cortex-a76"])
def test_an_emulated_arm_core_has_the_same_bits(core: str, tmp_path: Path) -> None:
    """By name, where a cross compiler and QEMU are installed (gcc-aarch64-linux-gnu,
    libc6-dev-arm64-cross and qemu-user-static of Debian)."""
    compiler, emulator = map(shutil.which, CROSS)
    if compiler is None or emulator is None:
        pytest.skip("no cross compiler or no QEMU here")
    program, data, found = (tmp_path / name for name in ("multiply", "in", "out"))
    options = [
        option for option in compiled.OPTIONS if option not in (*compiled.FOR_CPU, "-shared")
    ]
    folders = (Path(compiled.__file__).parent, Path(__file__).parent)
    subprocess.run(
        [
            *(compiler, *options, f"-mcpu={core}", "-static", f"-I{folders[0]}", "-o"),
            *(str(program), str(folders[1] / "multiply_file.c"), "-lm"),
        ],
        check=True,
        timeout=300,
    )
    kinds = itertools.product(FORMS, DTYPES, (True, False))
    every = [Parts(*kind, rows=FEWER) for kind in kinds]
    with data.open("wb") as file:
        for parts in every:
            file.write(filed(parts))
    subprocess.run([emulator, "-cpu", core, program, data, found], check=True, timeout=300)
    place, given = 0, found.read_bytes()
    for parts in every:
        here = parts.product()(parts.rows)
        there = torch.frombuffer(
            bytearray(given[place : place + here.nbytes]), dtype=parts.dtype
        ).view(here.shape)
        place += here.nbytes
        exact = parts.rows.double().frac().abs().max() == 0
        with case(parts.form, parts.dtype, "whole" if exact else "random"):
            if exact or comparable(parts.dtype):
                assert torch.equal(here, there)
    assert place == len(given)


def filed(parts: Parts) -> bytes:
    """What multiply_file.c reads of one product."""
    product = parts.product()
    matrix = product.matrix
    held = [product.held.get(name) for name in ("weight", "scales", "zeros", "order", "bias")]
    tensors = [*held, product.held.get("levels"), parts.rows]
    sizes = [0 if tensor is None else tensor.nbytes for tensor in tensors]
    fields = (matrix.out, matrix.columns, matrix.group, matrix.kind, matrix.scale_kind)
    head = struct.pack("<15q", *fields, matrix.middle, product._kind, len(parts.rows), *sizes)
    contents = [tensor.contiguous().flatten() for tensor in tensors if tensor is not None]
    return head + b"".join(bytes(one.view(torch.uint8).numpy()) for one in contents)
