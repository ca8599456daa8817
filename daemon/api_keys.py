"""API keys: who may ask over HTTP; on disk there are their names and hashes alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from edgespec.daemon.private_files import (
    REMEDY,
    check_keys,
    held,
    parse_object,
    read_private,
    write_private,
)
from edgespec.errors import ConfigError

FILE = "api-keys.json"
KEY_BYTES = 32
MOST_KEYS = 1024
MOST_NAME_CHARS = 64

_VERSION = 1
_MARK = "esk-"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key. `sha256`: of its text, in hex; `made`: seconds since 1970."""

    name: str
    sha256: str
    made: float


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
        """All that count, the oldest first."""
        state = _state(self._file)
        if self._read is None or self._read[0] != state:
            self._read = state, self._load()
        return self._read[1]

    def new(self, name: str) -> str:
        """Make one; its text is returned here, and kept nowhere. Raises ConfigError for a name."""
        if not (0 < len(name) <= MOST_NAME_CHARS and name.isprintable()) or name == "all":
            raise ConfigError(
                f"{name!r} is no name for a key; give 1 to {MOST_NAME_CHARS} characters, not 'all'"
            )
        text = _MARK + base64.urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode().rstrip("=")
        with held(self._folder):
            keys = self._load()
            if any(key.name == name for key in keys):
                raise ConfigError(
                    f"there is a key {name!r} already; choose another name, or take it back with "
                    f"`edgespec key revoke`"
                )
            if len(keys) >= MOST_KEYS:
                raise ConfigError(f"there are {len(keys)} keys; revoke those that nobody uses")
            self._store((*keys, ApiKey(name, _hash(text), time.time())))
        return text

    def revoke(self, name: str) -> None:
        """Let a key count no more; "all": every one. Raises ConfigError if there is none."""
        with held(self._folder):
            keys = self._load()
            left = () if name == "all" else tuple(key for key in keys if key.name != name)
            if len(left) == len(keys) and name != "all":
                raise ConfigError(f"there is no key {name!r}; `edgespec key list` shows them")
            self._store(left)

    def accepts(self, text: str) -> bool:
        """Whether this is the text of a key; how long that takes does not tell how near it is."""
        shown = _hash(text)
        found = False
        for key in self.all():
            found |= hmac.compare_digest(key.sha256, shown)
        return found

    def _load(self) -> tuple[ApiKey, ...]:
        stored = read_private(self._file, secret=True)
        if stored is None:
            return ()
        content = parse_object(stored[0], self._file, _VERSION, frozenset({"keys"}))
        listed = content["keys"]
        if not isinstance(listed, list):
            raise ConfigError(f"{self._file} is damaged: 'keys' is no list; {REMEDY}")
        return tuple(self._entry(entry) for entry in listed)

    def _entry(self, entry: object) -> ApiKey:
        where = f"{self._file} is damaged: a key"
        if not isinstance(entry, dict):
            raise ConfigError(f"{where} is no object; {REMEDY}")
        check_keys(entry, frozenset(field.name for field in fields(ApiKey)), where)
        name, digest, made = entry["name"], entry["sha256"], entry["made"]
        is_hash = isinstance(digest, str) and len(digest) == 64 and digest.isascii()
        if not isinstance(name, str) or not is_hash or not isinstance(made, int | float):
            raise ConfigError(f"{where} has a value of a wrong kind; {REMEDY}")
        return ApiKey(name, digest, float(made))

    def _store(self, keys: tuple[ApiKey, ...]) -> None:
        listed = {"version": _VERSION, "keys": [asdict(key) for key in keys]}
        write_private(self._file, json.dumps(listed, indent=1) + "\n")
        self._read = None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _state(path: Path) -> tuple[int, ...]:
    """What changes when the file is replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode
