"""The access store: who is admitted by which token, for how long, and under which name."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.access_stores import Clock, device, enrol, put, refused, stored

from edgespec.daemon import access_store
from edgespec.daemon.access_list import MOST_NAME, AccessList, DeviceEntry, TokenEntry, clean_name
from edgespec.daemon.access_store import FILE, MOST_DEVICES, MOST_TOKENS, AccessStore
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings, own_key
from edgespec.errors import ConfigError
from edgespec.net.keys import short

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
    """Its access store."""
    return AccessStore(folder, clock)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question looks whether the file has changed."""
    monkeypatch.setattr(access_store, "LOOK_EVERY_S", 0.0)


# --- who is who ---------------------------------------------------------------------------------


def test_roles_and_names(known: AccessStore, folder: ClusterFolder) -> None:
    owner = folder.identity.own.public
    token = known.new_token("stage", 2, 60.0).pair.public
    stage, client, stranger = enrol(known), enrol(known, "laptop", "client"), device()
    keys = (owner, stage, client, token, stranger)
    assert [known.role_of(key) for key in keys] == ["owner", "stage", "client", "token", None]
    assert [entry.name for entry in known.devices()] == ["board", "laptop"]
    assert [known.why_not(key) for key in keys] == ["", "", "", "", "it is not known"]
    assert known.role_of("") is None
    assert known.why_not("no key") == "it is not known"


def test_a_devices_folder_has_no_registry(tmp_path: Path) -> None:
    own = own_key(tmp_path)
    folder = ClusterFolder.remember(tmp_path, own, device(), "board", "h:1")
    with pytest.raises(ConfigError, match="on the coordinator's machine"):
        AccessStore(folder)


def test_it_survives_and_only_the_owner_reads_it(
    known: AccessStore, folder: ClusterFolder, clock: Clock
) -> None:
    key = enrol(known)
    token = known.new_token("client", 0, 60.0)
    again = AccessStore(folder, clock)
    assert again.devices() == known.devices() == [DeviceEntry("board", "stage", key, clock.now)]
    entry = TokenEntry(token.pair.public, "client", clock.now + 60.0, None, clock.now)
    assert again.tokens() == [entry]
    assert entry.id == short(token.pair.public)
    path = folder.path / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token.pair.secret not in path.read_text()
    assert token.text not in path.read_text()


# --- tokens -------------------------------------------------------------------------------------


def test_a_token_admits_as_many_as_it_says(known: AccessStore) -> None:
    token = known.new_token("stage", 2, 60.0).pair.public
    first, second, third = device(), device(), device()
    assert known.enrol(token, first, "board") == "board"
    assert known.tokens()[0].uses_left == 1
    assert known.enrol(token, second, "board") == "board-2"
    assert known.tokens() == []
    assert (known.role_of(token), known.why_not(token)) == (None, "its token was used")
    with refused("its token was used"):
        known.enrol(token, third, "board")
    assert known.role_of(third) is None


def test_a_token_of_any_number_of_uses(known: AccessStore) -> None:
    token = known.new_token("client", 0, 60.0).pair.public
    names = [known.enrol(token, device(), "laptop") for _ in range(3)]
    assert names == ["laptop", "laptop-2", "laptop-3"]
    assert known.tokens()[0].uses_left is None


def test_who_asks_twice_keeps_its_name_and_uses_nothing_up(known: AccessStore) -> None:
    token = known.new_token("stage", 2, 60.0).pair.public
    key = device()
    assert known.enrol(token, key, "board") == known.enrol(token, key, "other") == "board"
    assert known.tokens()[0].uses_left == 1
    single = known.new_token("stage", 1, 60.0).pair.public
    again = device()
    assert known.enrol(single, again, "nano") == "nano"
    assert known.enrol(single, again, "nano") == "nano"  # it has not heard the answer
    with refused("its token was used"):
        known.enrol(single, device(), "nano")


def test_a_client_becomes_a_stage_by_a_stages_token_alone(known: AccessStore) -> None:
    key = enrol(known, "laptop", "client")
    for_stage, for_client = (known.new_token(r, 1, 60.0).pair.public for r in ("stage", "client"))
    assert known.enrol(for_stage, key, "board") == "laptop"
    assert known.role_of(key) == "stage"
    assert known.why_not(for_stage) == "its token was used"
    assert known.enrol(for_client, key, "board") == "laptop"
    assert known.role_of(key) == "stage"
    assert known.role_of(for_client) == "token"


