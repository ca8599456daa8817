"""Inventory: which tensors a block or the head consists of, and what each takes when stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.families import layer_embedding
from edgespec.model.gguf.block_types import NAMED_TYPES, BlockType
from edgespec.model.layers import ModelLayers, layers_of
from edgespec.model.quantised import linear
from edgespec.model.reading import reading
from edgespec.model.row_math import BATCHED, RowMath
from edgespec.model.safetensors_writer import Slot
from edgespec.model.source import EMBEDDING, LM_HEAD, TensorSource, check_layers, check_names
from edgespec.model.token_rows import TABLE

_PLAIN = Quantisation()


@dataclass(frozen=True)
class Needed:
    """A tensor that a block or the head is made of, as the checkpoint has it.

    `form`: how it is stored; plain unless it is the weight [out, in] of a linear layer.
    `layer`: the decoder layer that it belongs to, -1 for embedding, final norm and head.
    `looked_up`: it stays in its file, in `blocks` of GGUF, or plain.
    """

    name: str
    shape: torch.Size
    form: Quantisation
    layer: int
    looked_up: bool = False
    blocks: BlockType | None = None

    @property
    def packed(self) -> bool:
        """Whether it is stored in parts."""
        return self.form.kind != "none"


@dataclass(frozen=True)
class BlockParts:
    """Layers [first, end) of a source before any tensor is read: how they are made, and what they
    consist of, layer by layer, with embedding or norm at the ends."""

    layers: ModelLayers
    needed: list[Needed]

    def held_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of memory that they take once they compute in `dtype`.

        Raises ModelError for a shape that cannot be packed.
        """
        return sum(
            linear.held_bytes(o.form, o.shape, dtype) for o in self.needed if not o.looked_up
        )


def block_parts(source: TensorSource, first: int, end: int, math: RowMath = BATCHED) -> BlockParts:
    """The one place that knows what a block is made of; its layers compute by `math`.

    Raises ModelError if the source has no such layers, or holds something for one of them that
    its configuration does not provide for, which a block without it would silently lack.
    """
    check_layers(source, first, end)
    config = source.config
    with reading(source.path):  # a config.json may lack what its layers need
        layers = layers_of(config, first, end, math)
    hidden = int(config.hidden_size)
    needed = []

    def table(name: str, shape: torch.Size, layer: int) -> Needed:
        blocks = NAMED_TYPES.get(source.table(name)[0])
        return Needed(name, shape, _PLAIN, layer, looked_up=True, blocks=blocks)

    shape = torch.Size((int(config.vocab_size), hidden))
    if first == 0 and not in_blocks(source):
        needed.append(Needed(EMBEDDING, shape, _PLAIN, -1))
    elif first == 0 or layer_embedding(config):
        needed.append(table(EMBEDDING, shape, -1))
    for index in range(first, end):
        prefix = f"model.layers.{index}."
        shapes, matrices = layers.shapes(index), layers.matrices(index)
        check_names(source, prefix, {prefix + name for name in shapes})
        for name, shape in shapes.items():
            if name == TABLE:
                needed.append(table(prefix + name, shape, index))
                continue
            form = source.form(prefix + name) if name in matrices else _PLAIN
            needed.append(Needed(prefix + name, shape, form, index))
    if end == source.layers:
        check_names(source, "model.norm.", {"model.norm.weight"})
        needed.append(Needed("model.norm.weight", torch.Size((hidden,)), _PLAIN, -1))
    return BlockParts(layers, needed)


def in_blocks(source: TensorSource) -> bool:
    """Whether the embedding is in blocks of GGUF, 4 to 8 times smaller than its numbers; only files
    that are mapped have such."""
    return source.mapped and source.table(EMBEDDING)[0] != ""


def block_inventory(source: TensorSource, first: int, end: int) -> list[Needed]:
    """Its tensors alone. Raises as `block_parts` does."""
    return block_parts(source, first, end).needed


def head_inventory(source: TensorSource) -> list[Needed]:
    """The output matrix, under the name and in the form that it has in a source for it."""
    config = source.config
    name = EMBEDDING if config.tie_word_embeddings else LM_HEAD
    shape = torch.Size((int(config.vocab_size), int(config.hidden_size)))
    return [Needed(name, shape, source.form(name), -1)]


def packed_slots(one: Needed) -> list[Slot]:
    """How a packed weight is stored: each part of it as a tensor called NAME.PART.

    Raises ModelError if its shape does not fit its form.
    """
    try:
        parts = linear.stored_parts(one.form, one.shape)
    except ModelError as error:
        raise ModelError(f"cannot hold {one.name!r} as {one.form.name}: {error}") from error
    return [Slot(f"{one.name}.{part}", *stored) for part, stored in parts.items()]


def raw_slot(one: Needed, blocks: BlockType) -> Slot:
    """How a table in blocks of GGUF is stored: its rows of bytes, as a tensor called NAME.TYPE."""
    size = torch.Size((one.shape[0], blocks.row_bytes(one.shape[1])))
    return Slot(f"{one.name}.{blocks.name}", size, torch.uint8)


def head_bytes(source: TensorSource, dtype: torch.dtype) -> int:
    """Bytes of memory that the output matrix takes once it computes in `dtype`."""
    needed = head_inventory(source)
    return sum(linear.held_bytes(one.form, one.shape, dtype) for one in needed)


def stored_bytes(needed: Sequence[Needed], dtype: torch.dtype) -> int:
    """What the data of these tensors takes, if those that are not packed are of `dtype`.

    Raises ModelError if one does not fit its form.
    """
    count = 0
    for one in needed:
        plain = [
            Slot(one.name, one.shape, dtype) if one.blocks is None else raw_slot(one, one.blocks)
        ]
        count += sum(slot.bytes for slot in (packed_slots(one) if one.packed else plain))
    return count
