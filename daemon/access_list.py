"""Access list: devices, tokens and former ones, as the file of the access store holds them."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from edgespec.daemon.cluster import COORDINATOR_NAME
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
"""How long the reason is kept why a key is no longer admitted."""

_CLOCK_S = 60.0  # a clock may be set back by this much without invalidating tokens
_VERSION = ("version", 1)

Time = Annotated[float, Meta(ge=0, lt=2.5e11)]  # calendars end a little later

_REMEDY = (
    "put a copy of it back; without one remove it, and let all devices and clients join again with "
    "new tokens"
)
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
        """A short form of the key for users."""
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
        """Its name in commands."""
        return short(self.key)

    def is_valid(self, now: float) -> bool:
        """Whether it admits devices; not after its end, nor if the clock was set far back."""
        return self.made - _CLOCK_S <= now < self.expires


class GoneEntry(FileStruct, frozen=True):
    """A key that is no longer admitted: why, and since when."""

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
class AccessList:
    """All entries by public key. `gone`: keys that are no longer admitted."""

    devices: dict[str, DeviceEntry] = field(default_factory=dict)
    tokens: dict[str, TokenEntry] = field(default_factory=dict)
    gone: dict[str, GoneEntry] = field(default_factory=dict)

    @staticmethod
    def parse(text: str | bytes, path: Path) -> AccessList:
        """The content of a file. Raises ConfigError that names it."""
        content = read_as(_AccessFile, text, str(path), _REMEDY, _VERSION)
        entries = AccessList()
        for device in content.devices:
            if device.key in entries.devices or device.name in entries.names:
                raise ConfigError(
                    f"{path}: the name or key of the device {device.name!r} is there twice; "
                    f"{_REMEDY}"
                )
            entries.devices[device.key] = device
        entries.tokens = {token.key: token for token in content.tokens}
        entries.gone = {entry.key: entry for entry in content.gone}
        return entries

    def to_json(self) -> str:
        devices, tokens = list(self.devices.values()), list(self.tokens.values())
        return json_text(_AccessFile(devices, tokens, list(self.gone.values())), _VERSION)

    @property
    def names(self) -> set[str]:
        return {entry.name for entry in self.devices.values()}

    def free_name(self, name: str) -> str:
        """The name, with a number appended if it is in use."""
        taken = self.names | {COORDINATOR_NAME}
        numbered = (f"{name[: MOST_NAME - 5]}-{number}" for number in count(2))
        return next(free for free in chain([name], numbered) if free not in taken)

    def was_token(self, key: str) -> bool:
        """Whether it is or was a token's key: others know the secret one, too."""
        return key in self.tokens or (key in self.gone and self.gone[key].reason != REMOVED)

    def why_not(self, key: str) -> str:
        """Why a key that is not admitted is not."""
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
        """Remove a token, and keep the reason."""
        del self.tokens[key]
        self.gone[key] = GoneEntry(key, reason, now)

    def drop_device(self, key: str, now: float) -> None:
        """Remove a device, and keep the reason."""
        del self.devices[key]
        self.gone[key] = GoneEntry(key, REMOVED, now)

    def drop_stale(self, now: float) -> None:
        """Remove expired tokens, and reasons older than REMEMBERED_S."""
        for key, token in list(self.tokens.items()):
            if now >= token.expires:
                self.drop_token(key, EXPIRED, now)
        self.gone = {k: v for k, v in self.gone.items() if now - v.at < REMEMBERED_S}


def clean_name(name: str) -> str:
    """A name that can be shown and typed: printable, without spaces, at most 40 characters.

    It never looks like a fingerprint, which must identify one device.
    """
    text = "".join(c if c.isprintable() else " " for c in unicodedata.normalize("NFC", name))
    text = "-".join(text.split()).lstrip("-")[:MOST_NAME] or "device"
    return f"device-{text}" if _FINGERPRINT.fullmatch(text) else text


def _check(key: str, role: str = STAGE) -> None:
    if not is_key(key):
        raise ValueError("its key is no key")
    if role not in (STAGE, CLIENT):
        raise ValueError(f"its role is {role!r}; it must be {STAGE} or {CLIENT}")
