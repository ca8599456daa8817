"""Model files: a folder's, or those of a hub id, each downloaded only when it is asked for."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from edgespec.errors import ModelError
from edgespec.model.gguf.files import GgufFiles
from edgespec.model.gguf.reader import is_gguf, part_names
from edgespec.model.hub_download import cached_file, fetch, is_offline
from edgespec.planning.catalogue import MODELS

TOKENIZER_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""What a tokenizer may consist of, and the file that names the tokens which end an answer."""

GGUF = ".gguf"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"{_NAME}/{_NAME}")
_HUB_GGUF = re.compile(rf"({_NAME}/{_NAME})/((?:{_NAME}/)*{_NAME}\.gguf)")


class NotHereYet(ModelError):
    """A model of the hub that was not downloaded, while the hub cannot be asked."""


class ModelFiles(Protocol):
    """The files of one model, wherever they are kept. `path` is for messages."""

    path: Path

    def file(self, name: str) -> Path:
        """Where the file `name` is, or would be; a hub's is downloaded if it is not there yet."""

    def optional(self, name: str) -> Path | None:
        """Like `file`, but None if the model has no such file."""

    def offers(self, name: str) -> bool:
        """Whether the model has this file; nothing is downloaded."""

    def present(self, name: str) -> bool:
        """Whether the file is on this machine; no request leaves it."""


class FolderFiles:
    """A model folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        return self.path / name

    def optional(self, name: str) -> Path | None:
        return self.path / name if self.present(name) else None

    def offers(self, name: str) -> bool:
        return self.present(name)

    def present(self, name: str) -> bool:
        return (self.path / name).is_file()


class HubFiles:
    """A model by its hub id. Files go into huggingface_hub's own cache, all of one revision."""

    def __init__(self, hub_id: str) -> None:
        """Find the newest revision, or offline the last one known, and its config.json.

        Raises ModelError if the hub cannot be asked, has no such model, or keeps it from us.
        """
        self.path = Path(hub_id)
        self._id = hub_id
        with _explained(self._id, "config.json"):
            config = fetch(hub_id, "config.json")
        self.folder = config.parent
        self.commit = config.parent.name  # huggingface_hub names a revision's folder by its commit

    def file(self, name: str) -> Path:
        with _explained(self._id, name):
            return fetch(self._id, name, self.commit)

    def optional(self, name: str) -> Path | None:
        """The cache knows absent files too: what was asked for once is known without a network."""
        from huggingface_hub import errors
        from huggingface_hub.constants import HF_HUB_OFFLINE

        known = cached_file(self._id, name, self.commit)
        if known is not None:
            return Path(known) if isinstance(known, str) else None
        try:
            return self.file(name)
        except ModelError as error:
            absent = isinstance(error.__cause__, errors.EntryNotFoundError)
            unknown = isinstance(error.__cause__, errors.LocalEntryNotFoundError)
            # Offline on purpose: all that there is was downloaded before.
            if absent and (HF_HUB_OFFLINE or not unknown):
                return None
            raise

    def offers(self, name: str) -> bool:
        """Whether the model has this file; offline, whether it was downloaded."""
        if self.present(name):
            return True
        with _explained(self._id, name):
            from huggingface_hub import HfApi

            return not is_offline() and HfApi().file_exists(self._id, name, revision=self.commit)

    def present(self, name: str) -> bool:
        return (self.folder / name).is_file()


