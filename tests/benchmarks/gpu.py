"""What a CUDA device takes for products, attention and layers, and whether rows stay apart there.

    python tests/benchmarks/gpu.py [--model llama-2-7b] [--layers 8] [--seconds 20] [--out FILE]

First whether a row has the same bits alone and beside others, in products, attention and a block of
layers; if it has not anywhere, that is the first line, and the exit code is 1.

Then products by matrices of several sizes, each way that this device has: edgespec's kernels,
torch's for 4 bits ("tinygemm"), bitsandbytes' and cuBLAS. Microseconds for 1 to 64 rows, the price
of 16 rows as a multiple of one, and how fast one row reads the matrix, as a share of the rate at
which this device reads a large buffer. The calls are replayed from a CUDA graph, over copies that
together exceed the cache. Likewise attention, after several lengths of text.

Then, for each quantisation that runs there, and 1 to 64 rows after an empty cache: milliseconds a
layer of a pass through so many layers of random weights, without and with graphs; microseconds
until the host had launched a layer; how fast the packed bytes are read with graphs, as that share;
and how far rows differ between both ways, as a share of the largest number. Markdown, on the
terminal and into a file. Without a CUDA device it says so, and ends with 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.daemon.bandwidths import memory_rate
from edgespec.daemon.device import gpu_facts, last_level_cache
from edgespec.daemon.kernels import sixteen_bit_type, tried_kernels
from edgespec.daemon.layer_times import Shape, deeper, default_shape, llama, passes, settled
from edgespec.daemon.memory import available_memory
from edgespec.daemon.random_layers import RandomLayers
from edgespec.daemon.timing import timed
from edgespec.errors import CapacityError, ModelError
from edgespec.kernels.gpu.usable import complaint, usable
from edgespec.model.block import Block, row_math
from edgespec.model.cuda_graphs import GraphMaker, graphs_on
from edgespec.model.matrices import plain_product
from edgespec.model.quantised.int4 import Int4Linear
from edgespec.model.quantised.linear import held_bytes, linear_from
from edgespec.model.quantised.nf4 import library
from edgespec.model.quantised.selftest import made_up
from edgespec.model.row_math import BATCHED, Norm, RowMath
from edgespec.model.tensors import compute_dtype
from edgespec.model.tree_attention import AttentionForm, Visibility
from edgespec.planning.profile import ROWS

COLUMNS = (
    *("rows", "eager ms", "graph ms", "eager host µs", "graph host µs", "GB/s"),
    *("of memory", "difference"),
)
NO_DEVICE = "no CUDA device here, so nothing is measured"

SIZES = ((4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
"""Of matrices [out, in]: of Llama 3.1 8B, the output head last."""

TEXTS = (256, 1024, 4096)
"""Cached rows before those that attend."""

_COPIES = 1 << 28
"""Bytes of all copies of a matrix together: more than a GPU's cache."""

_FORMS = ("int4", "int4-g32", "int8", "nf4")

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
    own = usable(device)
    lines.append(f"edgespec's kernels: {'in use' if own else complaint(device)}")
    failures = list(variances(device, compute_dtype(sixteen_bit_type(device))))
    lines[:0] = [f"**A row's bits depend on its batch: {one}**" for one in failures]
    print("rows: " + ("; ".join(failures) or "the same in every batch"), file=sys.stderr)
    for size in SIZES:
        lines += ["", *product_table(device, torch.Size(size), memory, options.seconds)]
    lines += ["", *attention_table(device, options.seconds)]
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
    return 1 if failures else 0


