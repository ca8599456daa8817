"""What a decoder layer takes a GPU's host: torch's operations and Triton's kernels, without a GPU.

    python tests/benchmarks/launches.py

A layer of Llama with tiny matrices over two rows, in bfloat16 on this processor: with torch's
operations, which compute here what a GPU would be given, and with edgespec's kernels, of which all
is done but the driver's part of a launch, as they are compiled for an Orin. Microseconds of the
thread, the least and the median of 1500, by turns; and how many launches there are (of torch's 17,
4 only take memory). Triton has no build for some machines; then this says so, and ends with 2.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.checkpoints import write_family
from support.operations import operations

from edgespec.model import block as block_module
from edgespec.model import matrices
from edgespec.model.block import Block
from edgespec.model.joint import CachedPart
from edgespec.model.loader import Checkpoint
from edgespec.model.row_math import BATCHED, RowMath
from edgespec.model.tree_attention import tree_mask

RUNS = 1500


def main() -> int:
    if importlib.util.find_spec("triton") is None:
        print("triton has no build for this machine, so nothing is measured")
        return 2
    import triton
    from support.triton_device import Device, launching_into
    from triton.runtime.jit import JITFunction

    from edgespec.kernels.gpu.products import plain_product
    from edgespec.model.triton_rows import TritonRows

    torch.set_num_threads(1)
    launched: list[Any] = []
    JITFunction.__getitem__ = launching_into(launched)
    triton.runtime.driver.set_active(Device())
    with tempfile.TemporaryDirectory() as folder:
        source = Checkpoint(write_family(Path(folder) / "model", "llama"))
        by_torch = layer(source, BATCHED)
        matrices.plain_product = lambda weight, bias=None: (
            lambda rows: plain_product(rows, weight, bias)
        )
        by_triton = layer(source, TritonRows())
        launched.clear()
        further = [name for name in operations(by_triton) if not name.endswith("empty")]
        count = len(launched)
        for _ in range(2):
            print(f"torch   {len(operations(by_torch))} operations: {microseconds(by_torch)}")
            said = f"{count} kernels and {len(further)} operation"
            print(f"Triton  {said}: {microseconds(by_triton)}")
    return 0


def layer(source: Checkpoint, math: RowMath) -> Callable[[], None]:
    """Runs a layer over two rows, as on an accelerator."""
    block_module.row_math = lambda *_: math
    block = Block(source, 0, 2, "bfloat16")
    part = CachedPart(0, block.new_cache(64), tree_mask(0, np.tri(2, dtype=np.bool_)))
    with torch.no_grad():
        hidden, joint = block.enter(torch.arange(2), torch.arange(2), [part])

    def run() -> None:
        with torch.no_grad():
            block.layer(0, hidden, joint)

    run()  # masks are made once a pass, kernels compiled once
    return run


def microseconds(work: Callable[[], None]) -> str:
    taken = []
    for _ in range(RUNS):
        began = time.thread_time()
        work()
        taken.append(1e6 * (time.thread_time() - began))
    return f"{min(taken):.0f} µs, median {statistics.median(taken):.0f}"


if __name__ == "__main__":
    sys.exit(main())
