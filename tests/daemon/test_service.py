"""Services: what systemd itself says of the units, how words are quoted, what systemctl is told."""

from __future__ import annotations

import dataclasses
import getpass
import os
import random
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.daemon.service import (
    ROLES,
    Systemd,
    require_readable,
    unit_name,
    unit_text,
)
from edgespec.errors import ConfigError, EdgespecError

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here"
)
MOST_EXPOSURE = 3.0
USUAL = {
    "coordinator": ["--stages", "3", "--host", "192.168.1.10", "--model", "/srv/models/a b"],
    "stage": ["--stage", "2", "--coordinator", "192.168.1.10:7430"],
}

WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze."""
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=300
    )


def written(folder: Path, role: str, options: list[str], **others: str) -> Path:
    """The unit of a role in a file of its own."""
    path = folder / unit_name(role)
    path.write_text(unit_text(role, options, command=Path("/bin/true"), **others), encoding="utf-8")
    return path


def settings(text: str) -> dict[str, str]:
    """The last value of every setting of a unit."""
    return dict(re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE))


# --- the units ----------------------------------------------------------------------------------


@needs_systemd_analyze
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("user", ["", getpass.getuser()])
def test_systemd_finds_no_fault_with_the_units(role: str, user: str, tmp_path: Path) -> None:
    done = analyze("verify", "--man=no", str(written(tmp_path, role, USUAL[role], user=user)))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd_analyze
def test_systemd_would_find_a_fault(tmp_path: Path) -> None:
    path = written(tmp_path, "stage", [])
    path.write_text(path.read_text(encoding="utf-8").replace("WatchdogSec=30", "WatchdogSec=often"))
    assert "often" in analyze("verify", "--man=no", str(path)).stderr


@needs_systemd_analyze
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("user", ["", "nobody"])
def test_the_units_are_little_exposed(role: str, user: str, tmp_path: Path) -> None:
    path = written(tmp_path, role, USUAL[role], user=user)
    done = analyze("security", "--offline=true", "--no-pager", str(path))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze is older than 250")
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done
    assert 0.1 < float(found[1]) <= MOST_EXPOSURE


@pytest.mark.parametrize("role", ROLES)
def test_a_wrong_setting_ends_a_service_and_nothing_else_does(role: str) -> None:
    found = settings(unit_text(role, []))
    assert found["Restart"] == "always"
    assert found["RestartPreventExitStatus"] == "2"
    assert found["StartLimitIntervalSec"] == "0"


def test_both_units_share_user_and_folders() -> None:
    """Two dynamic users would take the cache from one another at every start."""
    names = ("User", "DynamicUser", "CacheDirectory", "StateDirectory", "ProtectHome")
    both = [settings(unit_text(role, [])) for role in ROLES]
    assert [both[0][name] for name in names] == [both[1][name] for name in names]


@pytest.mark.parametrize("group", ["video", "render"])
def test_only_groups_that_exist_are_asked_for(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.daemon.service.has_group", lambda name: name == group)
    assert settings(unit_text("stage", []))["SupplementaryGroups"] == group
    monkeypatch.setattr("edgespec.daemon.service.has_group", lambda name: False)
    assert "SupplementaryGroups" not in settings(unit_text("stage", []))


def test_a_person_may_run_it() -> None:
    found = settings(unit_text("stage", [], user=getpass.getuser()))
    assert found["User"] == getpass.getuser()
    assert "DynamicUser" not in found
    assert found["ProtectHome"] == "read-only"
    with pytest.raises(ConfigError, match=r"no user 'nobody-of-this-name'.*--user"):
        unit_text("stage", [], user="nobody-of-this-name")


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ConfigError, match="no service 'ring'; choose one of: coordinator, stage"):
        unit_text("ring", [])


# --- quoting ------------------------------------------------------------------------------------


def command_line(words: list[str]) -> str:
    """The options as they stand in ExecStart."""
    line = settings(unit_text("stage", words, command=Path("/bin/true")))["ExecStart"]
    start = "/bin/true join --cache %C/edgespec/blocks"
    assert line.startswith(start)
    return line[len(start) :].strip(" ")


def as_systemd_reads(line: str) -> list[str]:
    """Words of a command line by the rules of systemd.service(5), and systemd.syntax(7)."""
    found, rest = [], line
    while rest:
        if rest[0] == '"':
            quoted = re.match(r'"((?:[^"\\]|\\.)*)"(?: |$)', rest, re.DOTALL)
            assert quoted, rest
            word, rest = quoted[1], rest[quoted.end() :]
            word = re.sub(r"\\(x..|.)", lambda m: unescaped(m[1]), word, flags=re.DOTALL)
        else:
            word, _, rest = rest.partition(" ")
            assert re.fullmatch(r"[^\s\"'\\;#]+", word), word
        assert not re.search(r"(?<!%)(?:%%)*%(?!%)", word), f"{word} holds a specifier"
        found.append(word.replace("%%", "%").replace("$$", "$"))
    return found


def unescaped(escape: str) -> str:
    """What stands behind a backslash."""
    return chr(int(escape[1:], 16)) if escape[0] == "x" and len(escape) == 3 else escape


@given(st.lists(WORDS, max_size=6))
def test_words_arrive_as_they_were_given(words: list[str]) -> None:
    assert as_systemd_reads(command_line(words)) == words


def test_one_line_whatever_the_words_are() -> None:
    line = command_line(["a\nb", "\t", "\r\nExecStart=/bin/sh", "\x7f"])
    assert line == r'"a\x0ab" "\x09" "\x0d\x0aExecStart=/bin/sh" "\x7f"'


@needs_systemd_analyze
def test_systemd_takes_any_words(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    draw = random.Random(seed)
    letters = "ab \"'\\$%;{}#@!-+:=\t\n\x01é~*?[]()&|<>"
    words = ["".join(draw.choices(letters, k=draw.randrange(12))) for _ in range(100)]
    done = analyze("verify", "--man=no", str(written(tmp_path, "stage", words)))
    assert (done.returncode, done.stderr) == (0, ""), f"seed {seed}"


# --- what the service's user can read -----------------------------------------------------------


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may read; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_closed_folder_is_named(open_folder: Path) -> None:
    models = open_folder / "closed" / "models"
    models.mkdir(parents=True)
    models.chmod(0o755)
    models.parent.chmod(0o755)
    require_readable([models])
    models.parent.chmod(0o700)
    with pytest.raises(ConfigError, match=rf"cannot read {models} \({models.parent} is closed"):
        require_readable([models])
    (open_folder / "link").symlink_to(models)
    with pytest.raises(ConfigError, match="--user NAME"):
        require_readable([open_folder / "link"])


def test_a_file_must_be_readable_itself(open_folder: Path) -> None:
    model = open_folder / "model"
    model.touch(0o600)
    with pytest.raises(ConfigError, match=rf"\({model} is closed"):
        require_readable([model])
    with pytest.raises(ConfigError, match="absent: No such file"):
        require_readable([open_folder / "absent"])


@pytest.mark.parametrize("path", ["/home/ann/edgespec", "/root/x", "/run/user/1000/x"])
def test_homes_are_hidden_from_the_service(path: str) -> None:
    with pytest.raises(ConfigError, match="is hidden from it"):
        require_readable([Path(path)])


# --- systemctl ----------------------------------------------------------------------------------

SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$1" in
  show) cat "$SHOWN" ;;
  enable) test ! -e "$REFUSE" || { echo "Access denied" >&2; exit 4; } ;;
  reset-failed) echo "not loaded" >&2; exit 5 ;;
esac
"""
JOURNALCTL = """#!/bin/sh
test "$2" = edgespec-stage.service || exit 1
printf 'stage 2: starting\\nthe ring is up\\n'
"""
RUNNING = """LoadState=loaded
ActiveState=active
SubState=running
ActiveEnterTimestamp=Sat 2026-11-21 14:38:08 UTC
StateChangeTimestamp=Sat 2026-11-21 14:38:09 UTC
UnitFileState=enabled
MainPID=333
NRestarts=2
Result=success
ExecMainStatus=0
StatusText=the ring is up = ready
"""
ABSENT = "LoadState=not-found\nActiveState=inactive\nSubState=dead\nMainPID=0\nResult=success\n"