def test_a_token_expires(known: AccessStore, clock: Clock) -> None:
    token = known.new_token("stage", 0, 60.0).pair.public
    clock.now += 59.9
    assert known.enrol(token, device(), "board") == "board"
    clock.now += 0.1
    assert known.role_of(token) is None
    assert known.why_not(token) == "its token has expired"
    assert known.tokens() == []
    with refused("its token has expired"):
        known.enrol(token, device(), "board")


def test_why_is_known_for_a_day(known: AccessStore, folder: ClusterFolder, clock: Clock) -> None:
    expired = known.new_token("stage", 0, 60.0).pair.public
    used, revoked = known.new_token("stage", 1, 120.0), known.new_token("stage", 1, 120.0)
    key = device()
    known.enrol(used.pair.public, key, "board")
    known.revoke(short(revoked.pair.public))
    known.remove("board")
    clock.now += 61.0
    known.forget("nobody")  # the file is written anew
    assert expired not in {entry["key"] for entry in stored(folder)["tokens"]}
    keys = (expired, used.pair.public, revoked.pair.public, key)
    words = ["its token has expired", "its token was used", "its token was revoked"]
    clock.now += DAY - 62.0
    assert [AccessStore(folder, clock).why_not(k) for k in keys] == [*words, "it was removed"]
    clock.now += 62.0
    known.forget("nobody")
    assert {AccessStore(folder, clock).why_not(key) for key in keys} == {"it is not known"}
    assert stored(folder)["gone"] == []


def test_a_clock_that_was_set_back_lengthens_no_token(known: AccessStore, clock: Clock) -> None:
    token = known.new_token("stage", 0, 60.0).pair.public
    clock.now -= 30.0  # as NTP may
    assert known.role_of(token) == "token"
    clock.now = 0.0  # a board without a battery
    assert known.role_of(token) is None
    with refused("expired"):
        known.enrol(token, device(), "board")


def test_tokens_are_taken_back(known: AccessStore) -> None:
    tokens = [known.new_token("stage", 0, 60.0).pair.public for _ in range(3)]
    key = device()
    known.enrol(tokens[0], key, "board")
    known.revoke(short(tokens[0]))
    assert [known.role_of(token) for token in tokens] == [None, "token", "token"]
    with refused("its token was revoked"):
        known.enrol(tokens[0], key, "board")
    known.revoke_all()
    assert known.tokens() == []
    assert known.why_not(tokens[2]) == "its token was revoked"
    assert known.role_of(key) == "stage"
    with pytest.raises(ConfigError, match="there is no token"):
        known.revoke(short(tokens[0]))
    known.revoke_all()


