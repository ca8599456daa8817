"""The registry's content: devices, tokens, and those that were; what its file may hold."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from edgespec.daemon.cluster import COORDINATOR_NAME
from edgespec.daemon.private_files import REMEDY, check_keys, parse_object
from edgespec.errors import ConfigError
from edgespec.net.keys import is_key, short
from edgespec.runtime.access_policy import CLIENT, STAGE

EXPIRED = "its token has expired"
USED = "its token was used"
REVOKED = "its token was revoked"
REMOVED = "it was removed"
UNKNOWN = "it is not known"
_REASONS = (EXPIRED, USED, REVOKED, REMOVED)

MOST_NAME = 40
"""Characters of a device's name."""

REMEMBERED_S = 86400.0
"""For how long it is known why a key is not admitted any more."""

_CLOCK_S = 60.0  # by so much a clock may be set back without anybody being locked out
_VERSION = 1
_END_OF_TIME = 2.5e11  # calendars end a little later
_FINGERPRINT = re.compile(r"[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class DeviceEntry:
    """A device or client: its name, "stage" or "client", public key, and when it was admitted.

    Times are seconds since 1970.
    """

    name: str
    role: str
    key: str
    added: float

    def __post_init__(self) -> None:
        _check_common(self.key, self.role, self.added)
        if not isinstance(self.name, str) or clean_name(self.name) != self.name:
            raise ConfigError(f"the name {self.name!r} is none that a device can have")

    @property
    def fingerprint(self) -> str:
        """The key for people."""
        return short(self.key)


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token: its public key, the role that it gives, and its limits.

    `uses_left` None: any number. Times are seconds since 1970.
    """

    key: str
    role: str
    expires: float
    uses_left: int | None
    made: float

    def __post_init__(self) -> None:
        _check_common(self.key, self.role, self.made, self.expires)
        left = self.uses_left
        if left is not None and (not isinstance(left, int) or isinstance(left, bool) or left < 1):
            raise ConfigError(f"uses_left is {left!r}; it must be a number from 1, or null")

    @property
    def id(self) -> str:
        """What people call it."""
        return short(self.key)

    def is_valid(self, now: float) -> bool:
        """Whether it lets anybody in; it does not either where the clock was set far back."""
        return self.made - _CLOCK_S <= now < self.expires


@dataclass(slots=True)
class Book:
    """All entries by public key. `gone`: why a key is not admitted any more, and since when."""

    devices: dict[str, DeviceEntry] = field(default_factory=dict)
    tokens: dict[str, TokenEntry] = field(default_factory=dict)
    gone: dict[str, tuple[str, float]] = field(default_factory=dict)

    @staticmethod
    def parse(text: str, path: Path) -> Book:
        """What a file holds. Raises ConfigError, naming it, if that is not as it should be."""
        content = parse_object(text, path, _VERSION, frozenset({"devices", "tokens", "gone"}))
        book = Book()
        for where, entry in _entries(content, "devices", path, DeviceEntry.__slots__):
            device: DeviceEntry = _made(DeviceEntry, entry, where)
            if device.key in book.devices or device.name in book.names:
                raise ConfigError(f"{where}: the name or key is there twice; {REMEDY}")
            book.devices[device.key] = device
        for where, entry in _entries(content, "tokens", path, TokenEntry.__slots__):
            token: TokenEntry = _made(TokenEntry, entry, where)
            book.tokens[token.key] = token
        for where, entry in _entries(content, "gone", path, ("key", "reason", "at")):
            if entry["reason"] not in _REASONS or not _is_time(entry["at"]):
                raise ConfigError(f"{where}: reason or time is none; {REMEDY}")
            book.gone[str(entry["key"])] = (entry["reason"], float(entry["at"]))
        return book

    def to_json(self) -> str:
        """As it is stored."""
        content = {
            "version": _VERSION,
            "devices": [asdict(entry) for entry in self.devices.values()],
            "tokens": [asdict(entry) for entry in self.tokens.values()],
            "gone": [{"key": k, "reason": why, "at": at} for k, (why, at) in self.gone.items()],
        }
        return json.dumps(content, indent=1) + "\n"

    @property
    def names(self) -> set[str]:
        """Those that are taken."""
        return {entry.name for entry in self.devices.values()}

    def free_name(self, name: str) -> str:
        """The name, or with a number behind it if it is taken."""
        taken = self.names | {COORDINATOR_NAME}
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name[: MOST_NAME - 5]}-{number}"
        return free

    def was_token(self, key: str) -> bool:
        """Whether it is a token's key, or was: others know the secret one, too."""
        return key in self.tokens or self.gone.get(key, (REMOVED, 0.0))[0] != REMOVED

    def why_not(self, key: str) -> str:
        """Why a key, or what a token gave, is not admitted; for one that is not."""
        return EXPIRED if key in self.tokens else self.gone.get(key, (UNKNOWN, 0.0))[0]

    def use(self, token: TokenEntry, now: float) -> None:
        """Count one use of a token."""
        if token.uses_left == 1:
            self.drop_token(token.key, USED, now)
        elif token.uses_left is not None:
            self.tokens[token.key] = replace(token, uses_left=token.uses_left - 1)

    def drop_token(self, key: str, reason: str, now: float) -> None:
        """It counts no longer."""
        del self.tokens[key]
        self.gone[key] = (reason, now)

    def drop_device(self, key: str, now: float) -> None:
        """It is admitted no longer."""
        del self.devices[key]
        self.gone[key] = (REMOVED, now)

    def drop_stale(self, now: float) -> None:
        """Drop tokens that have expired, and what was remembered for long enough."""
        for key, token in list(self.tokens.items()):
            if now >= token.expires:
                self.drop_token(key, EXPIRED, now)
        self.gone = {k: v for k, v in self.gone.items() if now - v[1] < REMEMBERED_S}


def clean_name(name: str) -> str:
    """A name that can be shown and typed: printable, without spaces, of 40 characters at most.

    None looks like a fingerprint, which has to mean one device alone.
    """
    text = "".join(c if c.isprintable() else " " for c in unicodedata.normalize("NFC", name))
    text = "-".join(text.split()).lstrip("-")[:MOST_NAME] or "device"
    return f"device-{text}" if _FINGERPRINT.fullmatch(text) else text


def _entries(
    content: dict[str, Any], what: str, path: Path, keys: tuple[str, ...]
) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a list, each with the words for where it is."""
    listed = content[what]
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ConfigError(f"{path}: {what} is no list of objects; {REMEDY}")
    found = [(f"{path}: entry {n} of {what}", entry) for n, entry in enumerate(listed, start=1)]
    for where, entry in found:
        check_keys(entry, frozenset(keys), where)
        if not is_key(entry["key"]):
            raise ConfigError(f"{where}: its key is no key; {REMEDY}")
    return found


def _made(kind: type[Any], entry: dict[str, Any], where: str) -> Any:
    try:
        return kind(**entry)
    except ConfigError as problem:
        raise ConfigError(f"{where}: {problem}; {REMEDY}") from None


def _check_common(key: str, role: str, *times: float) -> None:
    if not is_key(key):
        raise ConfigError("its key is no key")
    if role not in (STAGE, CLIENT):
        raise ConfigError(f"its role is {role!r}; it must be {STAGE} or {CLIENT}")
    if not all(map(_is_time, times)):
        raise ConfigError("a time is no number of seconds")


def _is_time(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return 0 <= value < _END_OF_TIME  # NaN is not, nor what is too long for a float
