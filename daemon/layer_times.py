"""How long a decoder layer takes by rows, with each quantisation, on the way that a stage goes."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from edgespec.config import FILE, QUANTISATIONS, Quantisation
from edgespec.daemon.random_layers import RandomLayers, in_layer
from edgespec.daemon.timing import Sample, timed
from edgespec.errors import CapacityError, ConfigError, ModelError
from edgespec.model.block import Block
from edgespec.model.inventory import block_inventory
from edgespec.model.model_config import ModelConfig
from edgespec.model.source import TensorSource
from edgespec.model.tree_attention import tree_mask
from edgespec.planning.cost_model import ARCHITECTURES
from edgespec.planning.profile import ROWS

SEEN = 1024
"""Cached rows at which attention's reading is measured."""
TINY = (1, 9)
"""Layers of the two blocks of tiny matrices that give the fixed cost of a layer and of a pass."""

_DEFAULTS = ("llama-2-7b", "tinyllama-1.1b", "qwen2.5-0.5b")
_TINY_WIDTH = 128
_GPU_DEPTH = 4  # a GPU is given the next layer's work while it computes this one's
_MOST_COPIES = 16
_HARDLY_READING = 8  # times as long as reading the weights takes
_TINY_SHARE = 0.1  # of a quantisation's time
_TINY_SECONDS = 0.2  # at least: hundreds of runs, as a few disturbed ones would decide otherwise
_WITH_CACHE = 0  # the key of the pass with cached rows, beside those by rows
_SPARE = 4  # layers in 16 bit that making one may need beside the finished ones


