"""GGUF files: the small files of a model folder, made from what a GGUF file says of itself."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from edgespec.errors import ConfigError
from edgespec.kernels.compiled import cache_folder
from edgespec.model.gguf.configs import ROPE, config_of
from edgespec.model.gguf.reader import GgufFile, open_gguf

CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_FORM = "1"
"""Of the files that are made; a new number where they change, so that old ones are left alone."""


class GgufFiles:
    """See hub.ModelFiles: each file is made when it is asked for, once, in the user's cache.

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
    def folder(self) -> Path:
        digest = hashlib.sha256(self.opened.header_sha256.encode())
        if turned := self.opened.tensors.get(ROPE):
            digest.update(turned.read(0, 1))
        return cache_folder() / "gguf" / f"{digest.hexdigest()[:32]}-{_FORM}"

    def file(self, name: str) -> Path:
        """Where the file is, or would be. Raises ModelError for a GGUF file that cannot be used."""
        wanted = self.folder / name
        if name == CONFIG:
            if not wanted.is_file():
                self._write({CONFIG: json.dumps(config_of(self.opened), indent=2)})
        # The vocabulary is written last: where it is, the others are.
        elif not (self.folder / _TOKENIZER).is_file():
            from edgespec.model.gguf.vocabulary import tokenizer_files

            self._write(tokenizer_files(self.opened))
        return wanted

    def optional(self, name: str) -> Path | None:
        wanted = self.file(name)
        return wanted if wanted.is_file() else None

    def offers(self, name: str) -> bool:
        return self.optional(name) is not None

    def present(self, name: str) -> bool:
        return self.offers(name)

    def _write(self, files: dict[str, str]) -> None:
        """Several processes may do so at a time: each file is whole, and the same from all."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                handle, part = tempfile.mkstemp(dir=self.folder)
                with open(handle, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(part, self.folder / name)
        except OSError as error:
            raise ConfigError(
                f"cannot write {self.folder}, where the settings of {self.path} are to be "
                f"({error.strerror or error}); make room, or choose a folder with XDG_CACHE_HOME"
            ) from error
