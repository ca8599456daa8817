"""The access store on disk: several processes and threads at once, and what a bad file does."""

from __future__ import annotations

import json
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.access_stores import Clock, device, enrol, refused, stored

from edgespec.daemon import access_store, private_files
from edgespec.daemon.access_list import AccessList
from edgespec.daemon.access_store import FILE, AccessStore
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.errors import AccessRefused, ConfigError
from edgespec.net.keys import Token

SOMEBODY = 65534
DAY = 86400.0


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    """A coordinator's."""
    return ClusterFolder.create(tmp_path / "cluster", ClusterSettings(stages=2))


@pytest.fixture
def clock() -> Clock:
    """Says the time to `known`."""
    return Clock()


@pytest.fixture
def known(folder: ClusterFolder, clock: Clock) -> AccessStore:
    """Its access_store."""
    return AccessStore(folder, clock)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question looks whether the file has changed."""
    monkeypatch.setattr(access_store, "LOOK_EVERY_S", 0.0)


# --- several processes and threads --------------------------------------------------------------


def test_another_process_is_seen(
    known: AccessStore, folder: ClusterFolder, clock: Clock, at_once: None
) -> None:
    other = AccessStore(folder, clock)
    token = other.new_token("stage", 1, 60.0).pair.public
    assert known.role_of(token) == "token"
    key = device()
    known.enrol(token, key, "board")
    assert (other.role_of(token), other.role_of(key)) == (None, "stage")
    other.remove("board")
    assert known.role_of(key) is None


def test_the_file_is_not_looked_at_for_every_question(
    known: AccessStore, folder: ClusterFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 1000.0
    monkeypatch.setattr(access_store.time, "monotonic", lambda: seconds)
    looks = 0
    look = access_store.file_state

    def counted(path: Path) -> tuple[int, ...]:
        nonlocal looks
        looks += 1
        return look(path)

    known = AccessStore(folder, clock)
    key = enrol(AccessStore(folder, clock))
    monkeypatch.setattr(access_store, "file_state", counted)
    for _ in range(100):
        assert known.role_of(key) is None
    assert looks == 0
    seconds += 0.2
    for _ in range(100):
        assert known.role_of(key) == "stage"
    assert looks == 1


ENROL = """
import sys
from pathlib import Path
from edgespec.daemon.cluster import ClusterFolder
from edgespec.daemon.access_store import AccessStore
from edgespec.errors import AccessRefused
from edgespec.net.keys import KeyPair
known = AccessStore(ClusterFolder.open(Path(sys.argv[1])))
key = KeyPair.new().public
print("ready", flush=True)
sys.stdin.readline()
try:
    print(known.enrol(sys.argv[2], key, "board"))
except AccessRefused as problem:
    print(problem)
"""


@pytest.mark.thorough
def test_of_two_processes_with_a_single_token_one_wins(folder: ClusterFolder) -> None:
    known = AccessStore(folder)
    for _ in range(2):
        tokens = [known.new_token("stage", 1, 60.0).pair.public] * 2
        assert sorted(at_the_same_time(folder, tokens))[1] == "its token was used"
    tokens = [known.new_token("stage", 1, 60.0).pair.public for _ in range(2)]
    assert sorted(at_the_same_time(folder, tokens)) == ["board-3", "board-4"]
    assert [entry.name for entry in known.devices()] == [
        "board",
        "board-2",
        "board-3",
        "board-4",
    ]


def at_the_same_time(folder: ClusterFolder, tokens: list[str]) -> list[str]:
    """What processes say that enrol one device each, by these tokens."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENROL, str(folder.path), token],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for token in tokens
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate(timeout=300.0)[0].strip() for process in processes]


