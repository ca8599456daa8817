"""Sharding: a whole model as a folder of block files, one for each stage, and the head's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from edgespec import __version__
from edgespec.config import Quantisation
from edgespec.errors import BlockDamaged, ConfigError
from edgespec.files import locked, settle
from edgespec.model.block_file import plain_dtype, write_block, write_head
from edgespec.model.block_folder import CONFIG, HEAD, copy_file, put_manifest, require_room, verify
from edgespec.model.families import bound_last
from edgespec.model.hub import TOKENIZER_FILES, local_folder
from edgespec.model.inventory import block_inventory, head_inventory, stored_bytes
from edgespec.model.loader import fingerprint
from edgespec.model.manifest import MANIFEST, Manifest, read_manifest
from edgespec.model.sources import open_source
from edgespec.model.tensors import TORCH_DTYPES

UNFINISHED = MANIFEST + ".part"
"""The manifest while files are missing: tells a later run what is there already."""

_SAME = ("fingerprint", "quantisation", "head_quantisation")
"""What files of an earlier run must agree in to be kept."""

Split = Sequence[tuple[int, int]]
Progress = Callable[[str, int, int], None]
"""Hears what is done now, how many of the model's layers are done, and how many it has."""


def stage_file(stage: int) -> str:
    """The name of a stage's file; stages count from 1."""
    return f"stage-{stage}.safetensors"


def named(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Layers (first, end) of the block files, by name."""
    return {block.name: (block.first, block.end) for block in manifest.blocks}


class Sharding:
    """One model, opened to be written as block files."""

    def __init__(self, model: str, quantisation: Quantisation, head: Quantisation) -> None:
        """`model`: see `open_source`; `head`: the output matrix's quantisation. Raises ModelError
        if it cannot be used."""
        self._model = model
        self._source = open_source(model, quantisation)
        self._head = open_source(model, head)
        self.layers, self.bound = self._source.layers, bound_last(self._source.config)

    def into(self, folder: Path, split: Split, progress: Progress) -> Manifest:
        """Write stages of layers (first, end), the head, and the manifest last.

        Goes on where an interrupted run for the same folder stopped; sound files are kept. Raises
        ConfigError if the folder holds something else, is being written by another process, or
        its disk is full, and ModelError for what the model cannot give.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {folder} ({error.strerror}); choose another"
            ) from error

        def busy() -> None:
            raise ConfigError(f"another process is writing {folder}; wait until it is done")

        with locked(folder, busy):
            planned = dict(enumerate(split, start=1))
            manifest = self._empty()
            kept = _kept(folder, manifest, {stage_file(k): block for k, block in planned.items()})
            manifest = self._sound(folder, kept, progress)
            done = named(manifest)
            missing = {k: block for k, block in planned.items() if stage_file(k) not in done}
            self._require_room(folder, manifest, list(missing.values()))
            _put(folder, manifest)
            (folder / MANIFEST).unlink(missing_ok=True)
            for stage, block in missing.items():
                manifest = self._with_block(folder, manifest, stage_file(stage), block, progress)
                _put(folder, manifest)
            manifest = self._with_rest(folder, manifest, progress)
            _put(folder, manifest)
            settle(folder / UNFINISHED, folder / MANIFEST)
            return manifest

    def _empty(self) -> Manifest:
        """The manifest, still without files."""
        dtype = plain_dtype(self._source, block_inventory(self._source, 0, 1))
        return Manifest(
            model=Path(self._model).resolve().name,
            fingerprint=fingerprint(self._model),
            quantisation=self._source.quantisation,
            dtype=str(dtype).removeprefix("torch."),
            layers=self.layers,
            blocks=(),
            head=None,
            files=(),
            version=__version__,
            head_quantisation=self._head.quantisation,
        )

    def _sound(self, folder: Path, kept: Manifest, progress: Progress) -> Manifest:
        """`kept` without the files that are damaged, which are written again."""

        def sound(name: str) -> bool:
            progress(f"checking {name}", 0, self.layers)
            entry = next(one for one in kept.entries if one.name == name)
            try:
                verify(folder, entry)
            except BlockDamaged:
                return False
            return True

        return structs.replace(
            kept,
            blocks=tuple(block for block in kept.blocks if sound(block.name)),
            head=kept.head if kept.head is not None and sound(kept.head.name) else None,
        )

    def _require_room(self, folder: Path, manifest: Manifest, missing: Split) -> None:
        needed = [block_inventory(self._source, *block) for block in missing]
        if manifest.head is None:
            needed.append(head_inventory(self._head))
        dtype = TORCH_DTYPES[manifest.dtype]
        require_room(folder, sum(stored_bytes(some, dtype) for some in needed))

    def _with_block(
        self,
        folder: Path,
        manifest: Manifest,
        name: str,
        block: tuple[int, int],
        progress: Progress,
    ) -> Manifest:
        first, end = block

        def news(done: int, _: int) -> None:
            progress(f"writing {name}", first + done, self.layers)

        news(0, end - first)
        entry = write_block(self._source, first, end, folder / name, news)
        blocks = sorted((*manifest.blocks, entry), key=lambda block: block.first)
        return structs.replace(manifest, blocks=tuple(blocks))

    def _with_rest(self, folder: Path, manifest: Manifest, progress: Progress) -> Manifest:
        """With the head, and the small files, which are copied in any case."""
        if manifest.head is None:
            progress(f"writing {HEAD}", self.layers, self.layers)
            manifest = structs.replace(manifest, head=write_head(self._head, folder / HEAD))
            _put(folder, manifest)
        original = local_folder(self._model)
        names = [name for name in (CONFIG, *TOKENIZER_FILES) if (original / name).is_file()]
        return structs.replace(
            manifest, files=tuple(copy_file(original / name, folder) for name in names)
        )


def _kept(folder: Path, empty: Manifest, planned: dict[str, tuple[int, int]]) -> Manifest:
    """What an earlier run left of the same plan, unverified.

    Raises ConfigError if the folder holds anything else, which is left as it is.
    """
    present = {path.name for path in folder.iterdir()}
    old = _earlier(folder, present)
    if old is None:
        if present:
            raise ConfigError(
                f"{folder} is not empty, and no {MANIFEST} says that its {min(present)} was "
                "made by `edgespec shard`; choose a new folder with --out"
            )
        return empty
    same = all(getattr(old, what) == getattr(empty, what) for what in _SAME)
    if not same or not named(old).items() <= planned.items():
        raise ConfigError(
            f"{folder} holds {old.model} as {old.quantisation.name}, cut before layers "
            f"{', '.join(str(first) for first, _ in old.split)}: another model, quantisation or "
            "split than asked for; choose a new folder with --out"
        )
    ours = {MANIFEST, HEAD, CONFIG, *TOKENIZER_FILES, *planned}
    if strange := sorted(present - ours - {f"{name}.part" for name in ours}):
        raise ConfigError(
            f"{folder} holds something else ({strange[0]}); choose a new folder with --out"
        )
    return structs.replace(empty, blocks=old.blocks, head=old.head)


def _earlier(folder: Path, present: set[str]) -> Manifest | None:
    """The manifest of an earlier run, finished or not."""
    for name in (UNFINISHED, MANIFEST):
        if name in present:
            try:
                return read_manifest(folder / name)
            except BlockDamaged as error:
                raise ConfigError(f"{error} (remove {folder} first)") from error
    return None


def _put(folder: Path, manifest: Manifest) -> None:
    put_manifest(manifest, folder / UNFINISHED)
