"""Manifest: what a folder of block files holds, and how to tell that nothing in it is damaged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, to_builtins

from edgespec.config import DTYPES, NAMED, Quantisation
from edgespec.errors import BlockDamaged, ConfigError
from edgespec.schema import FileStruct, Text, as_type, check_version, parse_json

FORMAT = 1
MANIFEST = "manifest.json"

REMEDY = "make the folder again with `edgespec shard`, or copy it again"
"""What to do about a damaged folder."""

_NAMES = ("quantisation", "head_quantisation")
"""Fields that stand by name in the file."""

Count = Annotated[int, Meta(ge=0)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class FileEntry(FileStruct, frozen=True):
    """A file of the folder: its name, size in bytes and SHA-256 (64 hex digits)."""

    name: str
    bytes: Count
    sha256: Sha256

    def __post_init__(self) -> None:
        name = self.name
        plain = name == os.path.basename(name) and name.isprintable()
        if not plain or name in ("", ".", "..", MANIFEST):
            raise ValueError(f"name {name!r} is no plain file name")


class BlockEntry(FileEntry, frozen=True):
    """A file with the tensors of layers [first, end)."""

    first: Count
    end: Count

    def __post_init__(self) -> None:
        FileEntry.__post_init__(self)
        if self.first >= self.end:
            raise ValueError(f"first {self.first} and end {self.end} leave no layer between them")


class Manifest(FileStruct, frozen=True):
    """What was made of which model.

    `model`: its name, for people; `fingerprint`: see model.loader. `dtype`: of the tensors that
    are not packed, as the model has them. `layers`: of the whole model; `blocks`: those of them
    that are here, in order. `head`: the file with the output matrix, if it is here, and
    `head_quantisation`: how that is held. `files`:
    config.json and the tokenizer's. `version`: the edgespec that wrote it.
    """

    model: Text
    fingerprint: Sha256
    quantisation: Quantisation
    dtype: str
    layers: Count
    blocks: tuple[BlockEntry, ...]
    head: FileEntry | None
    files: tuple[FileEntry, ...]
    version: Text
    head_quantisation: Quantisation = Quantisation()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of: {', '.join(DTYPES)}")
        ends = [0, *(block.end for block in self.blocks)]
        if any(block.first < end for block, end in zip(self.blocks, ends, strict=False)):
            raise ValueError("blocks overlap, or are not in the order of their layers")
        if ends[-1] > self.layers:
            raise ValueError(f"blocks go up to layer {ends[-1] - 1} of {self.layers} layers")
        names = [entry.name for entry in self.entries]
        if len(set(names)) < len(names):
            raise ValueError("a file is listed twice")

    @property
    def entries(self) -> tuple[FileEntry, ...]:
        """All files but the manifest."""
        head = () if self.head is None else (self.head,)
        return (*self.blocks, *head, *self.files)

    @property
    def split(self) -> tuple[tuple[int, int], ...]:
        """(first, end) of the blocks."""
        return tuple((block.first, block.end) for block in self.blocks)

    @property
    def layers_of_stages(self) -> tuple[int, ...]:
        """How many layers each block has."""
        return tuple(block.end - block.first for block in self.blocks)

    def to_dict(self) -> dict[str, Any]:
        names = {field: getattr(self, field).name for field in _NAMES}
        content = {"format": FORMAT, **to_builtins(self), **names}
        return {**content, "seal": _seal(content)}

    @staticmethod
    def from_json(text: str | bytes, where: str) -> Manifest:
        """The manifest in a file, which `where` names. Raises BlockDamaged."""
        try:
            content = parse_json(text, where, REMEDY)
            fields = check_version(content, where, REMEDY, ("format", FORMAT))
            seal = fields.pop("seal", None)
            if seal != _seal({"format": FORMAT, **fields}):
                raise ConfigError(
                    f"{where}: its seal does not fit its content: it was changed after it was "
                    f"made; {REMEDY}"
                )
            for field in _NAMES:
                name = fields.get(field, "none" if field == "head_quantisation" else None)
                if not isinstance(name, str) or name not in NAMED:
                    raise ConfigError(
                        f"{where}: {field} is {name!r}; it must be one of: {', '.join(NAMED)}; "
                        f"{REMEDY}"
                    )
                fields[field] = NAMED[name]
            return as_type(Manifest, fields, where, REMEDY)
        except (ConfigError, RecursionError) as problem:
            raise BlockDamaged(str(problem)) from None


def read_manifest(file: Path) -> Manifest:
    """Read a manifest. Raises BlockDamaged if it is missing, cannot be read, or is wrong."""
    try:
        return Manifest.from_json(file.read_bytes(), str(file))
    except FileNotFoundError:
        reason = "it is missing"
    except OSError as error:
        reason = f"it cannot be read: {error}"
    raise BlockDamaged(f"cannot use {file} ({reason}); {REMEDY}")


def manifest_of(model: str | Path) -> Manifest | None:
    """The manifest of a folder of block files; None for any other model.

    Raises BlockDamaged as `read_manifest` does.
    """
    file = Path(model) / MANIFEST
    return read_manifest(file) if file.is_file() else None


def size_text(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _seal(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