def test_threads_enrol_and_ask_at_once(
    known: AccessStore, folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "LOCK_WAIT_S", 60.0)  # the disk may be slow
    token = known.new_token("stage", 12, 60.0).pair.public
    keys = [device() for _ in range(24)]
    outcomes: list[str] = []

    def one(key: str) -> None:
        try:
            known.enrol(token, key, "board")
            outcomes.append(known.role_of(key) or "nothing")
        except AccessRefused as problem:
            outcomes.append(str(problem))

    threads = [threading.Thread(target=one, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["its token was used"] * 12 + ["stage"] * 12
    assert len({entry.name for entry in known.devices()}) == 12
    admitted = {entry.key for entry in AccessStore(folder).devices()}
    assert admitted == {key for key in keys if known.role_of(key) == "stage"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_does_not_lock_the_service_out() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = ClusterFolder.create(Path(name) / "cluster", ClusterSettings())
        for path in (folder.path, *folder.path.iterdir()):
            os.chown(path, SOMEBODY, SOMEBODY)
        token = AccessStore(folder).new_token("stage", 1, 60.0).pair.public
        state = (folder.path / FILE).stat()
        owner_and_mode = (state.st_uid, state.st_gid, stat.S_IMODE(state.st_mode))
        assert owner_and_mode == (SOMEBODY, SOMEBODY, 0o600)
        os.seteuid(SOMEBODY)
        try:
            service = AccessStore(ClusterFolder.open(folder.path))
            assert service.enrol(token, device(), "board") == "board"
        finally:
            os.seteuid(0)
        assert [entry.name for entry in AccessStore(folder).devices()] == ["board"]


# --- bad files ----------------------------------------------------------------------------------


Content = dict[str, list[dict[str, object]]]


def break_entry(what: str, **change: object) -> Callable[[Content], None]:
    """Changes the first entry of a list."""
    return lambda content: content[what][0].update(change)


BREAKS: dict[str, tuple[Callable[[Content], object], str]] = {
    "no list": (lambda c: c.pop("devices"), "the key 'devices' is missing"),
    "unknown list": (lambda c: c.update(more=[]), "unknown key 'more'"),
    "a number": (lambda c: c.update(devices=3), "devices is 3; it must be a list"),  # type: ignore[call-overload]
    "numbers": (lambda c: c.update(tokens=[3]), "tokens[0] is 3; it must be an object"),  # type: ignore[list-item]
    "role": (break_entry("devices", role="owner"), "devices[0]: its role is 'owner'"),
    "key": (break_entry("devices", key="short"), "its key is no key"),
    "key of another type": (break_entry("tokens", key=[1]), "tokens[0].key is [1]"),
    "unknown key": (break_entry("devices", colour=1), "unknown key 'colour' in devices[0]"),
    "name": (break_entry("devices", name="a b"), "the name 'a b'"),
    "no name": (break_entry("devices", name=None), "devices[0].name is None"),
    "twice": (lambda c: c["devices"].append(c["devices"][0]), "is there twice"),
    "time": (break_entry("devices", added="now"), "devices[0].added is 'now'; it must be a number"),
    "no end of time": (break_entry("tokens", expires=float("nan")), "NaN is no number"),
    "long time": (break_entry("tokens", expires=10**400), ": number out of range"),
    "uses": (
        break_entry("tokens", uses_left=0),
        "tokens[0].uses_left is 0; it must be",
    ),
    "reason": (break_entry("gone", reason="because"), "gone[0]: its reason is 'because'"),
    "since when": (break_entry("gone", at=None), "gone[0].at is None"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_file_that_was_changed_by_hand_is_named(
    known: AccessStore, folder: ClusterFolder, name: str
) -> None:
    enrol(known)
    known.new_token("stage", 2, 60.0)
    content = stored(folder)
    assert all(content[what] for what in ("devices", "tokens", "gone"))
    change, words = BREAKS[name]
    change(content)
    (folder.path / FILE).write_text(json.dumps(content))
    with pytest.raises(ConfigError) as problem:
        AccessStore(folder)
    assert words in str(problem.value)
    assert str(folder.path / FILE) in str(problem.value)


@given(st.binary(max_size=80))
def test_no_file_is_worse_than_an_error(raw: bytes) -> None:
    text = raw.decode("utf-8", "replace")
    with pytest.raises(ConfigError, match=FILE):
        AccessList.parse(text, Path(FILE))


def test_a_running_coordinator_keeps_what_it_knew(
    known: AccessStore, folder: ClusterFolder, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    key, path = enrol(known), folder.path / FILE
    token = known.new_token("stage", 0, 60.0).pair.public
    good = path.read_text()
    for spoil in (lambda: path.write_text("{"), lambda: path.chmod(0o666)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "edgespec"):
            spoil()
            for _ in range(3):
                assert (known.role_of(key), known.role_of(token)) == ("stage", "token")
            assert known.devices()[0].name == "board"
        assert len(caplog.messages) == 1
        assert str(path) in caplog.messages[0]
        with refused(str(path)):  # what cannot be kept is not promised
            known.enrol(token, device(), "other")
        path.unlink()
        path.write_text(good)
        path.chmod(0o600)
        assert known.enrol(token, key, "board") == "board"
    known.remove("board")
    assert known.role_of(key) is None


def test_a_full_disk_admits_nobody(
    known: AccessStore, folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = known.new_token("stage", 1, 60.0).pair.public
    key = device()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with refused("No space left"):
            known.enrol(token, key, "board")
    assert known.role_of(key) is None
    assert known.enrol(token, key, "board") == "board"


def test_without_its_file_a_cluster_admits_nobody(
    known: AccessStore, folder: ClusterFolder, at_once: None
) -> None:
    key = enrol(known)
    (folder.path / FILE).unlink()
    assert known.role_of(key) is None
    assert known.role_of(folder.identity.own.public) == "owner"
    assert known.devices() == []


def test_a_token_made_here_is_understood_there(known: AccessStore, folder: ClusterFolder) -> None:
    made = known.new_token("stage", 1, 60.0)
    read = Token.parse(made.text)
    assert read.coordinator == folder.identity.coordinator
    assert known.enrol(read.pair.public, device(), "board") == "board"
