"""The cluster folder: who may read it, what survives, and what is said of one that is damaged."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from edgespec.daemon import private_files
from edgespec.daemon.cluster import (
    VARIABLE,
    ClusterFolder,
    ClusterSettings,
    default_folder,
    folder_of,
    own_key,
)
from edgespec.daemon.private_files import held, read_private, write_private
from edgespec.errors import AccessRefused, ConfigError
from edgespec.net.keys import Identity, KeyPair, short

SETTINGS = ClusterSettings(model="/models/a", stages=2, layers="3,5", places=("nano-a", "nano-b"))
SOMEBODY = 65534


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a cluster may be made."""
    return tmp_path / "cluster"


def member(path: Path, name: str = "board") -> ClusterFolder:
    """A device's folder, of some cluster."""
    return ClusterFolder.remember(path, own_key(path), KeyPair.new().public, name, "10.0.0.1:7430")


def modes(path: Path) -> set[int]:
    """Of all files in a folder."""
    return {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}


# --- where it is --------------------------------------------------------------------------------


def test_the_folder_by_option_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    assert default_folder() == Path("/home/ann/.local/state/edgespec")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # to be ignored, by its specification
    assert default_folder() == Path("/home/ann/.local/state/edgespec")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert folder_of("") == Path("/state/edgespec")
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/edgespec:/var/lib/other")
    assert folder_of("") == Path("/var/lib/edgespec")
    monkeypatch.setenv(VARIABLE, "/mine")
    assert folder_of("") == Path("/mine")
    assert folder_of("here") == Path.cwd() / "here"


# --- a coordinator's ----------------------------------------------------------------------------


def test_a_cluster_is_found_again_and_keeps_its_key(folder: Path) -> None:
    made = ClusterFolder.create(folder, SETTINGS)
    assert made.is_coordinator
    found = ClusterFolder.open(folder)
    assert found.identity == made.identity == Identity.of_coordinator(made.identity.own)
    assert found.cluster_id == short(made.identity.own.public)
    assert found.settings == SETTINGS
    again = ClusterFolder.create(folder, ClusterSettings(stages=4))
    assert again.identity == made.identity
    assert found.settings == ClusterSettings(stages=4)


def test_only_the_owner_reads_it(folder: Path) -> None:
    before = os.umask(0)
    try:
        ClusterFolder.create(folder, SETTINGS).keep_plan("{}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes(folder) == {0o600}
    assert {file.name for file in folder.iterdir()} == {"cluster.key", "settings.json", "plan.json"}
    secret = ClusterFolder.open(folder).identity.own.secret
    assert secret not in repr(ClusterFolder.open(folder).identity)
    assert secret not in (folder / "settings.json").read_text()


def test_nobody_can_read_a_file_while_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    sync = os.fsync

    def look(descriptor: int) -> None:
        seen.extend(modes(folder))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    before = os.umask(0)
    try:
        ClusterFolder.create(folder, SETTINGS)
    finally:
        os.umask(before)
    assert seen
    assert set(seen) == {0o600}


def test_which_device_held_which_stage_is_remembered_as_far_as_it_can_be_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = ClusterFolder.create(folder, SETTINGS)
    assert cluster.holders() == ()
    cluster.keep_holders(("a", "b"))
    assert ClusterFolder.open(folder).holders() == ("a", "b")
    assert not caplog.records
    path = folder / "holders.json"
    whole = path.read_bytes()
    for torn in (
        b"",
        whole[:20],
        bytes(len(whole)),
        b"\xff" * 9,
        b"[]",
        b'{"version": 1, "keys": 3}',
    ):
        path.write_bytes(torn)
        assert cluster.holders() == (), torn
    assert len(caplog.records) == 6
    cluster.keep_holders(("c",))
    assert cluster.holders() == ("c",)
    path.unlink()
    path.mkdir()
    assert cluster.holders() == ()
    cluster.keep_holders(("a", "b"))  # it is said, and no more


def test_an_empty_folder_is_closed_and_a_shared_one_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "empty"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    ClusterFolder.create(open_to_all, SETTINGS)
    assert stat.S_IMODE(open_to_all.stat().st_mode) == 0o700
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "others.txt").touch()
    with pytest.raises(AccessRefused, match="chmod go-w"):
        ClusterFolder.create(shared, SETTINGS)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777


