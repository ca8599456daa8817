"""How long a product by codes takes a GPU, by its compiled code: a model, not a measurement.

Four numbers are fitted to what an H200 took for four products of one row by the kernels of before
(docs/results/gpu.md); what it took for four others, of 64 rows, tells how good they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LAUNCH = 3e-6
"""Seconds of a call that do not depend on its size, from a graph."""

ALONE, TOGETHER = 2.5, 2.2
"""Cycles of a scheduler for an instruction, if it has one warp, and if it has several: most of them
are logic, of which it starts one in two."""

WAIT = 750
"""Cycles until what is read in the loop, and not asked for before, is there."""

_SCHEDULERS = 4


class Gpu(NamedTuple):
    """Its name, multiprocessors, clock in Hz, bytes a second that it reads, and what code is
    compiled for."""

    name: str
    processors: int
    clock: float
    memory: float
    capability: int = 87


H200 = Gpu("H200", 132, 1.98e9, 3.22e12, 90)
BOARDS = (
    Gpu("Orin Nano 8GB, 15 W", 8, 0.625e9, 68e9),
    Gpu("Orin Nano Super", 8, 1.02e9, 102e9),
    Gpu("Orin NX 16GB", 8, 0.918e9, 102.4e9),
    Gpu("AGX Orin 64GB", 16, 1.3e9, 204.8e9),
    Gpu("Thor T5000", 20, 1.57e9, 273e9, 110),
)
"""By NVIDIA's data sheets; Thor's 2560 lanes are 20 multiprocessors (forums.developer.nvidia.com,
thread 356355, read from its driver)."""


class Work(NamedTuple):
    """Programs of so many warps and turns of a loop, of so many instructions and waits; how many a
    multiprocessor holds at once; bytes of the matrix; waits behind the loop."""

    programs: int
    warps: int
    turns: int
    instructions: int
    waits: int
    held: int
    bytes: float
    behind: int = 0


def seconds(gpu: Gpu, work: Work) -> float:
    """By the busiest multiprocessor, or by reading the matrix."""
    alone = ALONE * work.instructions + WAIT * work.waits
    each = math.ceil(work.programs / gpu.processors)
    rounds = math.ceil(each / work.held)
    busy = TOGETHER * work.instructions * each * work.warps / _SCHEDULERS
    cycles = work.turns * max(alone * rounds, busy) + WAIT * work.behind
    return LAUNCH + max(cycles / gpu.clock, work.bytes / gpu.memory)


def before(out: int, form: str, programs: int, instructions: int, waits: int, held: int) -> float:
    """Seconds of one of MEASURED, by the model."""
    size = matrix_bytes(out, 4096, BITS[form])
    return seconds(H200, Work(programs, 4, 32, instructions, waits, held, size))


def matrix_bytes(out: int, columns: int, bits: float) -> float:
    """Of codes and scales."""
    return out * columns * bits / 8


MEASURED = (
    # rows of the matrix, form, rows, microseconds; programs, instructions, waits, held at once
    (4096, "int4", 1, 41.4, 64, 340, 2, 8),
    (28672, "int4", 1, 53.0, 448, 340, 2, 8),
    (4096, "int8", 1, 23.0, 64, 493, 0, 6),
    (28672, "int8", 1, 68.5, 448, 493, 0, 6),
    (4096, "int4", 64, 43.3, 256, 340, 2, 8),
    (28672, "int4", 64, 148.4, 1792, 340, 2, 8),
    (4096, "int8", 64, 35.4, 256, 493, 0, 6),
    (28672, "int8", 64, 209.5, 1792, 493, 0, 6),
)
"""What an H200 took for matrices of 4096 columns, in bfloat16, by the kernels of commit f9777d3, of
four warps and 32 turns; and what these were compiled to for 9.0. The first four are fitted to."""

BITS = {"int4": 4.5, "int8": 8.0}
"""A weight, with its share of scales."""
