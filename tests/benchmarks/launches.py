"""What a decoder layer takes a GPU's host: torch's operations and Triton's kernels, without a GPU.

    python tests/benchmarks/launches.py

A layer of Llama with tiny matrices over two rows, in bfloat16 on this processor: with torch's
operations, which compute here what a GPU would be given, and with edgespec's kernels as they are
compiled for an Orin, launched by Triton's own launcher into a driver that does nothing. The
matrices are plain, then of 4 bits for Triton too. Microseconds of the thread, the least and the
median of 1500, by turns; and how many launches there are (of torch's 17, 4 only take memory).
Triton has no build for some machines; then this says so, and ends with 2. Needs a C compiler.
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

from edgespec.config import QUANTISATIONS
from edgespec.model import block as block_module
from edgespec.model import matrices
from edgespec.model.block import Block
from edgespec.model.joint import CachedPart
from edgespec.model.loader import Checkpoint
from edgespec.model.row_math import BATCHED, RowMath
from edgespec.model.source import TensorSource
from edgespec.model.sources import QuantisingSource
from edgespec.model.tree_attention import tree_mask

RUNS = 1500


def main() -> int:
    if importlib.util.find_spec("triton") is None:
        print("triton has no build for this machine, so nothing is measured")
        return 2
    import triton
    from support.triton_device import launcher_device

    from edgespec.kernels.gpu.plain_product import plain_product
    from edgespec.model.quantised.triton_linear import TritonLinear
    from edgespec.model.triton_rows import TritonRows

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        triton.runtime.driver.set_active(launcher_device(Path(folder)))
        source = Checkpoint(write_family(Path(folder) / "tiny", "llama"))
        # Whose matrices in 4 bits can be joined, as those of real models.
        shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}
        small = write_family(Path(folder) / "small", "llama", num_key_value_heads=1, **shape)
        by_torch = layer(source, BATCHED)
        matrices.plain_product = lambda weight, bias=None: (
            lambda rows: plain_product(rows, weight, bias)
        )
        plain = layer(source, TritonRows())
        matrices.linear_from = lambda *packed: TritonLinear(*packed)
        by_codes = layer(
            QuantisingSource(Checkpoint(small), QUANTISATIONS["int4-g32"]), TritonRows()
        )
        kernels = launches(by_codes)
        further = [name for name in operations(by_codes) if not name.endswith("empty")]
        said = f"{kernels} kernels and {len(further)} operation"
        for _ in range(2):
            count = len(operations(by_torch))
            print(f"torch           {count} operations: {microseconds(by_torch)}")
            print(f"Triton, plain   {said}: {microseconds(plain)}")
            print(f"Triton, 4 bits  {said}: {microseconds(by_codes)}")
    return 0


def launches(layer: Callable[[], None]) -> int:
    """How many kernels of edgespec's a layer launches."""
    from edgespec.kernels.gpu.launch import Launcher

    launch, count = Launcher.launch, 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        launch(*args)

    Launcher.launch = counted  # type: ignore[method-assign]
    layer()
    Launcher.launch = launch  # type: ignore[method-assign]
    return count


def layer(source: TensorSource, math: RowMath) -> Callable[[], None]:
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
