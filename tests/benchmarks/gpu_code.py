"""What kernels are compiled to for GPUs that are not there, and what that predicts.

    python tests/benchmarks/gpu_code.py [--capability 87]

Instructions a weight and thread in the innermost loop, by rows of a block, registers, shared memory
and programs that a multiprocessor holds, of products by codes of every form; the same of what reads
states; then what an H200 took for the kernels of before beside the model (support.gpu_model), and
what the model says of these, compiled for each: an H200, Orins and Thor, with what a million bytes
of the larger matrix take. Markdown. Needs Triton; no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

MATRICES = ((4096, 4096), (28672, 4096))


def counted(compiled: list[Any], capability: int) -> Iterator[str]:
    """A line for each form."""
    from support.gpu_code import FORMS, code_of, each_weight, empty

    yield "| form | 1 to 8 rows | 9 to 16 | 17 on | registers | KiB shared | programs |"
    yield "|" + " --- |" * 7
    for name, form in FORMS.items():
        # Sections are not shared out, so that there are blocks of 32.
        product, found = empty(form, 256, enough=0), []
        for rows in (1, 16, 32):
            product(torch.zeros(rows, 4096, dtype=form.rows))
            code = code_of(compiled[-1], capability)
            found.append((code, each_weight(product, rows, code)))
        each = " | ".join(f"{instructions:.2f}" for _, instructions in found)
        first = found[0][0]
        yield (
            f"| {name} | {each} | {first.registers} | {first.shared / 1024:.0f} | "
            f"{first.programs} |"
        )


def states(compiled: list[Any], capability: int) -> Iterator[str]:
    """A line for each published layer and kernel; instructions a row, where rows have a loop."""
    from support.gpu_code import launch_states, loops_of, usage_of
    from support.state_forms import PUBLISHED

    yield "| layer of | kernel | registers | bytes shared | bytes spilled | programs | a row |"
    yield "|" + " --- |" * 7
    for name, form in PUBLISHED.items():
        launch_states(form, torch.bfloat16)
        for one in compiled[-4:]:
            of, loops = usage_of(one, capability), loops_of(one)
            row = max(map(len, loops)) if len(loops) > 1 else ""
            shown = f"{of.registers} | {of.shared} | {of.spilled} | {of.programs} | {row}"
            yield f"| {name} | {one.metadata.name} | {shown} |"


def predicted(compiled: list[Any]) -> Iterator[str]:
    """The model beside what was measured, then of what is compiled now."""
    import triton
    from support.gpu_code import FORMS, code_of, empty, steps_of
    from support.gpu_model import (
        BITS,
        BOARDS,
        H200,
        MEASURED,
        Work,
        before,
        matrix_bytes,
        seconds,
    )
    from support.triton_device import Device

    yield "| before, H200 | form | rows | µs | model |"
    yield "|" + " --- |" * 5
    for out, name, rows, took, *code in MEASURED:
        model = before(out, name, *code) * 1e6
        off = f"{model:.1f} ({model / took - 1:+.0%})"
        yield f"| {out} x 4096 | {name} | {rows} | {took} | {off} |"
    yield ""
    yield "| int4, predicted | matrix | rows | µs | of memory | ms of 10^9 bytes |"
    yield "|" + " --- |" * 6
    form = FORMS["int4"]
    for gpu in (H200, *BOARDS):
        triton.runtime.driver.set_active(Device(gpu.capability))
        for out, columns in MATRICES:
            for rows in (1, 16, 64):
                enough = min(512, 4 * gpu.processors)
                product = empty(form, out, columns, enough)
                product(torch.zeros(rows, columns, dtype=form.rows))
                code = code_of(compiled[-1], gpu.capability)
                block = 8 if rows == 1 else 16
                apart = product.sections > 1 and math.ceil(rows / block) * product.tiles < enough
                sections = product.sections if apart else 1
                block = block if apart or rows <= block else 32
                blocks = math.ceil(rows / block)
                steps = steps_of(product, block)
                turns = math.ceil(columns / 128 / sections / steps)
                size = matrix_bytes(out, columns, BITS["int4"])
                ended = len(code.ending) * steps / product.section
                work = Work(
                    *(product.tiles * sections * blocks, 2, turns),
                    *(len(code.loop) + math.ceil(ended), 0, code.programs, size),
                    # To begin with; of sections that are added up, 32 rows' at a time.
                    1 + apart * (1 + math.ceil(sections * block / 32)),
                )
                took = seconds(gpu, work)
                shown = (
                    f"{took * 1e6:.0f} | {size / gpu.memory / took:.0%} | {took / size * 1e12:.1f}"
                )
                yield f"| {gpu.name} | {out} x {columns} | {rows} | {shown} |"


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--capability", type=int, choices=(87, 90, 110), default=87)
    options = parser.parse_args()
    import triton
    from support.triton_device import Device, launching_into
    from triton.runtime.jit import JITFunction

    compiled: list[Any] = []
    JITFunction.__getitem__ = launching_into(compiled)
    triton.runtime.driver.set_active(Device(options.capability))
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        asked = compiled, options.capability
        for part in (counted(*asked), states(*asked), predicted(compiled)):
            for line in (*part, ""):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
