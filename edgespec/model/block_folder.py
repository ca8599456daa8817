"""Block folder: block files with their manifest, of which nothing is loaded unverified."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from edgespec.config import FILE, Quantisation
from edgespec.errors import BlockDamaged, ConfigError, ModelError
from edgespec.files import file_hash, write_whole
from edgespec.model.block_file import BlockFile, Progress
from edgespec.model.loader import open_config
from edgespec.model.manifest import MANIFEST, REMEDY, FileEntry, Manifest, read_manifest, size_text

CONFIG = "config.json"
HEAD = "head.safetensors"

_MARGIN = 1 << 20  # bytes that headers and the small files may take beside the tensors


class BlockFolder:
    """A folder of block files, made by `edgespec shard` or by a daemon."""

    def __init__(self, path: Path, sound: Iterable[FileEntry] = ()) -> None:
        """Read the manifest and verify the small files: config.json and the tokenizer's.

        `sound`: files that were compared with their entries a moment ago. Raises BlockDamaged for a
        file that is not what was written, ModelError for a model that edgespec does not run.
        """
        self.path = path
        self.manifest = read_manifest(path / MANIFEST)
        self._sound = set(sound)
        for entry in self.manifest.files:
            self.verify(entry)
        self.config = open_config(path / CONFIG)
        if self.config.num_hidden_layers != self.manifest.layers:
            raise BlockDamaged(
                f"{path / CONFIG} is of a model of {self.config.num_hidden_layers} layers, "
                f"{MANIFEST} of one of {self.manifest.layers}; {REMEDY}"
            )

    def verify(self, entry: FileEntry, progress: Progress | None = None) -> None:
        """Compare a file with its entry; what was found sound once is not read again.

        Raises BlockDamaged as the function `verify` does.
        """
        if entry not in self._sound:
            verify(self.path, entry, progress)
            self._sound.add(entry)

    def block(self, first: int, end: int, progress: Progress | None = None) -> BlockFile:
        """The block of layers [first, end), verified; `progress` hears of bytes.

        Raises ModelError if the folder has no such block, BlockDamaged if it is damaged.
        """
        for entry in self.manifest.blocks:
            if (entry.first, entry.end) == (first, end):
                return self._open(entry, self.manifest.quantisation, progress)
        has = ", ".join(f"{one} to {end - 1}" for one, end in self.manifest.split)
        raise ModelError(
            f"{self.path} holds no block of layers {first} to {end - 1}, only of {has or 'none'}; "
            "run `edgespec shard` with the stages and layers that the ring has"
        )

    def head(self, progress: Progress | None = None) -> BlockFile:
        """The output matrix, for `OutputHead`. Raises as `block` does."""
        if self.manifest.head is None:
            raise ModelError(
                f"{self.path} holds no output matrix: it is a stage's; use a folder that "
                "`edgespec shard` made"
            )
        # Whatever it was made as: the file itself says which form it has.
        return self._open(self.manifest.head, FILE, progress)

    def _open(
        self, entry: FileEntry, quantisation: Quantisation, progress: Progress | None
    ) -> BlockFile:
        self.verify(entry, progress)
        return BlockFile(self.path / entry.name, self.config, quantisation)


def verify(folder: Path, entry: FileEntry, progress: Progress | None = None) -> None:
    """Read a whole file and compare it with its entry; `progress` hears of bytes.

    Raises BlockDamaged that names the file and says what is wrong with it.
    """
    file = folder / entry.name
    try:
        size = file.stat().st_size
        if size != entry.bytes:
            how = "it was cut off" if size < entry.bytes else "something was added"
            raise BlockDamaged(
                f"{file} has {size} bytes, its manifest says {entry.bytes}: {how}; {REMEDY}"
            )
        sha256 = file_hash(file, progress)
    except FileNotFoundError:
        raise BlockDamaged(f"{file} is missing; {REMEDY}") from None
    except OSError as error:
        raise BlockDamaged(f"cannot read {file} ({error.strerror or error}); {REMEDY}") from error
    if sha256 != entry.sha256:
        raise BlockDamaged(
            f"{file} was changed or damaged: its SHA-256 is {sha256}, its manifest says "
            f"{entry.sha256}; {REMEDY}"
        )


def copy_file(source: Path, folder: Path) -> FileEntry:
    """Copy a small file into a folder under its own name. Raises ConfigError if that fails."""
    content = source.read_bytes()
    put_file(content, folder / source.name)
    return FileEntry(source.name, len(content), hashlib.sha256(content).hexdigest())


def put_file(content: bytes, path: Path) -> None:
    """Write a small file: it is there whole, or not at all. Raises ConfigError if that fails."""
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror or error}); make room, or choose another folder"
        ) from error


def put_manifest(manifest: Manifest, path: Path) -> None:
    """Write a manifest. Raises ConfigError if that fails."""
    put_file((json.dumps(manifest.to_dict(), indent=1) + "\n").encode(), path)


def require_room(folder: Path, needed: int) -> None:
    """Raise ConfigError, with both numbers, if the folder's disk has not so many bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed + _MARGIN:
        raise ConfigError(
            f"{folder} needs {size_text(needed + _MARGIN)}, its disk has {size_text(free)} free; "
            "make room, or choose a folder on another disk"
        )
