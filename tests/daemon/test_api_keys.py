"""API keys: on disk are their hashes alone, they count at once, and damage is told."""

from __future__ import annotations

import base64
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from edgespec.config import Address
from edgespec.daemon import api_keys
from edgespec.daemon.api_keys import FILE, KEY_BYTES, ONCE_S, ApiKeys
from edgespec.daemon.api_process import (
    HTTP_PORT,
    ApiOptions,
    http_address,
    needs_keys,
    served_http,
)
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.errors import AccessRefused, ConfigError


def options(
    ollama: str = "",
    aliases: Sequence[str] = (),
    require_key: bool = False,
    origins: Sequence[str] = (),
    names: Sequence[str] = (),
) -> ApiOptions:
    """As a command reads them."""
    return ApiOptions.read(ollama, aliases, require_key, origins, names)


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    """A cluster of its own."""
    return ClusterFolder.create(tmp_path / "cluster", ClusterSettings())


def test_a_key_counts_until_it_is_revoked(folder: ClusterFolder) -> None:
    running, command = ApiKeys(folder.path), ApiKeys(folder.path)
    assert not running.accepts("")
    text, other = command.new("laptop"), command.new("phone")
    assert text != other
    assert len(text) == len("esk-") + 43
    assert len(base64.urlsafe_b64decode(text.removeprefix("esk-") + "=")) == KEY_BYTES
    assert running.accepts(text)
    assert running.accepts(other)
    for wrong in ("", text[:-1], text + "x", text.upper(), "\ud800", "é"):
        assert not running.accepts(wrong)
    command.revoke("laptop")
    assert not running.accepts(text)
    assert running.accepts(other)
    assert [key.name for key in running.all()] == ["phone"]
    command.revoke("all")
    assert not running.accepts(other)


def test_the_file_holds_no_key_and_is_its_owners_alone(folder: ClusterFolder) -> None:
    text = ApiKeys(folder.path).new("laptop")
    file = folder.path / FILE
    assert text not in file.read_text()
    assert text.removeprefix("esk-") not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    with pytest.raises(AccessRefused, match="chmod 600"):
        ApiKeys(folder.path).all()


def test_a_key_for_one_use_is_exchanged_once_and_in_time(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ApiKeys(folder.path)
    once, old, plain = keys.new("phone", once=True), keys.new("old", once=True), keys.new("laptop")
    assert not keys.accepts(once)
    kept = keys.exchanged(once)
    assert kept is not None
    assert keys.accepts(kept)
    for text in (once, kept, plain, "", "x"):
        assert keys.exchanged(text) is None
    assert [(key.name, key.once) for key in keys.all()] == [
        *(("phone", False), ("old", True), ("laptop", False))
    ]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ONCE_S + 1)
    assert keys.exchanged(old) is None
    again = keys.new("old", once=True)  # its name is free again
    assert keys.exchanged(again) is not None


