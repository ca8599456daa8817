"""What a CUDA device takes for a layer, launched one operation after the other and in CUDA graphs.

    python tests/benchmarks/gpu.py [--model llama-2-7b] [--layers 8] [--seconds 20] [--out FILE]

For each quantisation that runs there, and 1 to 64 rows after an empty cache: milliseconds a layer
of a pass through so many layers of random weights, without and with graphs; microseconds until the
host had launched a layer; how fast the packed bytes are read with graphs, as a share of the rate at
which this device reads a large buffer; and how far rows differ between both ways, as a share of the
largest number. Markdown, on the terminal and into a file. Without a CUDA device it says so, and
ends with 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.daemon.bandwidths import memory_rate
from edgespec.daemon.device import gpu_facts, last_level_cache
from edgespec.daemon.kernels import sixteen_bit_type, tried_kernels
from edgespec.daemon.layer_times import Shape, deeper, default_shape, llama, passes, settled
from edgespec.daemon.memory import available_memory
from edgespec.daemon.random_layers import RandomLayers
from edgespec.daemon.timing import timed
from edgespec.errors import CapacityError
from edgespec.model.block import Block
from edgespec.model.cuda_graphs import GraphMaker, graphs_on
from edgespec.planning.profile import ROWS

COLUMNS = (
    *("rows", "eager ms", "graph ms", "eager host µs", "graph host µs", "GB/s"),
    *("of memory", "difference"),
)
NO_DEVICE = "no CUDA device here, so nothing is measured"

Graphs = Callable[[torch.device], GraphMaker | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="whose layer; left out: the largest that fits")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each quantisation")
    parser.add_argument("--out", type=Path, help="write the tables there too")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NO_DEVICE, file=sys.stderr)
        return 2
    device = torch.device("cuda")
    room = available_memory("cuda").bytes
    shape = default_shape(room, options.layers)
    if options.model:
        shape = Shape(options.model, llama(options.model))
    beyond = 2 * last_level_cache()
    memory = memory_rate(device, room=room, beyond_cache=beyond, seconds=2.0).per_second
    lines = [f"{options.layers} layers of {shape.name}; torch {torch.__version__}"]
    lines += [f"{name}: {fact}" for name, fact in gpu_facts().items()]
    lines.append(f"memory read at {memory / 1e9:.4g} GB/s")
    kernels = tried_kernels()
    lines += [f"{name} does not run: {reason}" for name, reason in kernels.unusable.items()]
    for name in (name for name in QUANTISATIONS if name not in kernels.unusable):
        try:
            rows = list(measured(shape, name, options.layers, device, memory, options.seconds))
        except (RuntimeError, CapacityError) as problem:  # torch's out of memory among them
            lines += ["", f"{name}: {problem}"]
            continue
        lines += ["", f"**{name}**", "", *table(rows)]
        print(f"{name}: done", file=sys.stderr)
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 0


def measured(
    shape: Shape,
    name: str,
    layers: int,
    device: torch.device,
    memory: float,
    seconds: float,
    graphs: Graphs = graphs_on,
) -> Iterator[tuple[str, ...]]:
    """A line of the table for each number of rows. `memory`: bytes a second."""
    source = RandomLayers(deeper(shape.config, layers), Quantisation.parse(name), shape.forms)
    _, stored = source.size
    block = Block(source, 1, 1 + layers, sixteen_bit_type(device), device, graphs=graphs)
    static = block.static
    for rows in ROWS:
        difference = _difference(block, rows)
        works = {
            (captured, settle): _either(block, passes([block], rows, 0, settle=settle), captured)
            for captured in (False, True)
            for settle in (False, True)
        }
        found = timed(works, seconds / len(ROWS))
        settled(device)
        block.static = static
        if static is None or not static.works:
            raise RuntimeError("its passes cannot be captured; the log says why")
        eager, graph = (found[captured, True].median / layers for captured in (False, True))
        hosts = [found[captured, False].least / layers for captured in (False, True)]
        speed = stored / graph
        yield (
            str(rows),
            *(f"{one * 1e3:.3f}" for one in (eager, graph)),
            *(f"{one * 1e6:.0f}" for one in hosts),
            f"{speed / 1e9:.4g}",
            f"{speed / memory:.0%}",
            f"{difference:.1e}",
        )


def table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Markdown."""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{' --- |' * len(COLUMNS)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _either(block: Block, run: Callable[[], object], captured: bool) -> Callable[[], object]:
    """The pass with or without graphs."""
    static = block.static

    def work() -> None:
        block.static = static if captured else None
        run()

    return work


def _difference(block: Block, rows: int) -> float:
    """Between rows computed without graphs and the same, replayed."""
    static, out = block.static, list[torch.Tensor]()
    for captured in (False, True):
        torch.manual_seed(rows)
        block.static = static if captured else None
        run = passes([block], rows, 0)
        out.append([run() for _ in range(3)][-1].double())
    block.static = static
    return float((out[0] - out[1]).abs().max() / out[0].abs().max())


if __name__ == "__main__":
    sys.exit(main())
