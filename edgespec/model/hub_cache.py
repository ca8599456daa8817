"""The hub's cache: which models are on this machine whole, and downloading one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from edgespec.errors import ModelError
from edgespec.model.hub import TOKENIZER_FILES, HubFiles, is_hub_id, model_files
from edgespec.model.hub_download import cached_file, drop_torn

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"


def is_here(model: str) -> bool:
    """Whether all weights of a model are on this machine; the hub is not asked."""
    if Path(model).exists():
        return True
    repository, name = split_file(model)
    if name:
        return isinstance(cached_file(repository, name), str)
    config = cached_file(model, _CONFIG)
    if not isinstance(config, str):
        return False
    folder = Path(config).parent
    if (folder / _INDEX).is_file():
        return all((folder / name).is_file() for name in _listed(folder / _INDEX))
    return any((folder / name).is_file() for name in (_SAFE, _PICKLED))


def split_file(model: str) -> tuple[str, str]:
    """The repository and the file of ORG/NAME/FILE.gguf; other models have no file ("")."""
    parts = model.split("/", 2)
    return ("/".join(parts[:2]), parts[2] if len(parts) == 3 else "")


def place_of(model: str) -> Path:
    """Where a model of the hub lies, once it is here: its folder, or its file."""
    repository, name = split_file(model)
    file = cached_file(repository, name or _CONFIG)
    assert isinstance(file, str), "it was downloaded"
    return Path(file) if name else Path(file).parent


def model_of(folder: Path) -> str:
    """The hub id whose revision a folder of the cache holds; of others the folder's name."""
    if folder.parent.name != "snapshots":
        return folder.name
    return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)


def cached() -> dict[str, int]:
    """Bytes of every model in the hub's cache, by its hub id; those of one part are among them."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    return {one.repo_id: one.size_on_disk for one in found if one.repo_type == "model"}


def download(model: str, is_head: bool, say: Callable[[str], None]) -> Path:
    """Get a file of the hub, or all that a hub id has for edgespec, and return where it is.

    What is here already, by its hash, is not fetched again, and a file that was cut off goes on
    where it stopped.
    `is_head`: draft weights of one layer, whose file may be a pickled one and has no tokenizer.
    Raises ModelError if the hub does not give it, or edgespec does not run it.
    """
    repository, file = split_file(model)
    if file:
        say(model)
        if isinstance(here := cached_file(repository, file), str):
            drop_torn(Path(here))
        model_files(model).file(_CONFIG)
        return place_of(model)
    files = HubFiles(model)
    if not is_head:
        _check(files)
        for name in TOKENIZER_FILES:
            files.optional(name)
    names = _weights(files, is_head)
    for number, name in enumerate(names, 1):
        say(f"{model}: {name}, file {number} of {len(names)}")
        drop_torn(files.folder / name)
        files.file(name)
    return files.folder


def local_weights(model: str, say: Callable[[str], None]) -> Path:
    """A folder with the whole model: that of this name, or a hub id's, downloaded if need be."""
    return download(model, False, say) if is_hub_id(model) else Path(model)


def _check(files: HubFiles) -> None:
    """Refuse a model that cannot run before its weights are fetched."""
    from edgespec.model.loader import open_config

    open_config(files.file(_CONFIG))


def _weights(files: HubFiles, is_head: bool) -> list[str]:
    index = files.optional(_INDEX)
    if index is not None:
        return _listed(index)
    for name in (_SAFE, _PICKLED) if is_head else (_SAFE,):
        if files.offers(name):
            return [name]
    raise ModelError(
        f"{files.path} on the Hugging Face Hub has no weights that edgespec reads "
        f"({_SAFE}, or several with an index); choose another release of the model"
    )


def _listed(index: Path) -> list[str]:
    """The files that an index names."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(name for name in names if name == Path(name).name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{index} has no weight_map; download the model again") from None
