"""edgespec service: what it refuses, what it writes, and what it tells people and programs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Done, run_here

from edgespec.cli import service
from edgespec.daemon.service import Systemd

Here = Callable[..., Done]
UNIT = "etc/systemd/system/edgespec-stage.service"
STAGE = ("--stage", "2", "--coordinator", "192.168.1.10")


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """Runs `edgespec service` in this process."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *arguments: run_here(capfd, monkeypatch, "service", *arguments)


SYSTEMCTL = """#!/bin/sh
echo "$@" >> "$CALLS"
test "$1" = show || exit 0
case "$2" in
  *stage*) printf 'LoadState=loaded\\nActiveState=%s\\nSubState=%s\\nResult=exit-code\\n' $STATE
    printf 'ExecMainStatus=2\\nMainPID=%s\\nStatusText=the ring is up\\n' "$PROCESS" ;;
  *) printf 'LoadState=not-found\\nActiveState=inactive\\n' ;;
esac
"""


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine as one with systemd, all of it below the folder that is returned."""
    root = tmp_path / "root"
    (root / "run/systemd/system").mkdir(parents=True)
    for name, text in (("systemctl", SYSTEMCTL), ("journalctl", "#!/bin/sh\necho the last line\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STATE", "active running")
    monkeypatch.setenv("PROCESS", "333")
    monkeypatch.setattr(service, "Systemd", lambda: Systemd(root))
    monkeypatch.setattr(service, "own_files", list)  # this checkout may lie anywhere
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return root


def calls(root: Path) -> list[str]:
    """What systemctl was told, in order, by its first word."""
    lines = (root.parent / "calls").read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines]


def test_a_unit_for_another_system(here: Here, tmp_path: Path) -> None:
    done = here("install", "stage", "--root", str(tmp_path), "--", *STAGE)
    assert done.code == 0, done
    text = (tmp_path / UNIT).read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    assert line.endswith(
        "/edgespec join --cache %C/edgespec/blocks --stage 2 --coordinator 192.168.1.10"
    )
    assert Path(line.removeprefix("ExecStart=").split()[0]).is_file()
    done = here("uninstall", "stage", "--root", str(tmp_path))
    assert done.code == 0, done
    assert not (tmp_path / UNIT).exists()


def test_a_dry_run_prints_and_writes_nothing(here: Here, tmp_path: Path) -> None:
    done = here("install", "stage", "--dry-run", "--root", str(tmp_path), "--", *STAGE)
    assert done.code == 0, done
    assert done.out.startswith("# The stage.")
    assert "\n[Install]\n" in done.out
    assert list(tmp_path.iterdir()) == []


def test_install_starts_it_and_says_what_comes_next(here: Here, live: Path) -> None:
    done = here("install", "stage", "--", *STAGE)
    assert done.code == 0, done
    assert calls(live) == ["daemon-reload", "enable", "reset-failed", "restart"]
    assert "edgespec service status stage" in done.err
    assert "is as it should be" in here("install", "stage", "--no-start", "--", *STAGE).err
    assert calls(live)[4:] == ["daemon-reload"]


def test_what_was_changed_by_hand_is_shown_and_kept(here: Here, live: Path) -> None:
    here("install", "stage", "--", *STAGE)
    unit = live / UNIT
    unit.write_text(unit.read_text(encoding="utf-8") + "# mine\n", encoding="utf-8")
    here("install", "stage", "--", *STAGE).assert_refused("-# mine", "--force", "systemctl edit")
    assert "# mine" in unit.read_text(encoding="utf-8")
    assert here("install", "stage", "--force", "--", *STAGE).code == 0
    assert "# mine" not in unit.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("install", "ring"), ("no service 'ring'", "coordinator, stage")),
        (("install", "stage", "--", "--stag", "2"), ("No such option", "--stage")),
        (("install", "stage", "--", *STAGE, "more"), ("more",)),
        (("install", "coordinator", "--", "--stages", "x"), ("--stages", "integer")),
        (("install", "stage", "--", *STAGE, "--cache", "/mnt/ssd"), ("leave --cache out",)),
        (("install", "stage", "--", *STAGE, "--model", "here"), ("give --model /", "/here")),
        (("install", "stage", "--user", "no-such-user", "--", *STAGE), ("no-such-user", "--user")),
        (("install", "stage", "--", *STAGE, "--model", "/home/x"), ("/home is hidden", "--user")),
        (("uninstall", "coordinator"), ("coordinator is not installed",)),
        (("uninstall", "ring"), ("no service 'ring'",)),
        (("status", "ring"), ("no service 'ring'",)),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    here: Here,
    live: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    here(*arguments).assert_refused(*words)
    assert not (live / "etc").exists()


def test_only_root_installs(here: Here, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    here("install", "stage", "--", *STAGE).assert_refused("only root", "sudo")
    here("uninstall", "stage").assert_refused("only root", "sudo")


def test_without_systemd_the_way_out_is_told(here: Here, live: Path) -> None:
    (live / "run/systemd/system").rmdir()
    for command in (("install", "stage", "--", *STAGE), ("uninstall", "stage"), ("status",)):
        here(*command).assert_refused("systemd does not run here", "--root DIR")


def test_status_for_people(here: Here, live: Path) -> None:
    done = here("status")
    assert done.code == 0, done
    assert done.out.splitlines() == [
        "coordinator: not installed",
        "stage: active (running); does not start at boot",
        "  process 333, 0 restart(s)",
        "  the ring is up",
        "  | the last line",
    ]


def test_status_for_programs(here: Here, live: Path) -> None:
    done = here("status", "--json")
    assert done.code == 0, done
    states = {state["role"]: state for state in json.loads(done.out)["services"]}
    assert states["stage"]["active"] == "active"
    assert states["stage"]["log"] == ["the last line"]
    assert states["coordinator"]["installed"] is False


def test_status_of_one_that_failed(here: Here, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE", "failed failed")
    monkeypatch.setenv("PROCESS", "0")
    done = here("status", "stage")
    assert done.code == 1
    assert "ended with exit-code, exit status 2" in done.out


def test_status_of_one_that_is_not_there(here: Here, live: Path) -> None:
    done = here("status", "coordinator")
    assert (done.code, done.out) == (1, "coordinator: not installed\n")