@contextmanager
def _explained(hub_id: str, name: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into a ModelError that says what to do."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # its network library's errors are not part of its promises
        raise _refusal(hub_id, name, error) from error


_hub_files = functools.cache(HubFiles)
"""Once a process, so that all that it reads of a model is of one revision."""


def is_hub_id(model: str | Path) -> bool:
    """Whether `model` is written like a hub id (ORGANISATION/NAME) and is no folder here."""
    return _HUB_ID.fullmatch(str(model)) is not None and not Path(model).exists()


def model_files(model: str | Path) -> ModelFiles:
    """The files of a model: a folder, a GGUF file, or either of the hub.

    Raises ModelError if it is none of them, or the hub does not give it to us.
    """
    require_model(model)
    path = Path(model)
    here = gguf_of(path)
    if here is not None:
        return GgufFiles(path, lambda: here)
    if path.is_dir():
        return FolderFiles(path)
    named = _HUB_GGUF.fullmatch(str(model))
    if named is not None:
        return GgufFiles(path, lambda: _hub_gguf(named[1], named[2]))
    return _hub_files(str(model))


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that a path on this machine means: itself, if it begins as one or is called so,
    or the only one of a folder without *.safetensors files. Raises ModelError for a folder with
    several."""
    if path.is_file():
        return path if path.suffix == GGUF or is_gguf(path) else None
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = sorted(path.glob(f"*{GGUF}"))
    if not set(files) <= set(part_names(files[0]) if files else ()):
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path} holds several GGUF files; name one of them: {names}")
    return files[0] if files else None


def require_model(model: str | Path) -> None:
    """Raise ModelError if nothing here and nothing of the hub can be meant; it is not asked."""
    path = Path(model)
    if path.is_dir() or is_hub_id(model) or _HUB_GGUF.fullmatch(str(model)) or gguf_of(path):
        return
    if path.suffix == GGUF:
        raise ModelError(
            f"there is no file {model}; give a GGUF file on this machine, or "
            "ORGANISATION/NAME/FILE.gguf of the Hugging Face Hub"
        )
    what = f"{model} does not begin as a GGUF file does" if path.is_file() else ""
    raise ModelError(
        f"{what or f'there is no model folder {model}'}; give a name of `edgespec models`, the "
        "ORGANISATION/NAME of a model on the Hugging Face Hub, a GGUF file, or a folder with "
        "config.json, a tokenizer and *.safetensors files"
    )


def require_within_reach(model: str | Path) -> None:
    """Raise NotHereYet for a model of the hub of which nothing is here while the hub is out of
    reach, and other ModelErrors for one that it does not give."""
    named = _HUB_GGUF.fullmatch(str(model))
    if is_hub_id(model):
        _hub_files(str(model))
    elif named is not None and not Path(model).exists() and is_offline():
        _hub_gguf(named[1], named[2])


def _hub_gguf(hub_id: str, name: str) -> Path:
    """A GGUF file of the hub, with all parts where it is one of several; downloaded if need be."""
    parts = [Path(name).with_name(part.name) for part in part_names(Path(name))]
    with _explained(hub_id, name):
        files = [fetch(hub_id, part.as_posix()) for part in parts]
        return files[0]


def local_folder(model: str | Path) -> Path:
    """A folder with the model's config.json and tokenizer files; a hub id's are downloaded.

    Raises ModelError as `model_files` does.
    """
    files = model_files(model)
    for name in TOKENIZER_FILES:
        files.optional(name)
    return files.file("config.json").parent


def _given_to_all(hub_id: str) -> str:
    """The name of the model's GGUF file, which makers give to everybody."""
    named = (name for name, known in MODELS.items() if known.hub == hub_id and known.gguf)
    return "".join(f"; {name}{GGUF} is given to all" for name in named)


def _refusal(hub_id: str, name: str, error: Exception) -> ModelError:
    from huggingface_hub import errors

    # The first that fits: a gated model is one that is not found, too.
    explained = (
        (
            errors.GatedRepoError,
            f"the Hugging Face Hub gives {hub_id} only to those who accepted its licence; accept "
            f"it at https://huggingface.co/{hub_id}, then run `hf auth login`"
            f"{_given_to_all(hub_id)}",
        ),
        (
            errors.RepositoryNotFoundError,
            f"there is no folder {hub_id}, and the Hugging Face Hub has no model of this name, or "
            "keeps it private; check the spelling, or run `hf auth login` with an account "
            "that may read it",
        ),
        (
            errors.LocalEntryNotFoundError,
            f"there is no folder {hub_id}; {name} of the model of this name on the Hugging Face "
            "Hub was not downloaded before, and the hub cannot be reached; connect this machine to "
            "the internet (without HF_HUB_OFFLINE=1), or copy a folder with the model here",
        ),
        (
            errors.EntryNotFoundError,
            f"{hub_id} on the Hugging Face Hub has no {name}; choose a model with config.json, a "
            "tokenizer and *.safetensors files",
        ),
    )
    for kind, words in explained:
        if isinstance(error, kind):
            return (NotHereYet if kind is errors.LocalEntryNotFoundError else ModelError)(words)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(
        f"cannot get {name} of {hub_id} from the Hugging Face Hub ({reason}); try again, or copy a "
        "folder with the model here"
    )