def test_who_has_no_key_for_one_use_keeps_no_command_from_the_folder(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ApiKeys(folder.path)
    text = keys.new("laptop")
    monkeypatch.setattr(api_keys, "held", lambda folder: pytest.fail("it was locked"))
    assert keys.exchanged("esk-guess") is None
    assert keys.exchanged(text) is None


def test_a_key_is_known_while_another_thread_writes_the_file(
    folder: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the file and the end of the question."""
    keys = ApiKeys(folder.path)
    text = keys.new("laptop")

    class State:
        def __ne__(self, other: object) -> bool:
            keys._read = None
            return False

    monkeypatch.setattr(api_keys, "file_state", lambda file: State())
    assert keys.accepts(text)
    assert keys.accepts(text)


@pytest.mark.parametrize("name", ["", "all", "x" * 65, "a\nb", "a\x1b[2J"])
def test_a_name_that_is_none_is_refused(folder: ClusterFolder, name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a key"):
        ApiKeys(folder.path).new(name)


def test_a_name_is_given_once_and_an_unknown_one_cannot_be_revoked(folder: ClusterFolder) -> None:
    keys = ApiKeys(folder.path)
    keys.new("laptop")
    with pytest.raises(ConfigError, match="already"):
        keys.new("laptop")
    with pytest.raises(ConfigError, match="no key 'phone'"):
        keys.revoke("phone")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 1}',
        '{"version": 2, "keys": []}',
        '{"version": 1, "keys": {}}',
        '{"version": 1, "keys": [1]}',
        '{"version": 1, "keys": [{"name": "a"}]}',
        '{"version": 1, "keys": [{"name": "a", "sha256": "x", "made": 1}]}',
        '{"version": 1, "keys": [{"name": 1, "sha256": "' + "0" * 64 + '", "made": 1}]}',
    ],
)
def test_a_damaged_file_lets_nobody_in(folder: ClusterFolder, text: str) -> None:
    file = folder.path / FILE
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=FILE):
        ApiKeys(folder.path).accepts("x")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("none", None),
        ("127.0.0.1", Address("127.0.0.1", HTTP_PORT)),
        ("127.0.0.1:9", Address("127.0.0.1", 9)),
        ("localhost:0", Address("localhost", 0)),
        ("[::1]", Address("::1", HTTP_PORT)),
        ("[::1]:81", Address("::1", 81)),
        ("[::1]:0", Address("::1", 0)),
        ("::1", Address("::1", HTTP_PORT)),
        ("0.0.0.0:8000", Address("0.0.0.0", 8000)),
        ("host:7430", Address("host", 7430)),
    ],
)
def test_where_the_api_listens(text: str, address: Address | None) -> None:
    assert http_address(text) == address


@pytest.mark.parametrize("text", ["", "a b", "host:x", "host:99999", ":80"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        http_address(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "board.local"])
def test_other_machines_need_a_key(folder: ClusterFolder, host: str) -> None:
    http = str(Address(host, 8000))
    with pytest.raises(ConfigError, match="edgespec key new"):
        served_http(http, ApiOptions(), folder)
    ApiKeys(folder.path).new("x")
    assert served_http(http, ApiOptions(), folder) == Address(host, 8000)


def test_ollamas_clients_have_an_address_of_their_own(folder: ClusterFolder) -> None:
    near = options("127.0.0.1")
    assert near.ollama == Address("127.0.0.1", 11434)
    assert served_http("127.0.0.1", near, folder) == Address("127.0.0.1", 8000)
    with pytest.raises(ConfigError, match=r"--ollama 0\.0\.0\.0:11434 can be reached"):
        served_http("127.0.0.1", options("0.0.0.0"), folder)
    with pytest.raises(ConfigError, match="--ollama is for the HTTP API"):
        served_http("none", near, folder)


def test_what_serve_passes_on_is_what_it_was_told() -> None:
    assert options().words == []
    told = options("127.0.0.1", ["a"], True, ["HTTP://localhost:3000/"], ["Board.local"])
    words = ["--ollama", "127.0.0.1:11434", "--alias", "a", "--cors-origin"]
    words += ["http://localhost:3000", "--host-name", "board.local", "--require-key"]
    assert told.words == words


def test_loopback_can_need_a_key_too(folder: ClusterFolder) -> None:
    keyed = options(require_key=True)
    with pytest.raises(ConfigError, match="--require-key, and there is no API key"):
        served_http("127.0.0.1", keyed, folder)
    ApiKeys(folder.path).new("x")
    assert served_http("127.0.0.1", keyed, folder) == Address("127.0.0.1", 8000)


@pytest.mark.parametrize("origin", ["*", "null", "localhost:3000", "http://a/b", "http://*.a", ""])
def test_an_origin_is_one_site(origin: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        options(origins=[origin])


@pytest.mark.parametrize("name", ["", "a:8000", "http://a", "*"])
def test_a_host_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        options(names=[name])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_none(folder: ClusterFolder, host: str) -> None:
    assert not needs_keys(Address(host, 1))
    assert served_http(str(Address(host, 8000)), ApiOptions(), folder) is not None