@pytest.mark.parametrize(
    ("role", "uses", "valid", "words"),
    [
        ("owner", 1, 60.0, "not for 'owner'"),
        ("stage", -1, 60.0, "uses is -1"),
        ("stage", 1, 0.0, "cannot be valid for 0 seconds"),
        ("stage", 1, float("nan"), "nan seconds"),
        ("stage", 1, float("inf"), "inf seconds"),
        ("stage", 1, 366 * DAY, "one second to 365 days"),
    ],
)
def test_tokens_that_cannot_be(
    known: AccessStore, role: str, uses: int, valid: float, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        known.new_token(role, uses, valid)
    assert known.tokens() == []


def test_tokens_have_a_limit(known: AccessStore, folder: ClusterFolder, clock: Clock) -> None:
    many = [TokenEntry(device(), "stage", clock.now + 9, None, clock.now) for _ in range(256)]
    assert len(many) == MOST_TOKENS
    put(folder.path, *many)
    with pytest.raises(ConfigError, match="256 tokens already"):
        known.new_token("stage", 1, 60.0)
    clock.now += 10.0
    known.new_token("stage", 1, 60.0)
    assert len(known.tokens()) == 1


# --- devices ------------------------------------------------------------------------------------


def test_whose_key_is_not_admitted(known: AccessStore, folder: ClusterFolder) -> None:
    token = known.new_token("stage", 0, 60.0).pair.public
    used, revoked = known.new_token("stage", 1, 60.0), known.new_token("stage", 1, 60.0)
    known.enrol(used.pair.public, device(), "board")
    known.revoke(short(revoked.pair.public))
    owner = folder.identity.own.public
    for key in (owner, token, used.pair.public, revoked.pair.public):
        with refused("the coordinator's or a token's"):
            known.enrol(token, key, "board")
    for text in ("", "x" * 40, "short", "#" * 40, '"' * 40):
        if text != "x" * 40:
            with refused("is no key"):
                known.enrol(token, text, "board")
    for key in (owner, device(), "", known.devices()[0].key):
        with refused("it is not known"):
            known.enrol(key, device(), "board")
    assert len(known.devices()) == 1


def test_devices_have_a_limit(known: AccessStore, folder: ClusterFolder) -> None:
    many = [DeviceEntry(f"board-{n}", "stage", device(), 0.0) for n in range(1024)]
    assert len(many) == MOST_DEVICES
    put(folder.path, *many)
    token = known.new_token("stage", 1, 60.0).pair.public
    with refused("1024 devices already", "device remove"):
        known.enrol(token, device(), "board")
    assert known.enrol(token, many[3].key, "board") == "board-3"
    assert known.role_of(token) == "token"
    known.remove("board-7")
    assert known.enrol(token, device(), "board-8") == "board-8-2"


def test_a_device_is_removed_by_name_or_fingerprint(known: AccessStore) -> None:
    keys = [enrol(known, name) for name in ("a", "b", "c")]
    assert known.remove("a").key == keys[0]
    assert known.remove(short(keys[1])).name == "b"
    known.forget(keys[2])
    known.forget(keys[2])
    assert known.devices() == []
    assert [known.role_of(key) for key in keys] == [None] * 3
    assert {known.why_not(key) for key in keys} == {"it was removed"}
    with pytest.raises(ConfigError, match="there is no device 'a'"):
        known.remove("a")


def test_who_was_removed_comes_back_by_a_token_alone(known: AccessStore) -> None:
    single = known.new_token("stage", 1, 60.0).pair.public
    key = device()
    known.enrol(single, key, "board")
    known.remove("board")
    with refused("its token was used"):
        known.enrol(single, key, "board")
    fresh = known.new_token("stage", 1, 60.0).pair.public
    assert known.enrol(fresh, key, "board") == "board"
    assert (known.role_of(key), known.why_not(key)) == ("stage", "")


def test_the_coordinator_s_own_stage_needs_no_token(known: AccessStore) -> None:
    enrol(known, "board")
    key = device()
    assert known.admit(key, "board") == "board-2"
    assert (known.role_of(key), known.admit(key, "renamed")) == ("stage", "board-2")
    known.remove("board-2")
    assert known.role_of(key) is None
    assert known.admit(key, "renamed") == "renamed", "its coordinator was started again"
    assert (known.role_of(key), known.why_not(key)) == ("stage", "")


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("nano a\n", "nano-a"),
        ("", "device"),
        (" \t\x00", "device"),
        ("--help", "help"),
        ("\x1b[31mred", "[31mred"),
        ("a\u202eb", "a-b"),
        ("x" * 50, "x" * 40),
        ("0123456789ab", "device-0123456789ab"),
        ("küche", "küche"),
        ("\ud800", "device"),
    ],
)
def test_names_are_cleaned(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@given(st.text(max_size=80))
def test_any_name_becomes_one_that_can_be_shown_and_typed(name: str) -> None:
    clean = clean_name(name)
    assert clean
    assert clean.isprintable()
    assert " " not in clean
    assert not clean.startswith("-")
    assert len(clean) <= MOST_NAME
    assert clean_name(clean) == clean


@given(st.lists(st.text("ab 0123456789", max_size=60), max_size=12))
def test_names_are_unique_and_come_back_as_they_were(names: list[str]) -> None:
    entries = AccessList()
    for name in names:
        free = entries.free_name(clean_name(name))
        key = device()
        entries.devices[key] = DeviceEntry(free, "stage", key, 1.0)
    assert len(entries.names) == len(names)
    assert all(len(name) <= MOST_NAME for name in entries.names)
    assert AccessList.parse(entries.to_json(), Path(FILE)) == entries


def test_a_fingerprint_means_one_device(known: AccessStore) -> None:
    victim = enrol(known, "nano")
    enrol(known, short(victim))
    enrol(known, "coordinator")
    names = [entry.name for entry in known.devices()]
    assert names == ["nano", f"device-{short(victim)}", "coordinator-2"]
    assert known.remove(short(victim)).name == "nano"