@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("cluster.key", 0o640, "read or change the secret key in"),
        ("cluster.key", 0o604, "read or change the secret key in"),
        ("settings.json", 0o620, "others can change"),
    ],
)
def test_a_file_that_others_reach_is_refused(
    folder: Path, name: str, mode: int, words: str
) -> None:
    ClusterFolder.create(folder, SETTINGS)
    (folder / name).chmod(mode)
    with pytest.raises(AccessRefused, match=rf"{words}.*\({mode:04o}|chmod 600") as refused:
        _ = ClusterFolder.open(folder).settings
    assert words in str(refused.value)
    assert f"chmod 600 {folder / name}" in str(refused.value)
    (folder / name).chmod(0o600)
    assert ClusterFolder.open(folder).settings == SETTINGS


def test_a_folder_that_others_can_write_to_is_refused(folder: Path) -> None:
    ClusterFolder.create(folder, SETTINGS)
    folder.chmod(0o770)
    with pytest.raises(AccessRefused, match="chmod go-w"):
        ClusterFolder.open(folder)


def test_what_to_do_where_there_is_nothing(folder: Path) -> None:
    with pytest.raises(AccessRefused, match=r"edgespec init --model .* `edgespec join TOKEN`"):
        ClusterFolder.open(folder)
    folder.write_text("a file")
    with pytest.raises(AccessRefused, match="there is no cluster in"):
        ClusterFolder.open(folder)
    with pytest.raises(ConfigError, match="cannot use the folder"):
        ClusterFolder.create(folder, SETTINGS)


def test_where_the_coordinator_is_seen_from_its_own_machine(folder: Path) -> None:
    assert ClusterFolder.create(folder, ClusterSettings(port=7431)).address == "127.0.0.1:7431"
    made = ClusterFolder.create(folder, ClusterSettings(host="192.168.1.10"))
    assert made.address == "192.168.1.10:7430"
    assert made.with_address("elsewhere:1").address == "192.168.1.10:7430"
    assert ClusterFolder.create(folder, ClusterSettings(host="::")).address == "127.0.0.1:7430"
    assert ClusterFolder.create(folder, ClusterSettings(host="fd00::1")).address == "[fd00::1]:7430"
    assert made.name == "coordinator"


def test_two_at_once_make_one_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_files, "LOCK_WAIT_S", 60.0)  # the disk may be slow
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: ClusterFolder.create(folder, SETTINGS), range(8)))
    assert len({one.identity.own.secret for one in made}) == 1
    assert made[0].identity == ClusterFolder.open(folder).identity


