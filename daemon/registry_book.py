"""The registry's content: devices, tokens, and those that were; what its file may hold."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from edgespec.daemon.cluster import COORDINATOR_NAME
from edgespec.daemon.private_files import REMEDY
from edgespec.errors import ConfigError
from edgespec.net.keys import is_key, short
from edgespec.runtime.access_policy import CLIENT, STAGE
from edgespec.schema import FileStruct, json_text, read_as

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
_VERSION = ("version", 1)

Time = Annotated[float, Meta(ge=0, lt=2.5e11)]  # calendars end a little later

_FINGERPRINT = re.compile(r"[0-9a-f]{12}")


class DeviceEntry(FileStruct, frozen=True):
    """A device or client: its name, "stage" or "client", public key, and when it was admitted.

    Times are seconds since 1970.
    """

    name: str
    role: str
    key: str
    added: Time

    def __post_init__(self) -> None:
        _check(self.key, self.role)
        if clean_name(self.name) != self.name:
            raise ValueError(f"the name {self.name!r} is none that a device can have")

    @property
    def fingerprint(self) -> str:
        """The key for people."""
        return short(self.key)


class TokenEntry(FileStruct, frozen=True):
    """A token: its public key, the role that it gives, and its limits.

    `uses_left` None: any number. Times are seconds since 1970.
    """

    key: str
    role: str
    expires: Time
    uses_left: Annotated[int, Meta(ge=1)] | None
    made: Time

    def __post_init__(self) -> None:
        _check(self.key, self.role)

    @property
    def id(self) -> str:
        """What people call it."""
        return short(self.key)

    def is_valid(self, now: float) -> bool:
        """Whether it admits a device; it does not either where the clock was set far back."""
        return self.made - _CLOCK_S <= now < self.expires


class GoneEntry(FileStruct, frozen=True):
    """Why a key is not admitted since when."""

    key: str
    reason: str
    at: Time

    def __post_init__(self) -> None:
        _check(self.key)
        if self.reason not in _REASONS:
            raise ValueError(f"its reason is {self.reason!r}, which is none")


class _AccessFile(FileStruct, frozen=True):
    devices: list[DeviceEntry]
    tokens: list[TokenEntry]
    gone: list[GoneEntry]


@dataclass(slots=True)
class Book:
    """All entries by public key. `gone`: why a key is not admitted any more, and since when."""

    devices: dict[str, DeviceEntry] = field(default_factory=dict)
    tokens: dict[str, TokenEntry] = field(default_factory=dict)
    gone: dict[str, GoneEntry] = field(default_factory=dict)

    @staticmethod
    def parse(text: str, path: Path) -> Book:
        """What a file holds. Raises ConfigError, naming it, if that is not as it should be."""
        content = read_as(_AccessFile, text, str(path), REMEDY, _VERSION)
        book = Book()
        for device in content.devices:
            if device.key in book.devices or device.name in book.names:
                raise ConfigError(
                    f"{path}: the name or key of the device {device.name!r} is there twice; "
                    f"{REMEDY}"
                )
            book.devices[device.key] = device
        book.tokens = {token.key: token for token in content.tokens}
        book.gone = {entry.key: entry for entry in content.gone}
        return book

    def to_json(self) -> str:
        """As it is stored."""
        devices, tokens = list(self.devices.values()), list(self.tokens.values())
        return json_text(_AccessFile(devices, tokens, list(self.gone.values())), _VERSION)

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
        return key in self.tokens or (key in self.gone and self.gone[key].reason != REMOVED)

    def why_not(self, key: str) -> str:
        """Why a key, or what a token gave, is not admitted; for one that is not."""
        if key in self.tokens:
            return EXPIRED
        return self.gone[key].reason if key in self.gone else UNKNOWN

    def use(self, token: TokenEntry, now: float) -> None:
        """Count one use of a token."""
        if token.uses_left == 1:
            self.drop_token(token.key, USED, now)
        elif token.uses_left is not None:
            self.tokens[token.key] = structs.replace(token, uses_left=token.uses_left - 1)

    def drop_token(self, key: str, reason: str, now: float) -> None:
        """It counts no longer."""
        del self.tokens[key]
        self.gone[key] = GoneEntry(key, reason, now)

    def drop_device(self, key: str, now: float) -> None:
        """It is admitted no longer."""
        del self.devices[key]
        self.gone[key] = GoneEntry(key, REMOVED, now)

    def drop_stale(self, now: float) -> None:
        """Drop tokens that have expired, and what was remembered for long enough."""
        for key, token in list(self.tokens.items()):
            if now >= token.expires:
                self.drop_token(key, EXPIRED, now)
        self.gone = {k: v for k, v in self.gone.items() if now - v.at < REMEMBERED_S}


def clean_name(name: str) -> str:
    """A name that can be shown and typed: printable, without spaces, of 40 characters at most.

    None looks like a fingerprint, which has to mean one device alone.
    """
    text = "".join(c if c.isprintable() else " " for c in unicodedata.normalize("NFC", name))
    text = "-".join(text.split()).lstrip("-")[:MOST_NAME] or "device"
    return f"device-{text}" if _FINGERPRINT.fullmatch(text) else text


def _check(key: str, role: str = STAGE) -> None:
    if not is_key(key):
        raise ValueError("its key is no key")
    if role not in (STAGE, CLIENT):
        raise ValueError(f"its role is {role!r}; it must be {STAGE} or {CLIENT}")
