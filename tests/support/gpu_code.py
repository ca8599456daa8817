"""What Triton's compiler makes of a kernel for a GPU that is not there: counted in machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from edgespec.kernels.gpu.code_words import Codes, chunk_of
from edgespec.kernels.gpu.places import PATH, Paths
from edgespec.kernels.gpu.products import CodesProduct, steps_of_turn
from edgespec.kernels.gpu.states import GpuMixer
from edgespec.model.state_form import StateForm
from edgespec.model.triton_states import made_up

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
"""Of NVIDIA, beside Triton's own."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_JUMP = re.compile(r"\bBRA\S*\s.*?0x([0-9a-f]+)")

_REGISTERS, _UNIT = 65536, 256
"""Registers of a multiprocessor, and those that a warp's are rounded up to."""

_MOST = {87: (48, 16, 163), 90: (64, 32, 227), 110: (48, 24, 227)}
"""By compute capability, of a multiprocessor: warps, programs and KiB of shared memory (NVIDIA's
programming guide)."""


class Usage(NamedTuple):
    """What one compiled kernel takes: registers of a thread, bytes of shared memory, bytes of a
    thread that went to memory for want of registers, programs that a multiprocessor holds."""

    registers: int
    shared: int
    spilled: int
    programs: int


class Code(NamedTuple):
    """One compiled kernel: instructions of a thread in one turn of the innermost loop that has
    tensor cores' ones, by name, and those besides at the end of a section, which other turns jump
    over; the rest as Usage."""

    loop: Sequence[str]
    ending: Sequence[str]
    registers: int
    shared: int
    programs: int


def code_of(compiled: Any, capability: int) -> Code:
    """Of a kernel that Triton compiled. Raises FileNotFoundError without NVIDIA's tool."""
    loops = [body for body in loops_of(compiled) if any("MMA" in text for text in body.values())]
    loop = min(loops, key=len)
    over = {
        at
        for begin, to in _jumps(_lines(compiled))
        for at in loop
        if begin in loop and begin < at < to <= max(loop)
    }
    usage = usage_of(compiled, capability)
    return Code(
        [text for at, text in loop.items() if at not in over],
        [loop[at] for at in sorted(over)],
        *(usage.registers, usage.shared, usage.programs),
    )


def _lines(compiled: Any) -> list[tuple[int, str]]:
    listing = _dump(compiled, "-sass")
    return [(int(at, 16), text) for at, text in _INSTRUCTION.findall(listing)]


def _jumps(lines: list[tuple[int, str]]) -> list[tuple[int, int]]:
    return [(at, int(to[1], 16)) for at, text in lines if (to := _JUMP.search(text))]


def loops_of(compiled: Any) -> list[dict[int, str]]:
    """The instructions of its loops, by address."""
    lines = _lines(compiled)
    return [
        {at: text for at, text in lines if first <= at <= end}
        for end, first in _jumps(lines)
        if first < end
    ]


def usage_of(compiled: Any, capability: int) -> Usage:
    """As code_of."""
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", _dump(compiled, "-res-usage"))
    assert found is not None
    registers, shared = int(found[1]), int(compiled.metadata.shared)
    warps, programs, room = _MOST[capability]
    each = -(-registers * 32 // _UNIT) * _UNIT * compiled.metadata.num_warps
    fit = (
        *(programs, warps // compiled.metadata.num_warps, _REGISTERS // each),
        room * 1024 // (shared + 1024),
    )
    return Usage(registers, shared, int(found[2]) + int(found[3]), min(fit))


def _dump(compiled: Any, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [TOOL, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Form(NamedTuple):
    """A form of codes, and the dtype of the rows."""

    rows: torch.dtype
    group: int
    zero: str = ""
    planes: int = 1
    double: bool = False
    levels: bool = False
    scales: torch.dtype = torch.float16


FORMS = {
    "int4-g128": Form(torch.bfloat16, 128, "middle", scales=torch.bfloat16),
    "int4": Form(torch.bfloat16, 64, "middle", scales=torch.bfloat16),
    "int4-g32": Form(torch.bfloat16, 32, "middle", scales=torch.bfloat16),
    "GPTQ, AWQ": Form(torch.float16, 128, "points"),
    "Q4_0": Form(torch.float16, 32),
    "Q4_1": Form(torch.float16, 32, "low"),
    "Q4_K": Form(torch.float16, 32, "low", double=True),
    "nf4": Form(torch.bfloat16, 64, levels=True, scales=torch.float32),
    "int8": Form(torch.bfloat16, 4096, planes=2, scales=torch.bfloat16),
    "Q8_0": Form(torch.float16, 32, planes=2),
    "Q6_K": Form(torch.float16, 16, planes=2, double=True),
}
"""By the names that models and files have for them."""


@cache
def empty(
    form: Form, out: int = 192, columns: int = 4096, enough: int | None = None
) -> CodesProduct:
    """A product by a matrix of zeros."""
    fine = torch.int8 if form.double else form.scales
    zero = torch.int8 if form.zero == "points" else fine
    chunk = chunk_of(form.group, columns, fine.itemsize)
    assert chunk is not None
    each = max(1, 4 * chunk // form.group)
    rows = -(-out // 64) * 64

    def numbers(kind: torch.dtype) -> torch.Tensor:
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        units = columns // max(form.group, 4 * chunk)
        return torch.zeros(units, rows, dtype=whole[each * kind.itemsize])

    words = torch.zeros(
        form.planes, rows // 32, columns // (4 * chunk), chunk * 32, dtype=torch.int16
    )
    blocks = torch.zeros(columns // 256, rows, dtype=torch.float16) if form.double else None
    return CodesProduct(
        Codes(
            *(words, out, columns, form.group, numbers(fine), fine),
            *((numbers(zero), zero, form.zero) if form.zero else (None, None, "")),
            *(blocks, blocks if form.zero else None),
            torch.zeros(256, dtype=torch.int32) if form.levels else None,
        ),
        enough=enough,
    )


def steps_of(product: CodesProduct, rows: int) -> int:
    """Steps in one turn of the loop for so many rows."""
    return steps_of_turn(product.matrix, next(one for one in (8, 16, 32) if rows <= one))


def each_weight(product: CodesProduct, rows: int, code: Code) -> float:
    """Instructions of a thread a weight that it multiplies by, for so many rows."""
    steps, (_, strips, _, words) = steps_of(product, rows), product.matrix.words.shape
    turn = len(code.loop) + len(code.ending) * steps / product.section
    return turn / (4 * words / 64 * (strips / product.tiles) * steps)


def launch_states(form: StateForm, dtype: torch.dtype, began: bool = True) -> None:
    """Launch what a pass of a few rows does in such a layer, over a state, or over none."""
    cpu = torch.device("cpu")
    vectors, before, projected = made_up(form, 1, 5)
    mixer = GpuMixer(vectors, dtype, form.folded(dtype), **form.numbers)
    kept, _ = before(dtype, cpu).held(0)
    slots = torch.zeros((5, PATH), dtype=torch.int32)
    paths, rows = Paths(slots, slots.flatten(), 30), projected.to(dtype)
    state, out = torch.zeros(form.state), torch.zeros(5, form.inner)
    entered = mixer.enter(rows, kept, paths)
    folds = paths.every[:16]
    mixer.read(kept, paths, entered, state if began else None, folds, state, (0, 5), out)
    mixer.leave(rows, out)
