"""edgespec token and edgespec device: on files alone, seen by an access store that is open."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.access_stores import device, enrol
from support.commands import Done, run_here

from edgespec.cli.token import seconds_of
from edgespec.daemon import access_store
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings, own_key
from edgespec.errors import ConfigError
from edgespec.net.keys import Token, short

Here = Callable[..., Done]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs a command in this process, on a narrow terminal."""
    monkeypatch.setenv("COLUMNS", "40")
    return lambda *arguments: run_here(capfd, monkeypatch, *arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFolder:
    """A cluster, where the commands look for it."""
    monkeypatch.setenv("EDGESPEC_CLUSTER", str(tmp_path / "cluster"))
    return ClusterFolder.create(tmp_path / "cluster", ClusterSettings(stages=2))


@pytest.fixture
def running(folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch) -> AccessStore:
    """What a running coordinator knows, at once."""
    monkeypatch.setattr(access_store, "LOOK_EVERY_S", 0.0)
    return AccessStore(folder)


def test_a_token_alone_on_standard_output(here: Here, running: AccessStore) -> None:
    done = here("token", "new")
    assert done.code == 0, done.err
    token = Token.parse(done.out)
    assert done.out == token.text + "\n"
    assert running.role_of(token.pair.public) == "token"
    entry = running.tokens()[0]
    assert (entry.role, entry.uses_left) == ("stage", 1)
    assert entry.expires - entry.made == 3600.0
    assert "admits 1 device(s) until 20" in done.err
    assert "edgespec join TOKEN" in done.err
    assert f"edgespec token revoke {entry.id}\n" in done.err
    assert token.text not in done.err


def test_a_clients_token_with_its_limits(here: Here, running: AccessStore) -> None:
    done = here("token", "new", "--client", "--uses", "0", "--valid", "2d")
    assert "edgespec prompt --token TOKEN ..." in done.err
    assert "any number of client(s)" in done.err
    entry = running.tokens()[0]
    assert (entry.role, entry.uses_left) == ("client", None)
    assert entry.expires - entry.made == 2 * 86400.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("30m", 1800.0), (" 1h", 3600.0), ("7d", 604800.0)]
)
def test_spans_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "h", "-1h", "1.5h", "1w", "1h30m", "٣h", "9" * 10 + "s"])
def test_no_spans_of_time(text: str) -> None:
    with pytest.raises(ConfigError, match="is no span of time"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--valid", "soon"), "'soon' is no span of time"),
        (("--valid", "0s"), "cannot be valid for 0 seconds"),
        (("--valid", "366d"), "one second to 365 days"),
        (("--uses", "-1"), "uses is -1"),
    ],
)
def test_tokens_that_cannot_be(
    here: Here, running: AccessStore, arguments: tuple[str, ...], words: str
) -> None:
    here("token", "new", *arguments).assert_refused(words)
    assert running.tokens() == []


def test_tokens_are_listed(here: Here, running: AccessStore) -> None:
    assert "no token can be used" in here("token", "list").err
    assert json.loads(here("token", "list", "--json").out) == {"tokens": []}
    made = [running.new_token("stage", 0, 60.0), running.new_token("client", 3, 60.0)]
    done = here("token", "list")
    rows = [line.split() for line in done.out.splitlines() if line.strip()][2:]
    assert [row[0] for row in rows] == [short(token.pair.public) for token in made]
    assert [row[1] for row in rows] == ["stage", "client"]
    assert rows[0][2:4] == ["any", "number"]
    assert rows[1][2] == "3"
    expires = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(running.tokens()[1].expires))
    assert rows[1][3:5] == expires.split()
    listed = json.loads(here("token", "list", "--json").out)["tokens"]
    assert [entry["uses_left"] for entry in listed] == [None, 3]
    assert listed[0].keys() == {"id", "role", "expires", "uses_left", "made"}
    for token in made:
        assert token.pair.secret not in done.out


def test_tokens_are_revoked(here: Here, running: AccessStore) -> None:
    keys = [running.new_token("stage", 0, 60.0).pair.public for _ in range(3)]
    assert here("token", "revoke", short(keys[1])).code == 0
    assert [running.role_of(key) for key in keys] == ["token", None, "token"]
    assert running.why_not(keys[1]) == "its token was revoked"
    here("token", "revoke", short(keys[1])).assert_refused("there is no token", "token list")
    assert here("token", "revoke", "all").code == 0
    assert running.tokens() == []


def test_devices_are_listed(here: Here, running: AccessStore) -> None:
    assert "no device is admitted yet" in here("device", "list").err
    name = "[red]" + "a" * 35
    key, client = enrol(running, name), enrol(running, "laptop", "client")
    done = here("device", "list")
    rows = [line.split() for line in done.out.splitlines() if line.strip()][2:]
    assert [row[:3] for row in rows] == [
        [name, "stage", short(key)],
        ["laptop", "client", short(client)],
    ]
    listed = json.loads(here("device", "list", "--json").out)["devices"]
    assert [entry["key"] for entry in listed] == [key, client]
    assert listed[0].keys() == {"name", "role", "key", "added", "fingerprint"}


def test_devices_are_removed(here: Here, running: AccessStore) -> None:
    keys = [enrol(running, name) for name in ("nano-a", "nano-b")]
    done = here("device", "remove", "nano-a")
    assert done.code == 0
    assert f"nano-a ({short(keys[0])}) is admitted no longer" in done.err
    assert "tokens can still be used" not in done.err
    assert [running.role_of(key) for key in keys] == [None, "stage"]
    running.new_token("stage", 0, 60.0)
    done = here("device", "remove", short(keys[1]))
    assert "tokens can still be used" in done.err
    assert "edgespec token revoke all" in done.err
    assert running.devices() == []
    here("device", "remove", "nano-a").assert_refused("there is no device 'nano-a'")


COMMANDS = [
    ("token", "new"),
    ("token", "list"),
    ("token", "revoke", "all"),
    ("device", "list"),
    ("device", "remove", "x"),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_where_there_is_no_coordinators_folder(
    here: Here, tmp_path: Path, words: tuple[str, ...]
) -> None:
    empty, board = str(tmp_path / "empty"), tmp_path / "board"
    here(*words, "--cluster", empty).assert_refused("there is no cluster in", "edgespec init")
    ClusterFolder.remember(board, own_key(board), device(), "board", "h:1")
    here(*words, "--cluster", str(board)).assert_refused("on the coordinator's machine")


@pytest.mark.parametrize("words", COMMANDS)
def test_a_damaged_file_is_named(here: Here, folder: ClusterFolder, words: tuple[str, ...]) -> None:
    (folder.path / "access.json").write_text("{")
    here(*words).assert_refused(str(folder.path / "access.json"), "is not JSON in UTF-8")
