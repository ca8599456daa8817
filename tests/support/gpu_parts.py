"""The parts of the run that is prepared for a GPU (tests/benchmarks/gpu.py), in order of worth.

Each is a generator of lines of a table, a mapping by column: whoever asks stops when time is up. A
line with "wrong" says that something is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.daemon.doctor import taken_before_weights
from edgespec.daemon.layer_times import Shape, deeper, llama, passes, settled
from edgespec.daemon.memory import available_memory
from edgespec.daemon.random_layers import RandomLayers
from edgespec.daemon.timing import timed
from edgespec.errors import CapacityError, ModelError
from edgespec.model import block as blocks
from edgespec.model import matrices
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.quantised.int4 import Int4Linear
from edgespec.model.quantised.kernels import relative_error
from edgespec.model.quantised.linear import dequantised, held_bytes
from edgespec.model.quantised.nf4 import library
from edgespec.model.quantised.rounding import Packed
from edgespec.model.quantised.selftest import made_up
from edgespec.model.row_codes import CODED, as_held, coded_width
from edgespec.model.row_math import BATCHED, Norm, RowMath, Taps
from edgespec.model.sources import open_source
from edgespec.model.state_form import StateForm, wide
from edgespec.model.state_mixer import StateMath, read_states
from edgespec.model.state_torch import TorchStates
from edgespec.model.tree_attention import AttentionForm, Visibility, tree_mask
from edgespec.planning.profile import ROWS

from .block_texts import Text, jointly
from .checkpoints import write_family
from .cuda_graphs import GraphMaker, graphs_on
from .packed_forms import FORMS
from .state_forms import PUBLISHED, TINY_DELTA

Line = Mapping[str, object]
Product = Callable[[torch.Tensor], torch.Tensor]

_COPIES = 1 << 28
"""Bytes of all copies of a matrix together: more than a GPU's cache."""

_EXACT = {torch.float16: 6e-4, torch.bfloat16: 4e-3, torch.float32: 1e-6}
"""How far a product may be off: a rounding of the result."""

_TEXT = 60
"""Rows before those over states: more than a first state's boundary, fewer than slots are given."""

_LAYERS_OFF = 0.05
"""How far a block in 16 bit may be off float64."""


@dataclass(frozen=True)
class Sizes:
    """What is measured. `matrices` [out, in]; `checked`: that of whose products every bit is
    compared, of `rows`, and `long`: one of which few rows' sections are shared out, many rows' not;
    `packed`: forms of files; `copied`: bytes that go from a file to the device; `prompt`: rows of a
    family's text; `states`: layers that keep some; `convolved`: numbers of a row that is; `heads`,
    those of keys, and their width; `texts`: cached rows before those that attend; `draft_rows`: of
    a draft's pass; `rings`: stages, draft and temperature; `model`: whose answers these are;
    `profile_seconds`: what `edgespec profile` is given."""

    matrices: Sequence[tuple[int, int]] = ((28672, 4096), (4096, 4096), (4096, 14336), (6144, 4096))
    checked: tuple[int, int] = (1088, 4096)
    long: tuple[int, int] = (28672, 1024)
    rows: int = 64
    counts: Sequence[int] = ROWS
    batches: Sequence[int] = (1, 2, 5, 8, 9, 16, 33)
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16)
    forms: Sequence[str] = ("int4", "int4-g128", "int4-g32", "int8", "nf4")
    packed: Sequence[str] = ("Q4_K", "Q6_K")
    copied: int = 1 << 28
    families: Sequence[str] = (
        *("llama", "qwen3", "gemma2", "phi3", "mistral"),
        *("granitemoehybrid-mamba", "qwen3_5_text", "lfm2"),
    )
    family_layers: int = 4
    prompt: int = 70
    family_settings: Mapping[str, int] = field(default_factory=dict)
    states: Mapping[str, StateForm] = field(default_factory=lambda: PUBLISHED)
    convolved: int = 2048
    texts: Sequence[int] = (256, 1024, 4096, 16384)
    trees: Sequence[int] = (1, 16, 64)
    heads: tuple[int, int, int] = (32, 8, 128)
    other_heads: Sequence[tuple[int, int, int]] = ((9, 3, 64), (8, 4, 256))
    shape: Shape = field(default_factory=lambda: Shape("llama-2-7b", llama("llama-2-7b")))
    layers: int = 4
    vocabulary: int = 128256
    draft_rows: Sequence[int] = (1, 8)
    profile_seconds: int = 20
    model: str = "smollm2-135m"
    rings: Sequence[tuple[int, str, float]] = (
        *((1, "ngram", 0.0), (3, "dspark", 0.8), (3, "hybrid:ngram+dspark", 0.0)),
        *((1, "dspark", 0.8), (1, "hybrid:ngram+dspark", 0.0), (3, "ngram", 0.8)),
    )
    policies: str = "all"
    limit: int = 2
    new_tokens: int = 48
    seconds: float = 1.0  # for each line that is timed

    @property
    def most(self) -> int:
        """Rows of any part."""
        return max(self.rows, *self.counts, *self.batches)


