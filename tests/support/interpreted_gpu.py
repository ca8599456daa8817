"""Triton's interpreter on a CPU: what it lacks, and blocks whose layers run by these kernels there.

It keeps bfloat16 as bare bits and computes with these, and leaves dot products to a library that
adds up in an order of its own, whereas a device does it in the same one for every row. It has no
PTX; here are the bit operations that kernels use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

from edgespec.kernels.gpu.plain_product import plain_product
from edgespec.kernels.gpu.usable import DTYPES
from edgespec.model import block as blocks
from edgespec.model import matrices
from edgespec.model.quantised.triton_linear import TritonLinear, fits
from edgespec.model.triton_rows import TritonRows


def _wide(handle: TensorHandle) -> TensorHandle:
    """Numbers of 16 bits as float32."""
    if handle.dtype.scalar == tl.bfloat16:
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)
    return handle


def _rounded(data: np.ndarray) -> TensorHandle:
    """float32 as bfloat16, to the nearest."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1)
    return TensorHandle((rounded >> 16).astype(np.uint16), tl.bfloat16)


def _dot(self: InterpreterBuilder, a: Any, b: Any, d: Any, *_: object) -> TensorHandle:
    left, right = (_wide(one).data.astype(d.data.dtype) for one in (a, b))
    products = left[:, :, None] * right[None]
    products[:, 0] += d.data
    # Along an axis that is not the last one numpy adds up one after the other.
    return TensorHandle(np.add.reduce(products, 1), d.dtype.scalar)


def _in_float32(work: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def done(self: InterpreterBuilder, lhs: Any, rhs: Any) -> TensorHandle:
        if lhs.dtype.scalar != tl.bfloat16:
            return work(self, lhs, rhs)
        return _rounded(work(self, _wide(lhs), _wide(rhs)).data)

    return done


def _cast(work: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    def done(self: InterpreterBuilder, source: Any, to: Any, *rest: object) -> TensorHandle:
        if to.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
            return _rounded(source.data)
        return work(self, source, to, *rest)

    return done


class _Results:
    """Those of a piece of PTX."""

    def __init__(self, results: list[TensorHandle]) -> None:
        self.get_result = results.__getitem__


def _inline_asm(
    self: InterpreterBuilder,
    asm: str,
    constraints: str,
    values: list[TensorHandle],
    types: list[Any],
    *_: object,
) -> _Results:
    """PTX of shifts, `(a & b) | c` and bytes, of words of 32 bits or of 16, two to a register; and
    the sum of two numbers."""
    if asm.startswith("add.f32"):
        return _Results([TensorHandle(values[0].data + values[1].data, tl.float32)])
    registers = {f"${len(types)}": np.ascontiguousarray(values[0].data).view(np.uint32)}

    def operand(name: str) -> Any:
        return registers[name] if name in registers else np.uint32(int(name, 0))

    for line in asm.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        to, *among = (one.strip() for one in rest.split(","))
        if name in ("shl.b32", "shr.u32"):
            left, by = map(operand, among)
            registers[to] = left << by if name == "shl.b32" else left >> by
        elif name == "lop3.b32":
            assert among[3] == "0xea"
            a, b, c = map(operand, among[:3])
            registers[to] = a & b | c
        elif name == "prmt.b32":
            a, b, by = map(operand, among)
            assert b == 0
            assert by & 0xFFFC == 0x4440
            registers[to] = a >> 8 * (by & 3) & 0xFF
        else:
            assert name in ("", ".reg"), line
    kind = {4: (np.int32, tl.int32), 2: (np.int16, tl.int16)}[values[0].data.itemsize]
    results = [registers[f"${number}"].view(kind[0]) for number in range(len(types))]
    return _Results([TensorHandle(one, kind[1]) for one in results])


def _patched_once(whole: Callable[..., Any]) -> Callable[..., Any]:
    """A call by a kernel of another function. The interpreter exchanges the language's functions
    for each again, a fifth of its time; its launch did so, but for modules that only `one` uses."""
    known = set[Callable[..., Any]]()

    def call(one: InterpretedFunction[Any], *args: Any, **named: Any) -> Any:
        if one.fn in known:
            return one.rewrite()(*args, **named)
        known.add(one.fn)
        return whole(one, *args, **named)

    return call


def complete() -> None:
    """Give the interpreter of this process what it lacks."""
    InterpretedFunction.__call__ = _patched_once(InterpretedFunction.__call__)
    for name in ("fadd", "fsub", "fmul"):
        whole = f"create_{name}"
        setattr(InterpreterBuilder, whole, _in_float32(getattr(InterpreterBuilder, whole)))
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_inline_asm = _inline_asm
    InterpreterBuilder.get_bf16 = lambda self, value: _rounded(np.array([value], np.float32))
    for name in ("create_fp_trunc", "create_fp_to_fp"):
        setattr(InterpreterBuilder, name, _cast(getattr(InterpreterBuilder, name)))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Blocks and matrices that are made meanwhile have these kernels, on this CPU."""

    def linear(*args: Any) -> Any:
        packed, bias, shape, form, dtype, device = args
        if dtype in DTYPES and fits(form, shape):
            return TritonLinear(packed, bias, shape, form, dtype, device)
        return by_cpu(*args)

    def plain(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        if weight.dtype not in DTYPES:
            return plain_by_cpu(weight, bias)
        return partial(plain_product, weight=weight, bias=bias)

    def rows(device: torch.device, dtype: torch.dtype) -> Any:
        return TritonRows() if dtype in DTYPES else rows_by_cpu(device, dtype)

    by_cpu, plain_by_cpu, rows_by_cpu = (
        *(matrices.linear_from, matrices.plain_product),
        blocks.row_math,
    )
    with (
        mock.patch.object(matrices, "linear_from", linear),
        mock.patch.object(matrices, "plain_product", plain),
        mock.patch.object(blocks, "row_math", rows),
    ):
        yield
