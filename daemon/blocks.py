"""Block library: finished blocks on disk, so that a restart does not make them again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from edgespec import __version__
from edgespec.config import Quantisation
from edgespec.errors import BlockDamaged, ConfigError
from edgespec.files import cache_folder, locked
from edgespec.model.block_file import (
    BlockFile,
    Progress,
    plain_dtype,
    write_block,
    write_head,
)
from edgespec.model.block_folder import (
    CONFIG,
    HEAD,
    BlockFolder,
    copy_file,
    put_manifest,
    require_room,
    verify,
)
from edgespec.model.hub import model_files
from edgespec.model.inventory import block_inventory, head_inventory, stored_bytes
from edgespec.model.manifest import FORMAT, MANIFEST, FileEntry, Manifest
from edgespec.model.source import TensorSource
from edgespec.model.sources import PLAIN

log = logging.getLogger(__name__)

BLOCK = "block.safetensors"
"""The file of a block that was made here; one that was sent keeps its name."""


def default_folder() -> Path:
    """The user's cache folder for blocks."""
    return cache_folder() / "blocks"


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Identifies a block: layers [first, end) of the model with this fingerprint, quantised so; or,
    without layers, its output matrix."""

    fingerprint: str
    first: int
    end: int
    quantisation: Quantisation

    @property
    def name(self) -> str:
        """A name for a folder, the same for the same block."""
        parts = [FORMAT, self.fingerprint, self.first, self.end, self.quantisation.name]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @staticmethod
    def of_head(fingerprint: str, quantisation: Quantisation) -> BlockKey:
        return BlockKey(fingerprint, 0, 0, quantisation)

    @property
    def is_head(self) -> bool:
        return self.first == self.end

    @property
    def what(self) -> str:
        """In words, for messages."""
        if self.is_head:
            return "the output head"
        return f"layers {self.first} to {self.end - 1}"

    def entry(self, manifest: Manifest) -> FileEntry | None:
        """The block's file in a folder with this manifest; None if it has none."""
        if manifest.fingerprint != self.fingerprint:
            return None
        if self.is_head:
            return manifest.head if manifest.head_quantisation == self.quantisation else None
        if manifest.quantisation != self.quantisation:
            return None
        place = self.first, self.end
        return next((one for one in manifest.blocks if (one.first, one.end) == place), None)

    def open(self, folder: BlockFolder, progress: Progress | None = None) -> BlockFile:
        """Its tensors, verified. Raises as BlockFolder.block does."""
        if self.is_head:
            return folder.head(progress)
        return folder.block(self.first, self.end, progress)


class IncomingBlock:
    """A block that is being received into `folder`, which keeps partial files.

    `found`: the block, if another process has finished it meanwhile.
    """

    def __init__(self, key: BlockKey, folder: Path, home: Path, found: BlockFolder | None) -> None:
        self.folder = folder
        self.found = found
        self._key, self._home = key, home

    def finish(self, manifest: Manifest, progress: Progress | None = None) -> BlockFolder:
        """Verify what was received against the sender's manifest, and keep it.

        The block's file and config.json must be in `folder` under the names that the manifest
        gives them. Raises BlockDamaged for a file that is not what the manifest says, which is
        removed, so that it is fetched again; ConfigError if the disk refuses.
        """
        mine = self._key.entry(manifest)
        if mine is None:
            raise BlockDamaged(
                f"the sender's manifest is of something else than {self._key.what} of this model; "
                "start the ring again"
            )
        own = structs.replace(
            manifest,
            blocks=tuple(block for block in manifest.blocks if block is mine),
            head=mine if self._key.is_head else None,
            files=tuple(file for file in manifest.files if file.name == CONFIG),
        )
        for entry in own.entries:
            try:
                verify(self.folder, entry, progress)
            except BlockDamaged:
                (self.folder / entry.name).unlink(missing_ok=True)
                raise
        put_manifest(own, self.folder / MANIFEST)
        os.replace(self.folder, self._home)
        return BlockFolder(self._home, own.entries)


