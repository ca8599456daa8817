"""Access store: the devices and tokens of a cluster, in a file that several processes share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite

from edgespec.daemon.access_list import (
    REVOKED,
    USED,
    AccessList,
    DeviceEntry,
    TokenEntry,
    clean_name,
)
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.private_files import file_state, held, read_private, write_private
from edgespec.errors import AccessRefused, ConfigError
from edgespec.net.keys import Token, is_key
from edgespec.runtime.access_policy import CLIENT, OWNER, STAGE, TOKEN

log = logging.getLogger(__name__)

FILE = "access.json"
MOST_DEVICES = 1024
MOST_TOKENS = 256
LONGEST_TOKEN_S = 365 * 86400.0
LOOK_EVERY_S = 0.2
"""Seconds between two looks at whether another process has changed the file."""

_RANK = {CLIENT: 1, STAGE: 2}  # a stage may do all that a client may


class AccessStore:
    """Who may do what in the cluster of a coordinator's folder.

    Any thread may use it, and any process that can write to the folder may change the file. Methods
    that change something raise ConfigError if the file is damaged or cannot be written. If the file
    becomes unreadable, one warning is logged and the entries that were last read stay in force.
    """

    def __init__(self, folder: ClusterFolder, clock: Callable[[], float] = time.time) -> None:
        """`clock`: seconds since 1970. Raises ConfigError for a device's folder or a bad file."""
        if not folder.is_coordinator:
            raise ConfigError(
                f"{folder.path} is that of a device; devices and tokens are known on the "
                "coordinator's machine, do this there"
            )
        self._folder, self._clock = folder.path, clock
        self._path = folder.path / FILE
        self._owner = folder.identity.coordinator
        self._lock = threading.Lock()  # of what follows; never held while waiting for the folder
        self._warned = False
        self._looked = time.monotonic()
        self._entries, self._seen = self._read()

    # --- queries --------------------------------------------------------------------------------

    def role_of(self, key: str) -> str | None:
        """What the holder of a public key is: "owner", "stage", "client", "token", or None."""
        if key == self._owner:
            return OWNER
        entries = self._current()
        device = entries.devices.get(key)
        if device is not None:
            return device.role
        token = entries.tokens.get(key)
        return TOKEN if token is not None and token.is_valid(self._clock()) else None

    def why_not(self, key: str) -> str:
        """Why a public key is not admitted, for the log; "" if it is admitted."""
        return "" if self.role_of(key) is not None else self._current().why_not(key)

    def devices(self) -> list[DeviceEntry]:
        """All admitted devices, in the order of their admission."""
        return list(self._current(at_once=True).devices.values())

    def tokens(self) -> list[TokenEntry]:
        """All valid tokens, the oldest first."""
        now = self._clock()
        tokens = self._current(at_once=True).tokens.values()
        return [token for token in tokens if token.is_valid(now)]

    # --- devices --------------------------------------------------------------------------------

    def enrol(self, token_key: str, device_key: str, name: str) -> str:
        """Admit the device that showed a token; returns its name in the cluster.

        A key that is admitted already keeps its name and does not use the token up. Raises
        AccessRefused with the reason: the token does not admit it, or the file cannot be written.
        """
        try:
            with self._changing() as entries:
                return self._enrol(entries, token_key, device_key, name)
        except ConfigError as problem:
            raise AccessRefused(str(problem)) from None

    def _enrol(self, entries: AccessList, token_key: str, device_key: str, name: str) -> str:
        if not is_key(device_key):
            raise AccessRefused("what it wants admitted is no key")
        if device_key == self._owner or entries.was_token(device_key):
            raise AccessRefused("the key that it wants admitted is the coordinator's or a token's")
        now = self._clock()
        token, known = entries.tokens.get(token_key), entries.devices.get(device_key)
        if token is None or not token.is_valid(now):
            reason = entries.why_not(token_key)
            if known is not None and reason == USED:
                return known.name  # it repeats the request: our answer was lost
            raise AccessRefused(reason)
        if known is not None and _RANK[token.role] <= _RANK[known.role]:
            return known.name
        if known is None:
            _require_room(entries)
        entries.use(token, now)
        chosen = known.name if known is not None else entries.free_name(clean_name(name))
        entries.devices[device_key] = DeviceEntry(chosen, token.role, device_key, now)
        entries.gone.pop(device_key, None)
        return chosen

    def admit(self, device_key: str, name: str) -> str:
        """Admit the coordinator's own stage, without a token; returns its name in the cluster.

        Raises AccessRefused if there are too many devices."""
        with self._changing() as entries:
            known = entries.devices.get(device_key)
            if known is not None:
                return known.name
            _require_room(entries)
            chosen = entries.free_name(clean_name(name))
            entries.devices[device_key] = DeviceEntry(chosen, STAGE, device_key, self._clock())
            entries.gone.pop(device_key, None)
            return chosen

    def remove(self, name_or_fingerprint: str) -> DeviceEntry:
        """Withdraw a device's access. Raises ConfigError if there is none of that name."""
        with self._changing() as entries:
            for key, entry in entries.devices.items():
                if name_or_fingerprint in (entry.name, entry.fingerprint):
                    entries.drop_device(key, self._clock())
                    return entry
            raise ConfigError(
                f"there is no device {name_or_fingerprint!r}; see `edgespec device list`"
            )

    def forget(self, key: str) -> None:
        """Withdraw the access of the device with this public key, if there is one."""
        with self._changing() as entries:
            if key in entries.devices:
                entries.drop_device(key, self._clock())

    # --- tokens ---------------------------------------------------------------------------------

    def new_token(self, role: str, uses: int, valid_s: float) -> Token:
        """Make a token that admits devices as "stage" or "client".

        `uses`: how many, 0 for any number; `valid_s`: for how many seconds. Raises ConfigError.
        """
        if role not in _RANK:
            raise ConfigError(f"a token is for a {STAGE} or a {CLIENT}, not for {role!r}")
        if not 0 <= uses <= 2**31:
            raise ConfigError(f"uses is {uses}; it must be at least 1, or 0 for any number")
        if not (isfinite(valid_s) and 1.0 <= valid_s <= LONGEST_TOKEN_S):
            raise ConfigError(
                f"a token cannot be valid for {valid_s:.0f} seconds; give one second to 365 days"
            )
        token, now = Token.new(self._owner), self._clock()
        with self._changing() as entries:
            if len(entries.tokens) >= MOST_TOKENS:
                raise ConfigError(
                    f"there are {MOST_TOKENS} tokens already; `edgespec token revoke all` takes "
                    "them back"
                )
            entry = TokenEntry(token.pair.public, role, now + valid_s, uses or None, now)
            entries.tokens[entry.key] = entry
        return token

    def revoke(self, token_id: str) -> None:
        """Revoke a token. Raises ConfigError if there is none of that id."""
        with self._changing() as entries:
            keys = [key for key, entry in entries.tokens.items() if entry.id == token_id]
            if not keys:
                raise ConfigError(f"there is no token {token_id!r}; see `edgespec token list`")
            entries.drop_token(keys[0], REVOKED, self._clock())

    def revoke_all(self) -> None:
        with self._changing() as entries:
            for key in list(entries.tokens):
                entries.drop_token(key, REVOKED, self._clock())

    # --- the file -------------------------------------------------------------------------------

    def _current(self, at_once: bool = False) -> AccessList:
        """The entries in force; checks the file at most every `LOOK_EVERY_S`."""
        with self._lock:
            now = time.monotonic()
            if at_once or now - self._looked >= LOOK_EVERY_S:
                self._looked = now
                if file_state(self._path) != self._seen:
                    self._reload()
            return self._entries

    def _reload(self) -> None:
        try:
            self._entries, self._seen = self._read()
            self._warned = False
        except ConfigError as problem:
            if not self._warned:
                log.warning("devices and tokens stay as they were: %s", problem)
            self._warned = True

    def _read(self) -> tuple[AccessList, tuple[int, ...]]:
        stored = read_private(self._path, secret=False)
        if stored is None:
            return AccessList(), ()
        return AccessList.parse(stored[0], self._path), stored[1]

    @contextmanager
    def _changing(self) -> Iterator[AccessList]:
        """The entries on disk, to be changed by the caller; stored if nothing is raised."""
        with held(self._folder):
            entries, _ = self._read()
            before = entries.to_json()
            entries.drop_stale(self._clock())
            yield entries
            text = entries.to_json()
            if text != before:
                write_private(self._path, text)
            seen = file_state(self._path)  # no other process writes while we hold the folder
            with self._lock:
                self._entries, self._seen, self._warned = entries, seen, False


def _require_room(entries: AccessList) -> None:
    if len(entries.devices) >= MOST_DEVICES:
        raise AccessRefused(
            f"there are {MOST_DEVICES} devices already; remove some with `edgespec device "
            "remove NAME`"
        )