class Machine:
    """A machine whose systemctl writes down what it is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "root"
        (self.root / "run/systemd/system").mkdir(parents=True)
        self.systemd = Systemd(self.root)
        self._calls, self.shown = folder / "calls", folder / "shown"
        self.refuse = folder / "refuse"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("systemctl", SYSTEMCTL), ("journalctl", JOURNALCTL)):
            (programs / name).write_text(text, encoding="utf-8")
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
        monkeypatch.setenv("CALLS", str(self._calls))
        monkeypatch.setenv("SHOWN", str(self.shown))
        monkeypatch.setenv("REFUSE", str(self.refuse))

    def calls(self) -> list[str]:
        """What systemctl was told, in order."""
        return self._calls.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with systemd."""
    return Machine(tmp_path, monkeypatch)


def test_install_writes_a_unit_that_all_may_read(machine: Machine) -> None:
    text = unit_text("stage", ["--stage", "2"])
    assert machine.systemd.install("stage", text)
    path = machine.root / "etc/systemd/system/edgespec-stage.service"
    assert path.read_text(encoding="utf-8") == text
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(path.parent.iterdir()) == [path]
    assert not machine.systemd.install("stage", text)


def test_a_unit_that_differs_stays_but_by_force(machine: Machine) -> None:
    before, after = (unit_text("stage", ["--stage", number]) for number in "23")
    machine.systemd.install("stage", before)
    with pytest.raises(ConfigError, match=r"(?s)differs.*-ExecStart.* 2\n\+.* 3\n.*--force"):
        machine.systemd.install("stage", after)
    assert machine.systemd.path("stage").read_text(encoding="utf-8") == before
    assert machine.systemd.install("stage", after, force=True)
    assert machine.systemd.path("stage").read_text(encoding="utf-8") == after


