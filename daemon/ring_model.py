"""Ring model: the coordinator's view of the model that it runs, and the blocks it sends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgespec.config import CoordinatorConfig
from edgespec.daemon.blocks import BlockKey, BlockLibrary
from edgespec.errors import ConfigError
from edgespec.model.block_folder import CONFIG, BlockFolder
from edgespec.model.families import bound_last
from edgespec.model.hub import local_folder
from edgespec.model.loader import fingerprint
from edgespec.model.manifest import MANIFEST, manifest_of
from edgespec.model.source import TensorSource
from edgespec.model.sources import open_source, quantising
from edgespec.net.block_server import ServedBlock
from edgespec.wire.block_messages import HEAD_NUMBER
from edgespec.wire.messages import Assign

Say = Callable[[str], None]


class RingModel:
    """A model (see `open_source`) or a folder of block files: where head, tokenizer, blocks are."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Raises ModelError if it cannot be used."""
        self._quantisation = config.quantisation
        self._head_quantisation = config.head_quantisation
        self._library = BlockLibrary(config.cache)
        self._made = BlockFolder(Path(config.model)) if manifest_of(config.model) else None
        if self._made is not None:
            self.fingerprint = self._made.manifest.fingerprint
            self.head: TensorSource
            made = self._made.head()
            is_so = self._made.manifest.head_quantisation == config.head_quantisation
            self.head = made if is_so else quantising(made, config.head_quantisation)
        else:
            self.head = open_source(config.model, config.head_quantisation)
            self.fingerprint = fingerprint(config.model)
        self.tokenizer = local_folder(config.model)
        """The folder with the tokenizer's files."""
        self._model = config.model
        here = Path(config.model)
        self.name = str(here.resolve()) if here.exists() else config.model
        """The name for stages: a path that they may have too, or its name on the hub."""

    @property
    def can_be_cut_anew(self) -> bool:
        """Whether blocks of any layers can be made, not only those of a sharded folder."""
        return self._made is None

    @property
    def _head_key(self) -> BlockKey:
        return BlockKey.of_head(self.fingerprint, self._head_quantisation)

    def kept_head(self) -> TensorSource:
        """The output matrix for this machine; one that is rounded is kept, and mapped, as blocks
        are. Raises ModelError, and ConfigError for what the disk refuses."""
        if self._made is not None or self._head_quantisation.kind in ("none", "file"):
            return self.head
        return self._library.make(self.head, self._head_key).head()

    @property
    def layers(self) -> int:
        return int(self.head.config.num_hidden_layers)

    @property
    def bound(self) -> int:
        """Last layers that have to be on one stage."""
        return bound_last(self.head.config)

    @property
    def longest_context(self) -> int:
        return int(self.head.config.max_position_embeddings)

    def prepare(self, blocks: Sequence[Assign], number: int, say: Say) -> ServedBlock:
        """Makes or finds a block by its number, counted from 1, or the head, for a BlockServer."""
        if not HEAD_NUMBER <= number <= len(blocks):
            raise ConfigError(f"there is no block {number} here, only 1 to {len(blocks)}")
        if number == HEAD_NUMBER:
            key = self._head_key
        else:
            place = blocks[number - 1]
            key = BlockKey(self.fingerprint, place.first, place.end, self._quantisation)
        folder = self._made or self._found_or_made(key, say)
        entry = key.entry(folder.manifest)
        if entry is None:
            raise ConfigError(f"{folder.path} holds no file with {key.what}")
        folder.verify(entry, lambda done, total: say(f"checking it: {done * 100 // total} %"))
        return ServedBlock(
            folder.path / entry.name,
            (folder.path / MANIFEST).read_text(encoding="utf-8"),
            (folder.path / CONFIG).read_text(encoding="utf-8"),
            entry.sha256,
            entry.bytes,
        )

    def _found_or_made(self, key: BlockKey, say: Say) -> BlockFolder:
        return self._library.make(
            open_source(self._model, key.quantisation),
            key,
            lambda done, total: say(f"preparing layer {done} of {total}"),
        )