def variances(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int] = (4096, 4096), rows: int = 64
) -> Iterator[str]:
    """What gives a row other bits alone, or beside fewer rows, than beside all of them."""
    generator = torch.Generator().manual_seed(0)
    size = torch.Size(shape)
    works: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for name in ("none", *_FORMS):
        try:
            works[f"a product by {name}"] = _product(name, size, dtype, device)
        except ModelError:  # without bitsandbytes
            continue
    norm = Norm(torch.randn(shape[1], generator=generator).to(device, dtype), 1e-5, False)
    math = row_math(device, dtype, False)
    works["a norm"] = lambda some: math.norm(some, norm)
    works["a gate"] = lambda some: math.gated(some, "silu")
    inputs = torch.randn(rows, shape[1], generator=generator).to(device, dtype)
    for name, work in works.items():
        whole = work(inputs)
        for count in (one for one in (1, 2, 5, 16, 33) if one < rows):
            for first in {0, 1, rows // 2, rows - count}:
                some = inputs[first : first + count]
                if not torch.equal(work(some), whole[first : first + count]):
                    yield f"{name} of {shape[0]} x {shape[1]}, {count} of {rows} rows"
                    break
    for text in (0, 100, 1000):
        attend = _attention(device, dtype, rows, text, math)
        whole = attend(range(rows))
        if any(not torch.equal(attend([row])[0], whole[row]) for row in (0, rows // 2, rows - 1)):
            yield f"attention after {text} rows"


def product_table(
    device: torch.device,
    size: torch.Size,
    memory: float,
    seconds: float,
    graphs: Graphs = graphs_on,
    counts: Sequence[int] = ROWS,
) -> Iterator[str]:
    """Markdown: a line for each way to multiply by a matrix [out, in]."""
    dtype = compute_dtype(sixteen_bit_type(device))
    ways = {name: (name, _product) for name in ("none", *_FORMS)}
    ways["none, cuBLAS"] = "none", _library_product
    ways |= {f"{name}, tinygemm": (name, _library_product) for name in ("int4", "int4-g32")}
    ways["nf4, bitsandbytes"] = "nf4", _bitsandbytes_product
    columns = [f"{count}" for count in counts]
    yield f"Products by {size[0]} x {size[1]}, microseconds by rows"
    yield ""
    yield f"| way | {' | '.join(columns)} | 16 : 1 | of memory |"
    yield "|" + " --- |" * (len(counts) + 3)
    for label, (name, make) in ways.items():
        form = Quantisation.parse(name)
        stored = held_bytes(form, size, dtype)
        copies = max(1, min(16, _COPIES // stored))
        try:
            products = [make(name, size, dtype, device) for _ in range(copies)]
            works = {
                count: _replayed(
                    device,
                    graphs(device),
                    products,
                    torch.randn(count, size[1]).to(device, dtype),
                )
                for count in counts
            }
            found = timed(works, seconds / len(ways))
        except (RuntimeError, ModelError) as problem:
            yield f"| {label} | {str(problem).strip().splitlines()[0]} |"
            continue
        took = {count: found[count].median / copies for count in counts}
        price = f"{took[16] / took[1]:.2f}" if 16 in took else ""
        share = f"{stored / took[counts[0]] / memory:.0%}"
        shown = " | ".join(f"{one * 1e6:.1f}" for one in took.values())
        yield f"| {label} | {shown} | {price} | {share} |"


def attention_table(
    device: torch.device,
    seconds: float,
    graphs: Graphs = graphs_on,
    texts: Sequence[int] = TEXTS,
    counts: Sequence[int] = ROWS,
) -> Iterator[str]:
    """Markdown: microseconds by rows, in edgespec's way on this device and in torch's."""
    dtype = compute_dtype(sixteen_bit_type(device))
    yield "Attention of 32 heads, 8 of keys, 128 wide, microseconds by rows"
    yield ""
    yield f"| way, cached rows | {' | '.join(map(str, counts))} |"
    yield "|" + " --- |" * (len(counts) + 1)
    maths = {"edgespec": row_math(device, dtype, False), "torch": BATCHED}
    for text in texts:
        for name, math in maths.items():
            works = {}
            for count in counts:
                attend = _attention(device, dtype, count, text, math)
                every = range(count)
                attend(every)  # makes the table of places, which a pass has once for all layers
                run = [lambda _, a=attend, e=every: a(e)] * 8
                works[count] = _replayed(device, graphs(device), run, torch.empty(0))
            found = timed(works, seconds / len(texts) / len(maths))
            shown = " | ".join(f"{found[count].median / 8 * 1e6:.1f}" for count in counts)
            yield f"| {name}, {text} | {shown} |"


def _replayed(
    device: torch.device,
    maker: GraphMaker | None,
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    rows: torch.Tensor,
) -> Callable[[], None]:
    """All products of these rows, one after the other, from a graph if there is a maker."""

    @torch.inference_mode()
    def work() -> None:
        for product in products:
            product(rows)

    replay = work
    if maker is not None:
        maker.warm(work)
        replay = maker.capture(work).replay

    # A graph does not hold what it reads: it would go on in memory that something else has by then.
    def run(_held: object = work) -> None:
        replay()
        settled(device)

    return run


def _product(
    name: str, size: torch.Size, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """As blocks multiply by a matrix."""
    form = Quantisation.parse(name)
    if form.kind == "none":
        return plain_product(torch.randn(size, dtype=dtype, device=device) / 64)
    return linear_from(made_up(form, size), None, size, form, dtype, device)


def _library_product(
    name: str, size: torch.Size, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """As torch does it, without edgespec's kernels."""
    form = Quantisation.parse(name)
    if form.kind == "none":
        return partial(linear, weight=torch.randn(size, dtype=dtype, device=device))
    return Int4Linear(made_up(form, size), None, size, form, dtype, device)


def _bitsandbytes_product(
    name: str, size: torch.Size, dtype: torch.dtype, device: torch.device
) -> Callable[[torch.Tensor], torch.Tensor]:
    """bitsandbytes' own. Raises ModelError where it cannot be imported."""
    functional = library()
    weight = torch.randn(size, dtype=dtype, device=device)
    codes, state = functional.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    return lambda rows: functional.matmul_4bit(rows, codes.t(), state)


def _attention(
    device: torch.device, dtype: torch.dtype, count: int, text: int, math: RowMath
) -> Callable[[Sequence[int]], torch.Tensor]:
    """Attention of some of `count` rows, each of which follows that before it, or the one before
    that: after `text` cached ones."""
    heads, kv_heads, dim = 32, 8, 128
    generator = torch.Generator().manual_seed(count)
    length = text + count
    sees = torch.zeros(count, count, dtype=torch.bool)
    for row in range(count):
        if row > 1:
            sees[row] = sees[row - 1 - row % 2]
        sees[row, row] = True
    mask = torch.cat((torch.ones(count, text, dtype=torch.bool), sees), 1).to(device)
    depth = text + sees.sum(1) - 1
    slots = torch.cat((torch.arange(text), depth)).to(device)
    query = torch.randn(count, heads, dim, generator=generator).to(device, dtype)
    held = torch.randn(2, 1, kv_heads, length, dim, generator=generator).to(device, dtype)
    form = AttentionForm(dim**-0.5)
    known: dict[tuple[int, ...], Visibility] = {}

    def attend(rows: Sequence[int]) -> torch.Tensor:
        key = tuple(rows)
        if key not in known:
            index = torch.tensor(key, device=device)
            known[key] = Visibility(mask[index][None, None], depth.to(device)[index], slots)
        some = query if len(key) == count else query[list(key)]
        return math.attention(some, held[0], held[1], known[key], form)

    return attend


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