TINY = Sizes(
    matrices=((128, 128),),
    checked=(40, 128),
    long=(40, 128),
    rows=9,
    counts=(2,),
    batches=(1, 8),
    dtypes=(torch.bfloat16,),
    forms=("int4",),
    packed=("Q4_0",),
    copied=1 << 20,
    families=("llama", "granitemoehybrid-mamba"),
    family_layers=1,
    prompt=5,
    family_settings={
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
        **{"mamba_n_heads": 2, "mamba_n_groups": 1},
    },
    states={"gated delta": TINY_DELTA},
    convolved=20,
    texts=(5,),
    trees=(2,),
    heads=(2, 1, 16),
    other_heads=((2, 2, 16),),
    shape=Shape(
        "tiny",
        llama("qwen2.5-0.5b").changed(
            hidden_size=128,
            intermediate_size=128,
            head_dim=64,
            num_attention_heads=2,
            num_key_value_heads=1,
        ),
    ),
    layers=1,
    vocabulary=96,
    draft_rows=(1,),
    profile_seconds=1,
    rings=((1, "ngram", 0.0),),
    policies="autoregressive,adaptive",
    limit=1,
    new_tokens=4,
    seconds=0.0,
)


@dataclass(frozen=True)
class Place:
    """Where it is measured: `memory` bytes a second are read there, `graphs` captures; `until` then
    by time.monotonic() other processes have to be done."""

    device: torch.device
    sizes: Sizes
    memory: float
    graphs: Callable[[torch.device], GraphMaker | None] = graphs_on
    until: float = math.inf

    @property
    def dtype(self) -> torch.dtype:
        """That in which speeds are measured."""
        return self.sizes.dtypes[0]

    def timed(self, works: Mapping[int, Callable[[], object]]) -> dict[int, float]:
        """Median seconds by rows."""
        found = timed(works, self.sizes.seconds)
        return {key: one.median for key, one in found.items()}


