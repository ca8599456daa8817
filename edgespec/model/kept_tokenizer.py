"""Kept tokenizer: what transformers makes of a folder's tokenizer files, kept for later starts.

Importing transformers takes most of a second, and ten times as long on a small board. What it makes
of a fast tokenizer is one of the library tokenizers with a few settings. They lie in the user's
cache, and `KeptTokenizer` does the same with them, as long as the files and both libraries are what
they were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tokenizers

from edgespec.files import cache_folder, file_hash, is_own, kept, sound
from edgespec.model.text_bound import TextBound, bound_of

log = logging.getLogger(__name__)

_FORM = "1"
"""Of what is kept; a new number where it changes, so that old ones are left alone."""
_FILES = {".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".vocab"}
"""Kinds of files that a tokenizer is made of; beside them may lie weights in any form."""
MOST_KEPT = 8
"""Of the newest tokenizers."""
_SEAL, _BACKEND, _SETTINGS = "sha256.json", "tokenizer.json", "settings.json"
_USED = (
    *("encode", "decode", "get_vocab", "convert_ids_to_tokens", "convert_tokens_to_ids"),
    *("_encode_plus", "_decode", "_convert_token_to_id_with_added_voc", "added_tokens_decoder"),
)
"""What a class of transformers' may do in a way of its own; then it is not kept."""


class KeptTokenizer:
    """The part of transformers' tokenizers that edgespec uses: see there."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
        self.backend_tokenizer = backend
        backend.no_truncation()
        backend.no_padding()
        self.chat_template: str | None = settings["template"]
        self.special_tokens_map: dict[str, str] = settings["special"]
        self.eos_token_id: int | None = settings["eos"]
        self.unk_token_id: int | None = settings["unknown"]
        self._splits: bool = settings["splits"]
        bound = settings["bound"]
        self.bound = None if bound is None else TextBound(**bound)
        """What model.text_bound says of it."""

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self) -> str | None:
        return self.chat_template

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        verbose: bool = True,
    ) -> list[int]:
        splits = self._splits if split_special_tokens is None else split_special_tokens
        self.backend_tokenizer.encode_special_tokens = splits
        # A batch, as that gives Python's lock back meanwhile.
        (made,) = self.backend_tokenizer.encode_batch(
            [text], add_special_tokens=add_special_tokens, is_pretokenized=False
        )
        return list(made.ids)

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        return self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found = self.backend_tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found


def tokenizer_of(folder: Path, make: Callable[[], Any], probe: str) -> Any:
    """What `make`, which is transformers, makes of a folder, or did before.

    It is kept if a KeptTokenizer has the same vocabulary, and does the same with the text `probe`.
    Raises what `make` raises.
    """
    store: Path | None = None
    with suppress(Exception):  # whatever is wrong with it, it can be made again
        store = cache_folder() / "tokenizers" / _mark(folder)
        if store.is_dir() and is_own(store) and sound(store, _SEAL):
            return _read(store)
    made = make()
    try:
        files = _files(made, probe) if store is not None else {}
        if files and store is not None and is_own(store):
            kept(store, _SEAL, lambda: files)
            _forget_old(store.parent)
    except Exception:  # the disk, or a library, refuses: the next start takes as long again
        log.debug("the tokenizer in %s is not kept", folder, exc_info=True)
    return made


def _mark(folder: Path) -> str:
    """Another one whenever transformers may make another tokenizer of the folder."""
    libraries = [f"{name} {version(name)}" for name in ("transformers", "tokenizers")]
    digest = hashlib.sha256(" ".join([_FORM, *libraries]).encode())
    for file in sorted((*folder.iterdir(), *folder.glob("additional_chat_templates/*"))):
        if file.is_file() and file.suffix in _FILES:
            digest.update(f"{file.relative_to(folder)} {file_hash(file)}\n".encode())
    return digest.hexdigest()[:32]


def _forget_old(stores: Path) -> None:
    """Each change of the files or of a library leaves one that is not asked for any more."""
    by_age = sorted(stores.iterdir(), key=lambda one: one.stat().st_mtime, reverse=True)
    for old in by_age[MOST_KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def _read(store: Path) -> KeptTokenizer:
    settings = json.loads((store / _SETTINGS).read_bytes())
    return KeptTokenizer(tokenizers.Tokenizer.from_file(str(store / _BACKEND)), settings)


def _files(made: Any, probe: str) -> dict[str, bytes]:
    """What to keep of it; nothing if it may do what a KeptTokenizer does not."""
    from transformers import PreTrainedTokenizerFast

    usual = PreTrainedTokenizerFast
    if not isinstance(made, usual):
        return {}
    if any(getattr(type(made), name) is not getattr(usual, name) for name in _USED):
        return {}
    named = made.special_tokens_map.items()
    text = made.backend_tokenizer.to_str()
    bound = bound_of(json.loads(text))
    settings = {
        "template": made.get_chat_template() if made.chat_template else None,
        "special": {name: str(token) for name, token in named if not isinstance(token, list)},
        "eos": made.eos_token_id,
        "unknown": made.unk_token_id,
        "splits": bool(made.split_special_tokens),
        "bound": None if bound is None else asdict(bound),
    }
    again = KeptTokenizer(tokenizers.Tokenizer.from_str(text), settings)
    if not _is_same(again, made, probe):
        return {}
    return {_BACKEND: text.encode(), _SETTINGS: json.dumps(settings).encode()}


def _is_same(ours: KeptTokenizer, theirs: Any, probe: str) -> bool:
    if ours.get_vocab() != theirs.get_vocab():
        return False
    for splits in (None, True, False):
        ids = ours.encode(probe, split_special_tokens=splits)
        if ids != theirs.encode(probe, split_special_tokens=splits):
            return False
        if ours.decode(ids) != theirs.decode(ids, clean_up_tokenization_spaces=False):
            return False
    return bool(ours.added_tokens_decoder == theirs.added_tokens_decoder)
