"""Access stores of a cluster for tests: a clock that obeys, devices, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgespec.daemon.access_list import AccessList, DeviceEntry, TokenEntry
from edgespec.daemon.access_store import FILE, AccessStore
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.private_files import held, write_private
from edgespec.errors import AccessRefused
from edgespec.net.keys import KeyPair


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1.75e9

    def __call__(self) -> float:
        return self.now


def device() -> str:
    """A new device's public key."""
    return KeyPair.new().public


def enrol(known: AccessStore, name: str = "board", role: str = "stage") -> str:
    """A new device, by a token of its own; its key."""
    key = device()
    known.enrol(known.new_token(role, 1, 60.0).pair.public, key, name)
    return key


@contextmanager
def refused(*words: str) -> Iterator[None]:
    """It is, for this reason."""
    with pytest.raises(AccessRefused) as problem:
        yield
    for word in words:
        assert word in str(problem.value)


def put(folder: Path, *entries: DeviceEntry | TokenEntry) -> None:
    """Write a file with these entries, and no others."""
    content = AccessList()
    for entry in entries:
        if isinstance(entry, DeviceEntry):
            content.devices[entry.key] = entry
        else:
            content.tokens[entry.key] = entry
    with held(folder):
        write_private(folder / FILE, content.to_json())


def stored(folder: ClusterFolder) -> dict[str, list[dict[str, object]]]:
    """What the file holds."""
    content: dict[str, list[dict[str, object]]] = json.loads((folder.path / FILE).read_text())
    return content
