"""API keys for HTTP; only their names and hashes are stored."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgespec.daemon.private_files import file_state, held, read_private, write_private
from edgespec.errors import ConfigError
from edgespec.schema import FileStruct, json_text, read_as

FILE = "api-keys.json"
KEY_BYTES = 32
MOST_KEYS = 1024
MOST_NAME_CHARS = 64
ONCE_S = 900.0
"""Seconds in which a key for one use has to be exchanged for one that stays."""

_VERSION = ("version", 1)
_REMEDY = "put a copy of it back; without one remove it, and make new keys with `edgespec key new`"
_MARK = "esk-"


class ApiKey(FileStruct, frozen=True):
    """What is stored of a key. `sha256`: of its text, in hex; `made`: seconds since 1970; `once`:
    it lets nobody in, but may be exchanged for one that does."""

    name: str
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    made: float
    once: bool = False

    @property
    def is_stale(self) -> bool:
        """Whether it was for one use, and it is too late for that."""
        return self.once and not 0 <= time.time() - self.made <= ONCE_S


class _KeyFile(FileStruct, frozen=True):
    keys: tuple[ApiKey, ...]


class ApiKeys:
    """The keys of a cluster folder, as they are on disk now: commands may change them meanwhile.

    Every method raises AccessRefused if others could read or change the file, and ConfigError if it
    is damaged or cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / FILE
        self._read: tuple[tuple[int, ...], tuple[ApiKey, ...]] | None = None

    def all(self) -> tuple[ApiKey, ...]:
        """All valid keys, the oldest first."""
        state, read = file_state(self._file), self._read
        if read is None or read[0] != state:  # `exchanged` may run in another thread
            self._read = read = state, self._load()
        return read[1]

    def new(self, name: str, *, once: bool = False) -> str:
        """Make a key; its text is returned and not stored. Raises ConfigError for a bad name.

        `once`: one for `exchanged`."""
        if not (0 < len(name) <= MOST_NAME_CHARS and name.isprintable()) or name == "all":
            raise ConfigError(
                f"{name!r} is no name for a key; give 1 to {MOST_NAME_CHARS} characters, not 'all'"
            )
        text = _fresh()
        with held(self._folder):
            keys = tuple(key for key in self._load() if not key.is_stale)
            if any(key.name == name for key in keys):
                raise ConfigError(
                    f"there is a key {name!r} already; choose another name, or take it back with "
                    f"`edgespec key revoke`"
                )
            if len(keys) >= MOST_KEYS:
                raise ConfigError(f"there are {len(keys)} keys; revoke those that nobody uses")
            self._store((*keys, ApiKey(name, _hash(text), time.time(), once)))
        return text

    def exchanged(self, text: str) -> str | None:
        """A key in the place of that one for one use; None if it is none, or is too old."""
        shown, fresh = _hash(text), _fresh()

        def is_it(key: ApiKey) -> bool:
            is_same = hmac.compare_digest(key.sha256, shown)
            return is_same and key.once and not key.is_stale

        if not any(map(is_it, self.all())):  # strangers do not keep commands from the folder
            return None
        with held(self._folder):
            keys = self._load()
            for at, key in enumerate(keys):
                if is_it(key):
                    made = ApiKey(key.name, _hash(fresh), time.time())
                    self._store((*keys[:at], made, *keys[at + 1 :]))
                    return fresh
        return None

    def revoke(self, name: str) -> None:
        """Revoke a key; "all": every one. Raises ConfigError if there is none."""
        with held(self._folder):
            keys = self._load()
            left = () if name == "all" else tuple(key for key in keys if key.name != name)
            if len(left) == len(keys) and name != "all":
                raise ConfigError(f"there is no key {name!r}; `edgespec key list` shows them")
            self._store(left)

    def accepts(self, text: str) -> bool:
        """Whether this is the text of a key, compared in constant time."""
        shown = _hash(text)
        found = False
        for key in self.all():
            found |= hmac.compare_digest(key.sha256, shown) and not key.once
        return found

    def _load(self) -> tuple[ApiKey, ...]:
        stored = read_private(self._file, secret=True)
        if stored is None:
            return ()
        return read_as(_KeyFile, stored[0], str(self._file), _REMEDY, _VERSION).keys

    def _store(self, keys: tuple[ApiKey, ...]) -> None:
        write_private(self._file, json_text(_KeyFile(keys), _VERSION))
        self._read = None


def _fresh() -> str:
    return _MARK + base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode().rstrip("=")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