def test_a_killed_init_leaves_no_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"cannot write .*No space left"):
            ClusterFolder.create(folder, SETTINGS)
    with pytest.raises(AccessRefused, match="there is no cluster"):
        ClusterFolder.open(folder)
    assert ClusterFolder.create(folder, SETTINGS).settings == SETTINGS  # nothing is in the way
    assert {file.name for file in folder.iterdir()} == {"cluster.key", "settings.json"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_writes_belongs_to_the_folders_owner(folder: Path) -> None:
    ClusterFolder.create(folder, SETTINGS)
    for path in (folder, *folder.iterdir()):
        os.chown(path, SOMEBODY, SOMEBODY)
    ClusterFolder.create(folder, ClusterSettings(stages=3)).keep_plan("{}")
    owners = {(f.stat().st_uid, f.stat().st_gid) for f in folder.iterdir()}
    assert owners == {(SOMEBODY, SOMEBODY)}
    assert modes(folder) == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes somebody else")
def test_what_belongs_to_another_user_is_no_traceback() -> None:
    with tempfile.TemporaryDirectory() as name:
        closed = Path(name)  # not below pytest's own folder, which is closed itself
        ClusterFolder.create(closed / "cluster", SETTINGS)
        for mode in (0o700, 0o755):
            closed.chmod(mode)
            (closed / "cluster").chmod(mode)
            os.seteuid(SOMEBODY)
            try:
                with pytest.raises(AccessRefused, match="run this as the one who made it"):
                    ClusterFolder.open(closed / "cluster")
                with pytest.raises(ConfigError):
                    ClusterFolder.create(closed / "cluster", SETTINGS)
            finally:
                os.seteuid(0)


# --- damaged ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "it must be an object"),
        ("{}", "has version None"),
        ('{"version": 2}', "use the edgespec that wrote it"),
        ('{"version": 1}', "the key 'model' is missing"),
    ],
)
def test_damaged_settings_are_named(folder: Path, text: str, words: str) -> None:
    made = ClusterFolder.create(folder, SETTINGS)
    (folder / "settings.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        _ = made.settings
    assert str(folder / "settings.json") in str(refused.value)
    assert ClusterFolder.create(folder, SETTINGS).settings == SETTINGS  # `init` puts it right


def test_settings_with_an_unknown_key_or_a_wrong_value(folder: Path) -> None:
    made = ClusterFolder.create(folder, SETTINGS)
    content = json.loads((folder / "settings.json").read_text())
    for change, words in (
        ({"colour": 1}, "unknown key 'colour'; known: model"),
        ({"stages": True}, "stages is True"),
        ({"stages": "3"}, "stages is '3'"),
        ({"places": ["a", 3]}, "places.1. is 3; it must be a text"),
        ({"places": [""]}, "places.0. is ''; it must be a text"),
        ({"model": None}, "model is None; it must be a text"),
        ({"port": 99999}, "99999 is no port"),
    ):
        (folder / "settings.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(ConfigError, match=words):
            _ = made.settings
    (folder / "settings.json").unlink()
    with pytest.raises(ConfigError, match="`edgespec init` writes it again"):
        _ = made.settings


@pytest.mark.parametrize("text", ["nonsense", "\n", "0" * 41, "\x00\x01", "#" * 40])
def test_a_damaged_key_is_no_new_one(folder: Path, text: str) -> None:
    ClusterFolder.create(folder, SETTINGS)
    (folder / "cluster.key").write_text(text)
    for use in (lambda: ClusterFolder.open(folder), lambda: ClusterFolder.create(folder, SETTINGS)):
        with pytest.raises(ConfigError, match=r"cluster\.key is damaged"):
            use()
    assert (folder / "cluster.key").read_text() == text


def test_a_link_or_a_pipe_is_not_followed(folder: Path, tmp_path: Path) -> None:
    ClusterFolder.create(folder, SETTINGS)
    (folder / "cluster.key").rename(tmp_path / "key")
    (folder / "cluster.key").symlink_to(tmp_path / "key")
    with pytest.raises(ConfigError, match=r"cannot read .*cluster\.key"):
        ClusterFolder.open(folder)
    (folder / "cluster.key").unlink()
    os.mkfifo(folder / "cluster.key", 0o600)
    with pytest.raises(ConfigError, match="is no plain file"):
        ClusterFolder.open(folder)


def test_a_process_that_holds_the_folder_is_not_waited_for_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ClusterFolder.create(folder, SETTINGS)
    monkeypatch.setattr(private_files, "LOCK_WAIT_S", 0.05)
    with held(folder), pytest.raises(ConfigError, match="another edgespec is changing"):
        made.keep_plan("{}")
    made.keep_plan("{}")
    assert (folder / "plan.json").read_text() == "{}"
    made.keep_plan("")
    assert not (folder / "plan.json").exists()


# --- a device's ---------------------------------------------------------------------------------


def test_a_device_remembers_its_cluster(folder: Path) -> None:
    own = own_key(folder)
    assert own_key(folder) == own
    with pytest.raises(AccessRefused, match="there is no cluster"):
        ClusterFolder.open(folder)
    coordinator = KeyPair.new().public
    ClusterFolder.remember(folder, own, coordinator, "board", "10.0.0.1:7430")
    found = ClusterFolder.open(folder)
    assert found.identity == Identity(own, coordinator)
    assert (found.name, found.address) == ("board", "10.0.0.1:7430")
    assert found.cluster_id == short(coordinator)
    assert not found.is_coordinator
    assert modes(folder) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="do this on the coordinator"):
        _ = found.settings


def test_a_new_address_is_kept(folder: Path) -> None:
    moved = member(folder).with_address("10.0.0.2:7431")
    assert moved.address == ClusterFolder.open(folder).address == "10.0.0.2:7431"
    assert moved.identity == ClusterFolder.open(folder).identity
    with pytest.raises(ConfigError, match="is no HOST:PORT"):
        moved.with_address("10.0.0.2:0")


def test_another_cluster_takes_the_place_of_the_first(folder: Path) -> None:
    first = member(folder)
    second = member(folder, "other")
    assert second.identity.own == first.identity.own
    assert ClusterFolder.open(folder).identity == second.identity != first.identity
    assert ClusterFolder.open(folder).name == "other"


def test_a_device_forgets_its_cluster_and_its_key(folder: Path) -> None:
    first = member(folder)
    (folder / "device.key.part").write_text("left by a process that was killed")
    first.forget()
    assert list(folder.iterdir()) == []
    first.forget()
    assert own_key(folder) != first.identity.own


def test_a_folder_is_a_coordinators_or_a_devices(tmp_path: Path) -> None:
    cluster = ClusterFolder.create(tmp_path / "a", SETTINGS)
    for use in (lambda: own_key(tmp_path / "a"), cluster.forget, lambda: member(tmp_path / "a")):
        with pytest.raises(ConfigError, match="is the coordinator's own folder"):
            use()
    with pytest.raises(ConfigError, match="is the coordinator's own folder"):
        ClusterFolder.remember(tmp_path / "a", KeyPair.new(), KeyPair.new().public, "x", "h:1")
    assert ClusterFolder.open(tmp_path / "a").settings == SETTINGS
    device = member(tmp_path / "b")
    with pytest.raises(ConfigError, match="edgespec leave"):
        ClusterFolder.create(tmp_path / "b", SETTINGS)
    assert ClusterFolder.open(tmp_path / "b").identity == device.identity


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"coordinator": "x"}, "the coordinator's key is no key"),
        ({"coordinator": None}, "coordinator is None; it must be a text"),
        ({"address": "h:0"}, "is no HOST:PORT"),
        ({"name": 3}, "name is 3; it must be a text; join again"),
        ({"more": 3}, "unknown key 'more'"),
    ],
)
def test_a_damaged_membership_is_named(folder: Path, change: dict[str, object], words: str) -> None:
    member(folder)
    path = folder / "membership.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=words) as refused:
        ClusterFolder.open(folder)
    assert str(path) in str(refused.value)
    assert member(folder).name == "board"  # joining again puts it right