@dataclass(frozen=True, slots=True)
class Shape:
    """The layer that is measured: a model's name and configuration.

    `forms`: of a model whose file is packed, the form of each matrix of a layer, by its name there.
    """

    name: str
    config: ModelConfig
    forms: Mapping[str, Quantisation] = field(default_factory=dict)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one row in one layer, 16 bit."""
        return 2 * 2 * int(self.config.num_key_value_heads) * self.config.head_dim


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """What was measured with one quantisation.

    `stored`: bytes of a layer's matrices as packed; `weights`: how many weights they have.
    `passes`: by rows, a pass through `depth` layers, of which there were `copies`. `tiny`: one row
    through so many layers of tiny matrices; `launched`: until the host has launched such a pass one
    operation after the other, on a GPU.
    `seen`: as `passes[1]`, but the row attends to SEEN cached ones.
    """

    stored: int
    weights: int
    depth: int
    copies: int
    passes: dict[int, Sample]
    tiny: dict[int, Sample]
    launched: dict[int, Sample]
    seen: Sample


def default_shape(room: int, depth: int) -> Shape:
    """A layer of a 7B model, or the largest smaller one of which a measurement fits into `room`.

    Raises CapacityError if not even the smallest fits.
    """
    shapes = [Shape(name, llama(name)) for name in _DEFAULTS]
    shape = next((shape for shape in shapes if _needed(shape, depth) <= room), shapes[-1])
    check_room(shape, room, depth)
    return shape


def check_room(shape: Shape, room: int, depth: int) -> None:
    """Raises CapacityError if measuring this layer needs more than `room` bytes."""
    needed = _needed(shape, depth)
    if needed > room:
        raise CapacityError(
            f"measuring a layer of {shape.name} needs {needed / 2**30:.2f} GiB, and "
            f"{room / 2**30:.2f} GiB are free; end other programs, or give a smaller model with "
            "--model"
        )


def depth_on(device: torch.device) -> int:
    """Layers of the block that is timed."""
    return _GPU_DEPTH if device.type == "cuda" else 1


def misfits(shape: Shape, names: Sequence[str]) -> dict[str, str]:
    """Which of these quantisations cannot hold such a layer, and why."""
    reasons = {}
    for name in names:
        try:
            _ = RandomLayers(shape.config, Quantisation.parse(name), shape.forms).size
        except ModelError as problem:
            reasons[name] = str(problem)
    return reasons


def measure_layer(
    shape: Shape,
    quantisation: Quantisation,
    dtype: str,
    device: torch.device,
    *,
    beyond_cache: int,
    bandwidth: float,
    room: int,
    seconds: Callable[[], float],
) -> LayerTimes:
    """Time a layer of random weights; `seconds()` says, once it is made, how long that may take.

    Copies of it, `beyond_cache` bytes of weights or as much as `room` has, are used by turns: in a
    block, too, the weights of a layer have left the processor's caches when it is its turn again.
    One is enough where reading them at `bandwidth` takes a small part of a pass anyway.
    Raises ModelError for a layer that edgespec cannot run.
    """
    depth = depth_on(device)
    source = RandomLayers(deeper(shape.config, depth), quantisation, shape.forms)
    weights, stored = source.size

    def block(of: RandomLayers, layers: int) -> Block:
        return Block(of, 1, 1 + layers, dtype, device)  # without embedding and final norm

    blocks = [block(source, depth)]
    pass_seconds = timed({0: passes(blocks, 1, 0)}, 0.0)[0].median
    wanted = math.ceil(beyond_cache / (stored * depth))
    if pass_seconds > _HARDLY_READING * stored * depth / bandwidth:
        wanted = 1
    for _ in range(min(wanted, _MOST_COPIES, room // (stored * depth)) - 1):
        blocks.append(block(source, depth))
        passes(blocks[-1:], 1, 0)()  # the first pass may still prepare something
    tiny_forms = {name: _narrow(form) for name, form in shape.forms.items()}
    tiny = RandomLayers(deeper(_shrunk(shape.config), max(TINY)), quantisation, tiny_forms)
    tiny_blocks = {layers: block(tiny, layers) for layers in TINY}
    tiny_seconds = max(_TINY_SECONDS, _TINY_SHARE * seconds())

    def tiny_times(settle: bool) -> dict[int, Sample]:
        works = {n: passes([one], 1, 0, settle=settle) for n, one in tiny_blocks.items()}
        return timed(works, tiny_seconds)

    settled_times = tiny_times(settle=True)
    launched = tiny_times(settle=False) if device.type == "cuda" else settled_times
    works = {rows: passes(blocks, rows, 0) for rows in ROWS}
    works[_WITH_CACHE] = passes(blocks, 1, SEEN)
    found = timed(works, seconds())
    copies = len(blocks)
    del works, blocks
    _free(device)
    seen = found.pop(_WITH_CACHE)
    return LayerTimes(
        stored=stored,
        weights=weights,
        depth=depth,
        copies=copies,
        passes=found,
        tiny=settled_times,
        launched=launched,
        seen=seen,
    )


def settled(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _narrow(form: Quantisation) -> Quantisation:
    """The same kind of form for matrices of _TINY_WIDTH columns."""
    divides = form.group and _TINY_WIDTH % form.group == 0
    return replace(form, double=False, group=form.group if divides or not form.group else 32)


def passes(
    blocks: list[Block], rows: int, seen: int, *, settle: bool = True
) -> Callable[[], torch.Tensor]:
    """One pass of `rows` rows after `seen` cached ones, through the next block at each call; done
    when it returns its hidden rows if it is to `settle`, else only launched."""
    first = blocks[0]
    device = first.device
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    inputs = tokens
    if first.embedding is None:
        inputs = torch.randn(rows, first.hidden_size).to(device, first.dtype)
    positions = torch.arange(seen, seen + rows, device=device)
    mask = tree_mask(seen, torch.tril(torch.ones(rows, rows, dtype=torch.bool)).numpy(), device)
    nothing = torch.zeros(0, dtype=torch.int64).numpy()
    caches = [block.new_cache(seen + rows) for block in blocks]
    for cache in caches:
        cache.place(torch.arange(seen, device=device))  # attention goes by positions
        cache.advance(seen)
    turns = itertools.cycle(zip(blocks, caches, strict=True))

    def work() -> torch.Tensor:
        block, cache = next(turns)
        cache.gather(seen, nothing)
        hidden = block.forward(inputs, positions, cache, mask, tokens=tokens)
        assert hidden is not None, "it is never stopped"
        if settle:
            settled(device)
        return hidden

    return work


def llama(name: str) -> ModelConfig:
    """Layers of a known model, by its name."""
    of = ARCHITECTURES[name]
    return ModelConfig(
        {
            "model_type": "llama",
            "vocab_size": 1,
            "hidden_size": of.hidden,
            "intermediate_size": of.intermediate,
            "num_hidden_layers": of.layers,
            "num_attention_heads": of.heads,
            "num_key_value_heads": of.kv_heads,
        }
    )


def deeper(config: ModelConfig, layers: int) -> ModelConfig:
    """The configuration with room for a block of so many layers that is not at an end."""
    fields: dict[str, object] = {"num_hidden_layers": layers + 2}
    for name in ("layer_types", "no_rope_layers"):
        if kinds := getattr(config, name, None):
            fields[name] = list(itertools.islice(itertools.cycle(kinds), layers + 2))
    return config.changed(**fields)


def _shrunk(config: ModelConfig) -> ModelConfig:
    """The same kind of layer with matrices so small that reading them takes no time."""
    grouped = config.num_key_value_heads < config.num_attention_heads
    dim = config.head_dim
    widths = {"hidden_size": _TINY_WIDTH, "intermediate_size": _TINY_WIDTH}
    for name in ("moe_intermediate_size", "shared_intermediate_size"):
        if hasattr(config, name):
            widths[name] = _TINY_WIDTH
    # As many heads as make columns that every quantisation's groups divide.
    heads = max(2, math.lcm(_TINY_WIDTH, dim) // dim)
    return config.changed(
        head_dim=dim,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if grouped else heads,
        **widths,
    )


def _needed(shape: Shape, depth: int) -> int:
    """Bytes that measuring this layer may take at once."""
    _, stored = RandomLayers(deeper(shape.config, 1), QUANTISATIONS["none"]).size
    return (depth + _SPARE) * stored


def shape_of(source: TensorSource, name: str) -> Shape:
    """A layer of this model; of a packed one that in the middle, where mixed files take fewer bits.

    Raises ConfigError for a model that no layer can be cut out of.
    """
    if not getattr(source.config, "num_key_value_heads", None):
        raise ConfigError(f"{name} is no decoder whose layers edgespec runs")
    if source.config.model_type == "gemma4_text":
        raise ConfigError(
            f"the layers of {name} differ too much for one to stand for all; measure with another "
            "dense model, or without --model"
        )
    if source.quantisation != FILE:
        return Shape(name, source.config)
    middle = source.layers // 2
    needed = block_inventory(source, middle, middle + 1)
    return Shape(name, source.config, {in_layer(one.name): one.form for one in needed})


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