def right(place: Place) -> Iterator[Line]:
    """Every form and kernel against float64, and each row alone, beside some, and beside all."""
    from edgespec.model.quantised.triton_linear import fits  # needs triton

    out, columns = place.sizes.checked
    most = place.sizes.rows
    named = {name: QUANTISATIONS[name] for name in place.sizes.forms} | FORMS
    if place.device.type == "cpu":
        named = {name: named[name] for name in (*place.sizes.forms, *place.sizes.packed)}
    long = torch.Size(place.sizes.long)
    for dtype in place.sizes.dtypes:
        every = _by_chance(most, max(columns, long[1])).to(place.device, dtype)
        for name, form, shape in (
            *((name, form, torch.Size((out, columns))) for name, form in named.items()),
            *((f"{name}, long", named[name], long) for name in place.sizes.forms[:1]),
        ):
            rows = every[:, : shape[1]].contiguous()
            if not fits(form, shape):
                yield {"what": f"product, {name}", "skipped": "by torch's slices"}
                continue
            try:
                packed = made_up(form, shape)
                weight = dequantised(packed, shape, form, torch.float64).to(place.device)
                multiply = matrices.linear_from(packed, None, shape, form, dtype, place.device)
            except ModelError as problem:  # without bitsandbytes
                yield {"what": name, "dtype": _name(dtype), "skipped": str(problem)}
                continue
            yield _compared(place, f"product, {name}", multiply, rows, rows.double() @ weight.T)
        rows = every[:, :columns].contiguous()
        weight = _by_chance(out, columns).to(place.device, dtype)
        wide = rows.double() @ weight.double().T
        yield _compared(place, "product, plain", matrices.plain_product(weight), rows, wide)
        row_math = blocks.row_math(place.device, dtype)
        gain = _by_chance(columns).to(place.device, dtype)
        norm = Norm(gain, 1e-5, False)
        normed = rows.double() / (rows.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
        normed *= gain.double()
        yield _compared(
            place, "norm", lambda some, m=row_math, n=norm: m.norm(some, n), rows, normed
        )
        gate, up = rows.double().chunk(2, 1)
        gated = torch.nn.functional.silu(gate) * up
        yield _compared(place, "gate", lambda some, m=row_math: m.gated(some, "silu"), rows, gated)
        for text in place.sizes.texts[:3]:
            heads = place.sizes.heads
            attend = _attention(place, dtype, most, text, row_math, heads)
            exact = _attention(place, torch.float64, most, text, BATCHED, heads, dtype)
            numbers = torch.arange(most)
            yield _compared(place, f"attention, {text}", attend, numbers, exact(numbers))


def layers(place: Place) -> Iterator[Line]:
    """Blocks of several families against float64: a tree, its paths alone, two requests in one
    pass, and by graphs."""
    for family in place.sizes.families:
        with tempfile.TemporaryDirectory() as folder:
            settings = place.sizes.family_settings
            source = open_source(write_family(Path(folder), family, **settings))
            end = place.sizes.family_layers
            prompt = place.sizes.prompt
            expected = Text(Block(source, 0, end, "float64"), (prompt,)).tree()
            for dtype in map(_name, place.sizes.dtypes):
                block = Block(source, 0, end, dtype, place.device)
                whole = Text(block, (prompt,)).tree()
                wrong = []
                off = relative_error(whole.cpu(), expected)
                if not off < _LAYERS_OFF:
                    wrong.append("float64")
                alone = Text(block, (3, prompt - 4, 1)).path([0, 1, 3])
                if not torch.equal(alone, whole[3]):
                    wrong.append("alone")
                joint = jointly([Text(block, (prompt,)), Text(block, (prompt - 1, 1))])
                if not all(torch.equal(one, whole) for one in joint):
                    wrong.append("jointly")
                if not _tree_by_graph_is(place, Text(block, (prompt,)), whole):
                    wrong.append("graphs")
                line = {"what": f"layers of {family}", "dtype": dtype, "off": f"{off:.1e}"}
                yield line | ({"wrong": ", ".join(wrong)} if wrong else {})


def products(place: Place) -> Iterator[Line]:
    """Microseconds by rows, by each way that this device has: edgespec's kernels, torch's for 4
    bits ("tinygemm"), bitsandbytes' and cuBLAS; "of memory": one row's reading, of its rate."""
    ways: dict[str, tuple[str, Callable[..., Product]]]
    ways = {name: (name, _product) for name in ("none", *place.sizes.forms, *place.sizes.packed)}
    ways["none, cuBLAS"] = "none", _library_product
    ways |= {f"{name}, tinygemm": (name, _library_product) for name in ("int4", "int4-g32")}
    ways["nf4, bitsandbytes"] = "nf4", _bitsandbytes_product
    for size in map(torch.Size, place.sizes.matrices):
        for label, (name, make) in ways.items():
            line = {"matrix": f"{size[0]} x {size[1]}", "way": label}
            stored = held_bytes(_form(name), size, place.dtype)
            copies = 1 if place.device.type == "cpu" else max(1, min(16, _COPIES // stored))
            try:
                made = [make(name, size, place.dtype, place.device) for _ in range(copies)]
                took = place.timed(
                    {
                        count: _replayed(place, made, _by_chance(count, size[1]))
                        for count in place.sizes.counts
                    }
                )
            except (RuntimeError, ModelError) as problem:
                yield line | {"skipped": str(problem).strip().splitlines()[0]}
                continue
            each = {count: seconds / copies for count, seconds in took.items()}
            share = stored / each[place.sizes.counts[0]] / place.memory
            yield line | _microseconds(each) | {"of memory": f"{share:.0%}"}


def attention(place: Place) -> Iterator[Line]:
    """Microseconds by cached rows and rows of a tree; in the longest but one of texts also of
    narrow and of wide heads."""
    own = blocks.row_math(place.device, place.dtype)
    ways = {"edgespec": (own, place.dtype), "edgespec, int8 cache": (own, CODED)}
    ways["torch"] = BATCHED, place.dtype
    heads = place.sizes.heads
    others = [(place.sizes.texts[-2:][0], "edgespec", one) for one in place.sizes.other_heads]
    every_way = [(text, name, heads) for text in place.sizes.texts for name in ways]
    for text, name, heads in (*every_way, *others):
        (kind, held_as), (_, kv_heads, dim) = ways[name], heads
        works = {}
        for count in place.sizes.trees:
            attend = _attention(place, place.dtype, count, text, kind, heads, held_as=held_as)
            every = torch.arange(count)
            attend(every)  # makes the table of places, which a pass has once for all layers
            run = [lambda _, a=attend, e=every: a(e)] * 8
            works[count] = _replayed(place, run, torch.empty(0))
        took = {count: seconds / 8 for count, seconds in place.timed(works).items()}
        row = coded_width(dim) if held_as == CODED else dim * place.dtype.itemsize
        share = 2 * kv_heads * text * row / took[place.sizes.trees[0]] / place.memory
        line = {"cached": text, "heads": f"{heads[0]} of {dim}", "way": name}
        yield line | _microseconds(took) | {"of memory": f"{share:.0%}"}


def states(place: Place) -> Iterator[Line]:
    """What one layer does with rows over a state, and with a short convolution: against float64 and
    in any batches, then microseconds by rows, beside torch's way, with launching, and by graph."""
    from edgespec.model.triton_states import TritonStates  # needs triton

    ways: dict[str, list[Product]] = {}
    for name, form in place.sizes.states.items():
        ways[f"states, {name}"] = [
            _reading(place, form, partial(TritonStates, dtype=place.dtype), place.dtype),
            _reading(place, form, TorchStates, place.dtype),
            _reading(place, form, TorchStates, torch.float64),
        ]
    maths = (blocks.row_math(place.device, place.dtype), BATCHED)
    ways["short convolution"] = [
        *(_convolving(place, math, place.dtype) for math in maths),
        _convolving(place, BATCHED, torch.float64),
    ]
    numbers = torch.arange(place.sizes.most, device=place.device)
    for what, (own, other, exact) in ways.items():
        rows = numbers[: place.sizes.rows]
        yield _compared(place, what, own, rows, exact(rows.cpu()))
        for way, work in (("edgespec", own), ("edgespec, by graph", own), ("torch", other)):
            works: dict[int, Callable[[], object]] = {}
            for count in place.sizes.counts:
                run: Callable[[], object] = partial(work, numbers[:count])
                run()  # makes the tables, which a pass has once for all layers
                if way.endswith("graph"):
                    run = _captured(place, run) or run
                works[count] = partial(_settled, run, place.device)
            yield {"what": what, "way": way} | _microseconds(place.timed(works))


def passes_by_graph(place: Place) -> Iterator[Line]:
    """Layers of random weights after an empty cache: milliseconds a layer, without graphs and with;
    microseconds until the host has launched one; how fast the packed bytes are read."""
    count = place.sizes.layers
    for name in ("none", *place.sizes.forms):
        line = {"layers": f"{count} of {place.sizes.shape.name}", "form": name}
        config = deeper(place.sizes.shape.config, count)
        source = RandomLayers(config, Quantisation.parse(name), place.sizes.shape.forms)
        _, stored = source.size
        try:
            block = Block(source, 1, 1 + count, _name(place.dtype), place.device)
            for rows in place.sizes.counts:
                yield line | {"rows": rows} | _either_way(place, block, rows, stored)
        except (RuntimeError, CapacityError, ModelError) as problem:
            yield line | {"skipped": str(problem).strip().splitlines()[0]}


def d0(place: Place) -> Iterator[Line]:
    """What the coordinator's device computes: an output head, and passes of the draft's layers."""
    size = torch.Size((place.sizes.vocabulary, int(place.sizes.shape.config.hidden_size)))
    for name in ("none", *place.sizes.forms[:1]):
        product = _product(name, size, place.dtype, place.device)
        works = {
            count: _replayed(place, [product], _by_chance(count, size[1]))
            for count in place.sizes.counts
        }
        yield {"what": f"head of {size[0]} x {size[1]}, {name}"} | _microseconds(place.timed(works))
    with tempfile.TemporaryDirectory() as folder:
        settings = place.sizes.family_settings
        source = open_source(write_family(Path(folder), "llama", **settings))
        block = Block(source, 0, source.layers, _name(place.dtype), place.device)
        head = OutputHead(source, _name(place.dtype), place.device, share=block)

        def guesses(run: Callable[[], torch.Tensor]) -> None:
            head.logits(run())
            settled(place.device)

        works = {
            count: partial(guesses, passes([block], count, 0, settle=False))
            for count in place.sizes.draft_rows
        }
        yield {"what": "pass of a tiny draft: its launches"} | _microseconds(place.timed(works))


def memory(place: Place) -> Iterator[Line]:
    """What a process takes before its first weight, and how fast bytes of a mapped file come to the
    device: as they are, and by pinned pieces of which one is filled while another is on its way."""
    kind = place.device.type
    taken = taken_before_weights(kind, lambda: available_memory(kind).bytes)
    yield {"what": "taken, MiB"} | {what: f"{size / 2**20:.0f}" for what, size in taken.items()}
    with tempfile.NamedTemporaryFile() as file:
        file.write(os.urandom(1 << 20) * (place.sizes.copied >> 20))
        file.flush()
        mapped = torch.from_file(file.name, size=place.sizes.copied, dtype=torch.uint8)
        out = torch.empty_like(mapped, device=place.device)
        pinned = torch.empty(
            (2, place.sizes.copied // 16), dtype=torch.uint8, pin_memory=kind == "cuda"
        )
        done = [torch.cuda.Event() for _ in pinned] if kind == "cuda" else []

        def staged() -> None:
            for number, (part, to) in enumerate(zip(mapped.chunk(16), out.chunk(16), strict=True)):
                if done:
                    done[number % 2].synchronize()
                pinned[number % 2].copy_(part)
                to.copy_(pinned[number % 2], non_blocking=True)
                if done:
                    done[number % 2].record()
            settled(place.device)

        took = place.timed(
            {0: lambda: _settled(lambda: out.copy_(mapped), place.device), 1: staged}
        )
        for way, seconds in zip(("as they are", "by pinned pieces"), took.values(), strict=True):
            rate = place.sizes.copied / seconds / 1e9
            yield {"what": f"bytes of a file, {way}", "GB/s": f"{rate:.2f}"}


def profile(place: Place) -> Iterator[Line]:
    """`edgespec profile`, as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        words = ("--out", str(path), "--seconds", str(place.sizes.profile_seconds))
        try:
            said = _edgespec(place, "profile", *words)
        except TimeoutError:
            yield {"what": "edgespec profile", "skipped": "its time was up"}
            return
        yield {"what": "edgespec profile", "says": said.strip()[-2000:]}
        if path.exists():
            yield {"what": "its file", "says": path.read_text(encoding="utf-8")}


def answers(place: Place) -> Iterator[Line]:
    """Whole answers by rings of processes: tokens a second of each policy, and whether each text is
    plain decoding's."""
    sizes = place.sizes
    for dtype in map(_name, sizes.dtypes):
        for stages, draft, temperature in sizes.rings:
            line = {"dtype": dtype, "stages": stages, "draft": draft, "temperature": temperature}
            words = [
                *("--model", sizes.model, "--stages", str(stages), "--draft", draft),
                *("--temperature", str(temperature), "--dtype", dtype),
                *("--policy", sizes.policies, "--limit", str(sizes.limit)),
                *("--max-new-tokens", str(sizes.new_tokens)),
            ]
            try:
                with tempfile.TemporaryDirectory() as folder:
                    said = _edgespec(place, "bench", *words, "--out", folder, "--json")
                runs = json.loads(said)["runs"]
            except TimeoutError:
                yield line | {"skipped": "its time was up"}
                return
            except (ValueError, KeyError):
                yield line | {"wrong": said.strip()[-500:]}
                continue
            for run in runs:
                speed = f"{run['tokens_per_second']:.1f}"
                found = line | {"policy": run["policy"], "tokens/s": speed}
                yield found | ({} if run["exact"] else {"wrong": "text differs"})


PARTS: dict[str, tuple[Callable[[Place], Iterator[Line]], float]] = {
    "right": (right, 120.0),  # most of it is compiling, about a second for each kind
    "layers": (layers, 45.0),
    "products": (products, 60.0),
    "attention": (attention, 25.0),
    "states": (states, 25.0),
    "passes": (passes_by_graph, 45.0),
    "d0": (d0, 15.0),
    "memory": (memory, 15.0),
    "profile": (profile, 45.0),
    "answers": (answers, 85.0),
}
"""In order of worth, each with its share of eight minutes, in seconds."""


def _edgespec(place: Place, *words: str) -> str:
    """What the command says: its output, or its error. Raises TimeoutError when its part's time is
    up; then its processes are ended."""
    command = [sys.executable, "-m", "edgespec.cli.main", *words]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        out, error = child.communicate(timeout=max(1.0, place.until - time.monotonic()))
    except subprocess.TimeoutExpired as late:
        raise TimeoutError from late
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return out if child.returncode == 0 or out else error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _by_chance(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


def _microseconds(took: Mapping[int, float]) -> dict[str, object]:
    """By rows; and what 16 of them take in the time of one."""
    line: dict[str, object] = {str(count): f"{took[count] * 1e6:.1f}" for count in took}
    if {1, 16} <= took.keys():
        line["16 : 1"] = f"{took[16] / took[1]:.2f}"
    return line


def _compared(
    place: Place,
    what: str,
    work: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    expected: torch.Tensor,
) -> Line:
    """`work` of rows against what it should give, and of some of them alone."""
    whole = work(rows)
    off, wrong = relative_error(whole.cpu(), expected.cpu()), []
    if not off < 4 * _EXACT[whole.dtype]:
        wrong.append("float64")
    for count in (one for one in place.sizes.batches if one < len(rows)):
        for first in sorted({0, 1, len(rows) // 2, len(rows) - count}):
            if not torch.equal(work(rows[first : first + count]), whole[first : first + count]):
                wrong.append(f"{count} of {len(rows)} rows")
                break
    line: dict[str, object] = {"what": what, "dtype": _name(whole.dtype), "off": f"{off:.1e}"}
    return line | ({"wrong": ", ".join(wrong)} if wrong else {})


def _captured(place: Place, work: Callable[[], object]) -> Callable[[], None] | None:
    """What does the work again by a graph; None without a maker. Raises RuntimeError if it cannot
    be captured."""
    maker = place.graphs(place.device)
    if maker is None:
        return None

    def once() -> None:
        work()

    maker.warm(once)
    return maker.capture(once).replay


@torch.inference_mode()
def _tree_by_graph_is(place: Place, text: Text, whole: torch.Tensor) -> bool:
    """Whether a pass over the text's tree that was captured, and done again, gives these rows."""
    block = text.block
    tokens, positions, cache, mask = text.of(*text.of_tree())
    if block.has_experts or block.token_rows is not None or cache.folded is not None:
        return True  # they look at the rows on the way, or at the host's memory
    out, inputs = list[torch.Tensor](), block.embedded(tokens)

    def work() -> None:
        cache.gather(text.prompt, np.arange(0))
        found = block.forward(inputs, positions, cache, mask)
        assert found is not None
        out[:] = [found]

    replay = _captured(place, work)
    if replay is None:
        return True
    out[0].zero_()
    replay()
    settled(place.device)
    return torch.equal(out[0], whole)


def _replayed(place: Place, products: Sequence[Product], rows: torch.Tensor) -> Callable[[], None]:
    """All products of these rows, one after the other, from a graph if there is a maker."""
    rows = rows.to(place.device, place.dtype)

    @torch.inference_mode()
    def work() -> None:
        for product in products:
            product(rows)

    replay = _captured(place, work) or work

    # A graph does not hold what it reads: it would go on in memory that something else has by then.
    def run(_held: object = work) -> None:
        replay()
        settled(place.device)

    return run


def _form(name: str) -> Quantisation:
    """By a name of a quantisation, or of packed_forms."""
    return FORMS[name] if name in FORMS else Quantisation.parse(name)


@lru_cache(maxsize=8)
def _packed(form: Quantisation, size: torch.Size) -> Packed:
    """A large matrix takes a processor seconds; its copies are alike, and so are other ways'."""
    return made_up(form, size)


def _product(name: str, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Product:
    """As blocks multiply by a matrix."""
    form = _form(name)
    if form.kind == "none":
        return matrices.plain_product(torch.randn(size, dtype=dtype, device=device) / 64)
    return matrices.linear_from(_packed(form, size), None, size, form, dtype, device)


def _library_product(
    name: str, size: torch.Size, dtype: torch.dtype, device: torch.device
) -> Product:
    """As torch does it, without edgespec's kernels."""
    form = Quantisation.parse(name)
    if form.kind == "none":
        return partial(linear, weight=torch.randn(size, dtype=dtype, device=device))
    return Int4Linear(_packed(form, size), None, size, form, dtype, device)


def _bitsandbytes_product(
    name: str, size: torch.Size, dtype: torch.dtype, device: torch.device
) -> Product:
    """bitsandbytes' own. Raises ModelError where it cannot be imported."""
    functional = library()
    weight = torch.randn(size, dtype=dtype, device=device)
    codes, state = functional.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    return lambda rows: functional.matmul_4bit(rows, codes.t(), state)


def _attention(
    place: Place,
    dtype: torch.dtype,
    count: int,
    text: int,
    row_math: RowMath,
    of_heads: tuple[int, int, int],
    rounded: torch.dtype | None = None,
    held_as: torch.dtype | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Attention of some of `count` rows, by number, each of which follows that before it, or the
    one before that: after `text` cached ones. `rounded`: the dtype of the numbers, if another;
    `held_as`: that of the cache, if another."""
    device, (heads, kv_heads, dim) = place.device, of_heads
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
    query, held = (
        torch.randn(size, generator=generator).to(rounded or dtype).to(device, dtype)
        for size in ((count, heads, dim), (2, 1, kv_heads, length, dim))
    )
    held = held if held_as is None else as_held(held, held_as)
    form = AttentionForm(dim**-0.5)
    known: dict[tuple[int, ...], Visibility] = {}

    def attend(rows: torch.Tensor) -> torch.Tensor:
        key = tuple(rows.tolist())
        if key not in known:
            index = rows.to(device)
            known[key] = Visibility(mask[index][None, None], depth.to(device)[index], slots)
        some = query if len(key) == count else query[list(key)]
        return row_math.attention(some, held[0], held[1], known[key], form)

    return attend


def _reading(
    place: Place, form: StateForm, make: Callable[..., StateMath], dtype: torch.dtype
) -> Product:
    """What some rows, by number, read that all follow one text: by what `make` makes of a form and
    its vectors; in float64 on the CPU."""
    from edgespec.model.triton_states import made_up

    device = torch.device("cpu") if dtype == torch.float64 else place.device
    vectors, before, projected = made_up(form, _TEXT, place.sizes.most)
    math = make(form, {name: one.to(device, wide(dtype)) for name, one in vectors.items()})
    rows, projected = before(dtype, device), projected.to(device, dtype)
    rows.place(_TEXT, len(projected))
    known: dict[int, Visibility] = {}

    @torch.inference_mode()
    def read(numbers: torch.Tensor) -> torch.Tensor:
        count = len(numbers)
        if count not in known:
            places = torch.arange(_TEXT + count, device=device).clamp(max=_TEXT)
            sees = tree_mask(_TEXT, np.eye(count, dtype=np.bool_), device)
            known[count] = Visibility(sees, places[_TEXT:], places)
        return read_states(math, 0, rows, projected.index_select(0, numbers), known[count])

    return read


def _convolving(place: Place, math: RowMath, dtype: torch.dtype) -> Product:
    """The same of a short convolution."""
    device = torch.device("cpu") if dtype == torch.float64 else place.device
    width, most = place.sizes.convolved, place.sizes.most
    taps = Taps(_by_chance(width, 1, 3).to(device, dtype), None)
    held = _by_chance(1, 1, _TEXT + most, width).to(place.dtype).to(device, dtype)
    mixed = _by_chance(most, 3 * width).to(place.dtype).to(device, dtype)
    places = torch.arange(_TEXT + most, device=device).clamp(max=_TEXT)
    sees = tree_mask(_TEXT, np.eye(most, dtype=np.bool_), device)
    known: dict[tuple[int, int], Visibility] = {}

    @torch.inference_mode()
    def convolve(numbers: torch.Tensor) -> torch.Tensor:
        key = len(numbers), numbers.data_ptr()
        if key not in known:
            known[key] = Visibility(sees[:, :, numbers], places[_TEXT:][numbers], places)
        return math.convolved(held, mixed.index_select(0, numbers), known[key], taps)

    return convolve


@torch.inference_mode()
def _either_way(place: Place, block: Block, rows: int, stored: int) -> dict[str, object]:
    """A pass through a block, without graphs and with."""
    run, out = passes([block], rows, 0, settle=False), list[torch.Tensor]()
    expected = run().clone()
    replay = _captured(place, lambda: out.append(run()))
    works: dict[int, Callable[[], object]] = {}
    for number, launch in enumerate((run, replay)):
        if launch is not None:
            works[2 * number] = launch
            works[2 * number + 1] = partial(_settled, launch, place.device)
    found = timed(works, place.sizes.seconds)
    settled(place.device)
    count = place.sizes.layers
    line: dict[str, object] = {
        "ms": f"{found[1].median / count * 1e3:.3f}",
        "host µs": f"{found[0].least / count * 1e6:.0f}",
    }
    best = found[1].median
    if replay is not None:
        out[-1].zero_()
        replay()
        settled(place.device)
        best = found[3].median
        line["graph ms"] = f"{best / count * 1e3:.3f}"
        line["graph host µs"] = f"{found[2].least / count * 1e6:.0f}"
        off = (out[-1].double() - expected.double()).abs().max() / expected.double().abs().max()
        line["difference"] = f"{float(off):.1e}"
    return line | {"of memory": f"{stored / best / place.memory:.0%}"}


def _settled(launch: Callable[[], object], device: torch.device) -> None:
    launch()
    settled(device)


def table(lines: Sequence[Line]) -> Iterator[str]:
    """Markdown: a column for each key that any line has."""
    columns = list(dict.fromkeys(key for line in lines for key in line))
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for line in lines:
        yield f"| {' | '.join(str(line.get(key, '')) for key in columns)} |".replace("\n", " ")