class BlockLibrary:
    """A folder of finished blocks, each a block folder of its own; processes may share it."""

    def __init__(self, folder: str | Path = "") -> None:
        """`folder`: "" means the user's own."""
        self.folder = Path(folder) if folder else default_folder()

    def find(self, key: BlockKey, progress: Progress | None = None) -> BlockFolder | None:
        """The block, verified (`progress` gets bytes), or None.

        A damaged one is logged with the reason, and removed.
        """
        if not self._home(key).is_dir():
            return None
        with self._locked(key):
            return self._sound(key, progress)

    def make(
        self, source: TensorSource, key: BlockKey, progress: Progress | None = None
    ) -> BlockFolder:
        """Write the block from a source (`progress` gets layers), unless it is there.

        `source` is of the model of the key, and quantises as the key says. Raises ModelError for
        what it cannot give, ConfigError if the disk is full or refuses.
        """
        assert source.quantisation == key.quantisation
        with self._locked(key):
            found = self._sound(key)
            if found is not None:
                return found
            home = self._home(key)
            making = home.with_suffix(".making")
            try:
                self._write(source, key, making, progress)
                os.replace(making, home)
            finally:
                shutil.rmtree(making, ignore_errors=True)
            return BlockFolder(home)

    @contextmanager
    def begin(self, key: BlockKey, size: int) -> Iterator[IncomingBlock]:
        """A folder for a block of `size` bytes that is being received; see IncomingBlock.

        It still has the files of an earlier transfer of the same block. Other processes that
        need the same block wait. Raises ConfigError if the disk is full or refuses.
        """
        with self._locked(key):
            home = self._home(key)
            folder = home.with_suffix(".incoming")
            found = self._sound(key)
            if found is None:
                self._make_folder(folder)
                here = sum(file.stat().st_size for file in folder.iterdir())
                require_room(folder, max(0, size - here))
            yield IncomingBlock(key, folder, home, found)

    def _write(
        self, source: TensorSource, key: BlockKey, folder: Path, progress: Progress | None
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
        self._make_folder(folder)
        if key.is_head:
            needed = head_inventory(source)
        else:
            needed = block_inventory(source, key.first, key.end)
        dtype = plain_dtype(source, needed)
        require_room(folder, stored_bytes(needed, dtype))
        manifest = Manifest(
            model=source.path.resolve().name,
            fingerprint=key.fingerprint,
            quantisation=key.quantisation,
            dtype=str(dtype).removeprefix("torch."),
            layers=source.layers,
            blocks=()
            if key.is_head
            else (write_block(source, key.first, key.end, folder / BLOCK, progress),),
            head=write_head(source, folder / HEAD) if key.is_head else None,
            files=(copy_file(model_files(source.path).file(CONFIG), folder),),
            version=__version__,
            head_quantisation=key.quantisation if key.is_head else PLAIN,
        )
        put_manifest(manifest, folder / MANIFEST)

    def _sound(self, key: BlockKey, progress: Progress | None = None) -> BlockFolder | None:
        """The block, verified; a damaged one is removed. The key's lock is held."""
        home = self._home(key)
        if not home.is_dir():
            return None
        try:
            block = BlockFolder(home)
            if key.entry(block.manifest) is None:
                raise BlockDamaged(f"{home} holds another block than its name says")
            for entry in block.manifest.entries:
                block.verify(entry, progress)
        except ConfigError as error:
            log.warning("a block on disk is of no use and is removed: %s", error)
            shutil.rmtree(home, ignore_errors=True)
            return None
        return block

    def _home(self, key: BlockKey) -> Path:
        return self.folder / key.name

    @contextmanager
    def _locked(self, key: BlockKey) -> Iterator[None]:
        lock = self._home(key).with_suffix(".lock")
        self._make_folder(self.folder, lock)

        def busy() -> None:
            log.info("waiting for another process that makes the same block")

        with locked(lock, busy):
            yield

    def _make_folder(self, folder: Path, *files: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file in files:
                file.touch()
        except OSError as error:
            raise ConfigError(
                f"cannot keep blocks in {self.folder}: {error.strerror or error} "
                f"({error.filename}); choose another folder with --cache"
            ) from error
