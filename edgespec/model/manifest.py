"""Manifest: what a folder of block files holds, and how to tell that nothing in it is damaged."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edgespec.config import DTYPES, QUANTISATIONS, Quantisation
from edgespec.errors import BlockDamaged, ModelError

FORMAT = 1
MANIFEST = "manifest.json"

REMEDY = "make the folder again with `edgespec shard`, or copy it again"
"""What to do about a damaged folder."""

_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the folder: its name, size in bytes and SHA-256 (64 hex digits)."""

    name: str
    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        name = self.name
        plain = isinstance(name, str) and name == os.path.basename(name) and name.isprintable()
        if not plain or name in ("", ".", "..", MANIFEST):
            raise ModelError(f"name {name!r} is no plain file name")
        _check_count("bytes", self.bytes)
        _check_hash("sha256", self.sha256)


@dataclass(frozen=True, slots=True)
class BlockEntry(FileEntry):
    """A file with the tensors of layers [first, end)."""

    first: int
    end: int

    def __post_init__(self) -> None:
        FileEntry.__post_init__(self)
        _check_count("first", self.first)
        _check_count("end", self.end)
        if self.first >= self.end:
            raise ModelError(f"first {self.first} and end {self.end} leave no layer between them")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was made of which model.

    `model`: its name, for people; `fingerprint`: see model.loader. `dtype`: of the tensors that
    are not packed, as the model has them. `layers`: of the whole model; `blocks`: those of them
    that are here, in order. `head`: the file with the output matrix, if it is here. `files`:
    config.json and the tokenizer's. `version`: the edgespec that wrote it.
    """

    model: str
    fingerprint: str
    quantisation: Quantisation
    dtype: str
    layers: int
    blocks: tuple[BlockEntry, ...]
    head: FileEntry | None
    files: tuple[FileEntry, ...]
    version: str

    def __post_init__(self) -> None:
        for name in ("model", "version"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ModelError(f"{name} is {value!r}; it must be a text")
        _check_hash("fingerprint", self.fingerprint)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_count("layers", self.layers)
        ends = [0, *(block.end for block in self.blocks)]
        if any(block.first < end for block, end in zip(self.blocks, ends, strict=False)):
            raise ModelError("blocks overlap, or are not in the order of their layers")
        if ends[-1] > self.layers:
            raise ModelError(f"blocks go up to layer {ends[-1] - 1} of {self.layers} layers")
        names = [entry.name for entry in self.entries]
        if len(set(names)) < len(names):
            raise ModelError("a file is listed twice")

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
        """What the file holds."""
        content = {
            "format": FORMAT,
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "quantisation": self.quantisation.name,
            "blocks": [_entry_dict(block) for block in self.blocks],
            "head": None if self.head is None else _entry_dict(self.head),
            "files": [_entry_dict(file) for file in self.files],
        }
        return {**content, "seal": _seal(content)}

    @staticmethod
    def from_dict(content: object) -> Manifest:
        """The manifest that `to_dict` gave. Raises ModelError that names what is wrong."""
        if not isinstance(content, dict):
            raise ModelError("it does not hold a JSON object")
        if content.get("format") != FORMAT:
            raise ModelError(
                f"its format is {content.get('format')!r}, this edgespec reads format {FORMAT}"
            )
        names = [field.name for field in fields(Manifest)]
        _check_keys(content, {"format", "seal", *names})
        if content["seal"] != _seal({k: v for k, v in content.items() if k != "seal"}):
            raise ModelError("its seal does not fit its content: it was changed after it was made")
        _check_choice("quantisation", content["quantisation"], QUANTISATIONS)
        head = content["head"]
        parsed: dict[str, Any] = {
            "quantisation": Quantisation.parse(content["quantisation"]),
            "blocks": tuple(_entry(BlockEntry, "blocks", one) for one in _list(content, "blocks")),
            "head": None if head is None else _entry(FileEntry, "head", head),
            "files": tuple(_entry(FileEntry, "files", one) for one in _list(content, "files")),
        }
        return Manifest(**{name: content[name] for name in names} | parsed)


def read_manifest(file: Path) -> Manifest:
    """Read a manifest. Raises BlockDamaged if it is missing, cannot be read, or is wrong."""
    try:
        return Manifest.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        reason = "it is missing"
    except (OSError, ValueError, RecursionError) as error:
        reason = f"it cannot be read: {error}"
    except ModelError as error:
        reason = str(error)
    raise BlockDamaged(f"cannot use {file} ({reason}); {REMEDY}") from None


def manifest_of(model: str | Path) -> Manifest | None:
    """The manifest of a folder of block files; None for any other model.

    Raises BlockDamaged as `read_manifest` does.
    """
    file = Path(model) / MANIFEST
    return read_manifest(file) if file.is_file() else None


def size_text(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _entry_dict(entry: FileEntry) -> dict[str, Any]:
    return {field.name: getattr(entry, field.name) for field in fields(entry)}


def _entry(kind: type[FileEntry], what: str, content: object) -> Any:
    if not isinstance(content, dict):
        raise ModelError(f"{what} holds {content!r} where a file must be described")
    _check_keys(content, {field.name for field in fields(kind)}, f" in {what}")
    try:
        return kind(**content)
    except ModelError as error:
        raise ModelError(f"in {what}: {error}") from None


def _list(content: Mapping[str, Any], name: str) -> list[object]:
    value = content[name]
    if not isinstance(value, list):
        raise ModelError(f"{name} is {value!r}; it must be a list")
    return value


def _seal(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _check_keys(content: Mapping[str, Any], known: set[str], where: str = "") -> None:
    if unknown := sorted(set(content) - known):
        raise ModelError(f"unknown key {unknown[0]!r}{where}")
    if missing := sorted(known - set(content)):
        raise ModelError(f"key {missing[0]!r} is missing{where}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelError(f"{name} is {value!r}; it must be a whole number from 0")


def _check_hash(name: str, value: object) -> None:
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ModelError(f"{name} is {value!r}; it must be 64 hexadecimal digits")


def _check_choice(name: str, value: object, choices: Any) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ModelError(f"{name} is {value!r}; it must be one of: {', '.join(choices)}")