def test_a_folder_that_cannot_be_written_is_named(machine: Machine) -> None:
    (machine.root / "etc").write_text("a file", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot write .*edgespec-stage\.service"):
        machine.systemd.install("stage", "text")


def test_start_enables_and_does_not_wait(machine: Machine) -> None:
    machine.systemd.start("coordinator")
    assert machine.calls() == [
        "daemon-reload",
        "enable --quiet edgespec-coordinator.service",
        "reset-failed edgespec-coordinator.service",
        "restart --no-block edgespec-coordinator.service",
    ]


def test_what_systemctl_complains_of_is_told(machine: Machine) -> None:
    machine.refuse.touch()
    with pytest.raises(EdgespecError, match=r"systemctl enable .* failed: Access denied"):
        machine.systemd.start("stage")


def test_uninstall_stops_first_and_leaves_no_unit(machine: Machine) -> None:
    machine.systemd.install("stage", "text")
    machine.systemd.uninstall("stage")
    assert not machine.systemd.path("stage").exists()
    assert machine.calls() == [
        "disable --quiet --now edgespec-stage.service",
        "daemon-reload",
        "reset-failed edgespec-stage.service",
    ]
    with pytest.raises(ConfigError, match="the stage is not installed as a service"):
        machine.systemd.uninstall("stage")


def test_the_state_of_a_running_service(machine: Machine) -> None:
    machine.shown.write_text(RUNNING, encoding="utf-8")
    state = machine.systemd.state("stage")
    assert dataclasses.asdict(state) == {
        "role": "stage",
        "unit": "edgespec-stage.service",
        "installed": True,
        "active": "active",
        "sub": "running",
        "since": "Sat 2026-11-21 14:38:08 UTC",
        "starts_at_boot": True,
        "process": 333,
        "restarts": 2,
        "result": "success",
        "exit_status": 0,
        "status": "the ring is up = ready",
        "log": ["stage 2: starting", "the ring is up"],
    }


def test_the_state_of_a_service_that_is_not_there(machine: Machine) -> None:
    machine.shown.write_text(ABSENT, encoding="utf-8")
    state = machine.systemd.state("coordinator")
    assert (state.installed, state.active, state.process, state.log) == (False, "inactive", 0, [])


def test_without_systemd_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"systemd does not run here.*--dry-run"):
        Systemd(tmp_path).state("stage")
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no systemctl on this machine"):
        Systemd(tmp_path).state("stage")


def test_only_root_may_change_services(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"only root.*sudo /.*/edgespec service"):
        machine.systemd.require_control()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    machine.systemd.require_control()
