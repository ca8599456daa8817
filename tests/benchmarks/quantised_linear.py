"""Time of one Llama-2-7B layer's matrices under each quantisation, by rows, as tables.

    python tests/benchmarks/quantised_linear.py [--repeats 7] [--dtypes bfloat16 float32]
        [--forms]

Milliseconds (on a CPU of its time) for all seven products of a layer (4096 x 4096 four times, 11008
x 4096 twice, 4096 x 11008), each matrix in memory of its own: medians, all ways taken in turn, one
CPU thread. `limit`
is what reading the stored bytes alone would take, at the rate at which this run reads a large
buffer. The best of a column is marked. Where CUDA is at hand there are tables for it too.
`bitsandbytes` is that library's own product (as its layers do it) on what nf4 stores. `--forms`
measures the forms that files come in (made-up codes) in place of what weights are rounded to.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from edgespec.config import FILE, QUANTISATIONS
from edgespec.model.matrices import plain_product
from edgespec.model.quantised.linear import linear_from, pack
from edgespec.model.quantised.nf4 import library
from edgespec.model.quantised.selftest import made_up, usable

sys.path.insert(0, str(Path(__file__).parent.parent))
from support.packed_forms import FORMS

SHAPES = [torch.Size((4096, 4096))] * 4 + [torch.Size((11008, 4096))] * 2
SHAPES += [torch.Size((4096, 11008))]
ROWS = (1, 4, 16, 64)
KINDS = ("int8", "int4", "nf4", "nf4-dq")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_BUFFER = 1 << 30  # bytes, more than the caches of most processors hold

Product = Callable[[torch.Tensor], torch.Tensor]


class Way:
    """One way to do the layer's products."""

    def __init__(self, name: str, products: list[Product], stored: int) -> None:
        """`stored`: bytes of all weights as they are held."""
        self.name, self.products, self.stored = name, products, stored
        self.times: dict[int, list[float]] = {rows: [] for rows in ROWS}

    def measure(self, rows: int, dtype: torch.dtype, device: str) -> None:
        """Take one time, in ms."""
        inputs = [torch.randn(rows, shape[1], dtype=dtype, device=device) for shape in SHAPES]
        for warm in (True, False):
            if warm and self.times[rows]:
                continue
            synchronise(device)
            start = clock(device)
            for product, rows_in in zip(self.products, inputs, strict=True):
                product(rows_in)
            synchronise(device)
            if not warm:
                self.times[rows].append(1000 * (clock(device) - start))


def synchronise(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def clock(device: str) -> float:
    """Seconds: of CPU time, which other programs disturb less, or where a GPU computes of time."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def weights() -> dict[torch.Size, torch.Tensor]:
    """A random bfloat16 matrix of every shape."""
    generator = torch.Generator().manual_seed(0)
    return {
        shape: torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        for shape in dict.fromkeys(SHAPES)
    }


def plain_way(dtype: torch.dtype, device: str) -> Way:
    """The weights as they are."""
    made = weights()
    matrices = [made[shape].to(device, dtype, copy=True) for shape in SHAPES]
    return Way("none", [plain_product(w) for w in matrices], sum(w.nbytes for w in matrices))


def quantised_way(name: str, dtype: torch.dtype, device: str) -> Way:
    """What a block does."""
    if name in QUANTISATIONS:
        quantisation = QUANTISATIONS[name]
        packed = {shape: pack(weight, quantisation) for shape, weight in weights().items()}
    else:
        quantisation = FORMS[name]
        packed = {shape: made_up(quantisation, shape) for shape in set(SHAPES)}
    layers: list[nn.Module] = []
    for shape in SHAPES:
        own = {part: tensor.clone() for part, tensor in packed[shape].items()}
        layers.append(linear_from(own, None, shape, quantisation, dtype, device))
    stored = sum(part.nbytes for shape in SHAPES for part in packed[shape].values())
    return Way(name, list(layers), stored)


def library_way(dtype: torch.dtype, device: str) -> Way:
    """bitsandbytes' own product."""
    bitsandbytes = library()
    stored, products = 0, []
    for shape, weight in weights().items():
        codes, state = bitsandbytes.functional.quantize_4bit(
            weight.to(device, dtype), blocksize=64, quant_type="nf4"
        )
        for _ in range(SHAPES.count(shape)):
            own = codes.clone()
            products.append(lambda x, c=own, s=state: bitsandbytes.matmul_4bit(x, c.t(), s))
            stored += own.nbytes + state.absmax.nbytes
    return Way("bitsandbytes", products, stored)


def read_rate(device: str) -> float:
    """Bytes per second at which a large buffer is summed."""
    buffer = torch.ones(_BUFFER // 4, device=device)
    times = []
    for _ in range(5):
        synchronise(device)
        start = clock(device)
        buffer.sum()
        synchronise(device)
        times.append(clock(device) - start)
    return _BUFFER / min(times)


def table(dtype_name: str, device: str, repeats: int, kinds: Sequence[str]) -> None:
    """Measure and print."""
    dtype = DTYPES[dtype_name]
    rate = read_rate(device)
    ways = [plain_way(dtype, device)]
    for name in kinds:
        reason = usable(QUANTISATIONS.get(name, FILE), dtype_name, device)
        if reason:
            print(f"{name} is left out: {reason}")
            continue
        ways.append(quantised_way(name, dtype, device))
        if name == "nf4":
            ways.append(library_way(dtype, device))
    with torch.inference_mode():
        for _ in range(repeats):
            for rows in ROWS:
                for way in ways:
                    way.measure(rows, dtype, device)
    heads = " | ".join(f"{rows} rows" for rows in ROWS)
    print(f"\n{device}, {dtype_name}, reads {rate / 1e9:.1f} GB/s\n")
    print(f"| quantisation | MB | limit | {heads} |\n| --- | --- | --- |{' --- |' * len(ROWS)}")
    medians = {way.name: {r: statistics.median(way.times[r]) for r in ROWS} for way in ways}
    best = {rows: min(medians[way.name][rows] for way in ways) for rows in ROWS}
    for way in ways:
        found = medians[way.name]
        cells = " | ".join(
            f"**{found[r]:.1f}**" if found[r] == best[r] else f"{found[r]:.1f}" for r in ROWS
        )
        limit = 1000 * way.stored / rate
        print(f"| {way.name} | {way.stored / 1e6:.0f} | {limit:.1f} | {cells} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--forms", action="store_true")
    options = parser.parse_args()
    kinds = list(FORMS) if options.forms else KINDS
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        for dtype in options.dtypes:
            table(dtype, device, options.repeats, kinds)


if __name__ == "__main__":
    main()