def test_a_device_that_lost_its_key_is_told_to_join_again(folder: Path) -> None:
    member(folder)
    (folder / "device.key").unlink()
    with pytest.raises(AccessRefused, match="join again"):
        ClusterFolder.open(folder)


# --- private files ------------------------------------------------------------------------------


def test_what_is_not_there_and_what_is_too_long(tmp_path: Path) -> None:
    assert read_private(tmp_path / "nothing", secret=True) is None
    assert read_private(tmp_path / "nothing" / "below", secret=True) is None
    write_private(tmp_path / "long", "x" * (private_files.MOST_BYTES + 1))
    found = read_private(tmp_path / "long", secret=True)
    assert found is not None
    assert len(found[0]) == private_files.MOST_BYTES


@pytest.mark.skipif(os.geteuid() != 0, reason="a link that root could be led by")
def test_root_is_not_led_to_another_file_by_a_link(folder: Path, tmp_path: Path) -> None:
    ClusterFolder.create(folder, SETTINGS)
    os.chown(folder, SOMEBODY, SOMEBODY)
    target = tmp_path / "target"
    target.write_text("mine")
    (folder / "plan.json.part").symlink_to(target)
    with held(folder):
        write_private(folder / "plan.json", "{}")
    assert (target.read_text(), target.stat().st_uid) == ("mine", 0)
