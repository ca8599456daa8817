"""GGUF files: the small files of a model folder, made from what a GGUF file says of itself."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path

from edgespec.errors import ConfigError, ModelError
from edgespec.files import cache_folder, is_own, kept
from edgespec.model.gguf.architectures import SETTINGS
from edgespec.model.gguf.configs import config_of
from edgespec.model.gguf.reader import GgufFile, open_gguf

CONFIG = "config.json"
_SEALS = "config.sha256.json", "tokenizer.sha256.json"
"""The hashes of the configuration, which a stage needs alone, and of the tokenizer's files."""

_FORM = "4"
"""Of the files that are made; a new number where they change, so that old ones are left alone."""


_log = logging.getLogger(__name__)


class GgufFiles:
    """See hub.ModelFiles: each file is made when it is asked for, once, in the user's cache; again
    if it is not as it was made.

    `path`: what the user called the model. The folder is named by what the GGUF file's header
    says, so that it is the same wherever the file lies.
    """

    def __init__(self, path: Path, find: Callable[[], Path]) -> None:
        """`find` gives the GGUF file, downloading it if need be."""
        self.path = path
        self._find = find

    @cached_property
    def opened(self) -> GgufFile:
        return open_gguf(self._find())

    @cached_property
    def head(self) -> GgufFile | None:
        """The file beside it that has the head of this model that guesses, as llama.cpp's converter
        names one that it writes apart; None if there is none, or this file has one itself."""
        kind = self.opened.values.get("general.architecture")
        layers, hidden, behind = (
            f"{kind}.{name}" for name in ("block_count", "embedding_length", "nextn_predict_layers")
        )
        mine, own = self.opened.values, self.opened.values.get(layers)
        if mine.get(behind) or not isinstance(own, int):
            return None
        for path in sorted(self.opened.path.parent.glob("mtp-*.gguf")):
            try:
                told = open_gguf(path).values
            except ModelError as error:
                _log.warning("%s: no head that guesses is read from it", error)
                continue
            if (told.get(layers), told.get(behind), told.get(hidden)) == (own + 1, 1, mine[hidden]):
                return open_gguf(path)
        return None

    @cached_property
    def folder(self) -> Path:
        digest = hashlib.sha256(self.opened.header_sha256.encode())
        for name in SETTINGS:
            if turned := self.opened.tensors.get(name):
                digest.update(turned.read(0, 1))
        return cache_folder() / "gguf" / f"{digest.hexdigest()[:32]}-{_FORM}"

    def file(self, name: str) -> Path:
        """Where the file is, or would be. Raises ModelError for a GGUF file that cannot be used."""
        self.optional(name)
        return self.folder / name

    def optional(self, name: str) -> Path | None:
        made = self._config if name == CONFIG else self._tokenizer
        return self.folder / name if name in made else None

    def offers(self, name: str) -> bool:
        return self.optional(name) is not None

    def present(self, name: str) -> bool:
        return self.offers(name)

    @cached_property
    def _config(self) -> Collection[str]:
        return self._kept(_SEALS[0], lambda: {CONFIG: json.dumps(config_of(self.opened), indent=2)})

    @cached_property
    def _tokenizer(self) -> Collection[str]:
        def make() -> Mapping[str, str]:
            from edgespec.model.gguf.vocabulary import tokenizer_files

            return tokenizer_files(self.opened)

        said = self.opened.values
        if said.get("tokenizer.ggml.model") == "gpt2" and not said.get("tokenizer.ggml.pre"):
            _warn_of_cut(self.path)
        return self._kept(_SEALS[1], make)

    def _kept(self, seal: str, make: Callable[[], Mapping[str, str]]) -> Collection[str]:
        try:
            if not is_own(self.folder):
                raise ConfigError(
                    f"others can write to {self.folder}, where the settings of {self.path} are; "
                    "remove that folder, or choose another with XDG_CACHE_HOME"
                )
            return kept(
                self.folder, seal, lambda: {name: text.encode() for name, text in make().items()}
            )
        except OSError as error:
            raise ConfigError(
                f"cannot keep the settings of {self.path} in {self.folder} "
                f"({error.strerror or error}); make room, or choose a folder with XDG_CACHE_HOME"
            ) from error


@functools.cache
def _warn_of_cut(path: Path) -> None:
    """Once a process."""
    _log.warning(
        "%s does not say how its tokenizer cuts text (tokenizer.ggml.pre): it is cut as is usual "
        "for its kind of model, and answers may suffer; take a newer file of the model",
        path,
    )
