"""edgespec service: what it refuses, what it writes, and what it tells people and programs."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Done, run_here

from edgespec.cli import service
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings, own_key
from edgespec.daemon.service import Systemd
from edgespec.errors import AccessRefused
from edgespec.net.keys import KeyPair, Token

Here = Callable[..., Done]
UNIT = "etc/systemd/system/edgespec-stage.service"
STATE = "var/lib/edgespec"
STAGE = ("--stage", "2", "--coordinator", "192.168.1.10")
COORDINATOR = KeyPair.new().public
TOKEN = Token.new(COORDINATOR)


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
    monkeypatch.setenv("EDGESPEC_CLUSTER", "/this/users/own")  # which is not the service's
    return root


@pytest.fixture
def member(live: Path) -> Path:
    """The same; the device belongs to a cluster."""
    state = live / STATE
    ClusterFolder.remember(state, own_key(state), COORDINATOR, "board", "192.168.1.10:7430")
    return live


def calls(root: Path) -> list[str]:
    """What systemctl was told, in order, by its first word."""
    lines = (root.parent / "calls").read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines]


def test_a_dry_run_prints_and_writes_nothing(here: Here, live: Path) -> None:
    before = sorted(live.rglob("*"))
    done = here("install", "stage", "--dry-run", "--", *STAGE)
    assert done.code == 0, done
    assert done.out.startswith("# The stage.")
    (line,) = (line for line in done.out.splitlines() if line.startswith("ExecStart="))
    assert line.endswith(
        "/edgespec join --cache %C/edgespec/blocks --stage 2 --coordinator 192.168.1.10"
    )
    assert Path(line.removeprefix("ExecStart=").split()[0]).is_file()
    assert "\n[Install]\n" in done.out
    assert sorted(live.rglob("*")) == before


def test_a_coordinator_that_carries_layers_is_one_service(here: Here, live: Path) -> None:
    for words in ((), ("--with-stage",), ("--with-stage", "2"), ("--with-stage", "--port", "7001")):
        done = here("install", "coordinator", "--dry-run", "--", *words)
        (line,) = (line for line in done.out.splitlines() if line.startswith("ExecStart="))
        assert line.endswith(" ".join(["serve --cache %C/edgespec/blocks", *words])), done
    (live.parent / "systemctl").write_text(SYSTEMCTL.replace("*stage*", "*coordinator*"))
    assert "runs in it" not in here("status", "coordinator").out
    ClusterFolder.create(live / STATE, ClusterSettings(stages=3, with_stage=3))
    log = live / STATE / "stage/stage.log"
    assert f"stage 3 runs in it, too; its log is {log}\n" in here("status", "coordinator").out


def test_install_starts_it_and_says_what_comes_next(here: Here, member: Path) -> None:
    done = here("install", "stage", "--", *STAGE)
    assert done.code == 0, done
    assert calls(member) == ["daemon-reload", "enable", "reset-failed", "restart"]
    assert "edgespec service status stage" in done.err
    assert "is as it should be" in here("install", "stage", "--no-start", "--", *STAGE).err
    assert calls(member)[4:] == ["daemon-reload"]


def test_what_was_changed_by_hand_is_shown_and_kept(here: Here, member: Path) -> None:
    here("install", "stage", "--", *STAGE)
    unit = member / UNIT
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
        (("install", "stage", "--", *STAGE, "more"), ("no token, or not all of it", "token new")),
        (("install", "stage", "--", *STAGE, TOKEN.text, "more"), ("more",)),
        (("install", "coordinator", "--", "--stages", "x"), ("--stages", "integer")),
        (("install", "stage", "--", *STAGE, "--cache", "/mnt/ssd"), ("leave --cache out",)),
        (
            ("install", "stage", "--", *STAGE, "--cluster", "/srv/c"),
            ("cannot use /srv/c", "leave --cluster out", "/var/lib/edgespec"),
        ),
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
    member: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    here(*arguments).assert_refused(*words)
    assert not (member / "etc").exists()


# --- its cluster --------------------------------------------------------------------------------


def test_a_stage_needs_a_token_or_a_cluster(here: Here, live: Path) -> None:
    here("install", "stage", "--", *STAGE).assert_refused(
        f"belongs to no cluster yet (by {live / STATE})",
        "edgespec token new",
        f"service install stage -- TOKEN {' '.join(STAGE)}",
    )
    assert not (live / "etc").exists()


@pytest.mark.parametrize("words", [(TOKEN.text, *STAGE), (*STAGE, TOKEN.text), ("-", *STAGE)])
def test_a_token_is_used_at_once_and_kept_nowhere(
    here: Here, live: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    typed = io.TextIOWrapper(io.BytesIO(f"{TOKEN.text}\n".encode() * 2))
    monkeypatch.setattr(sys, "stdin", typed)
    used: list[object] = []
    monkeypatch.setattr(service, "admitted", lambda *given: used.append(given[:4]))
    done = here("install", "stage", "--", *words)
    assert done.code == 0, done
    assert used == [(live / STATE, TOKEN, "192.168.1.10", 600.0)]
    text = (live / UNIT).read_text(encoding="utf-8")
    assert "edge-" not in text
    assert f"blocks {' '.join(STAGE)}\n" in text
    assert "edge-" not in here("install", "stage", "--dry-run", "--", *words).out
    assert len(used) == 1


def test_a_token_that_is_refused_installs_nothing(
    here: Here, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AccessRefused("the coordinator refused: this token has expired")

    monkeypatch.setattr(service, "admitted", refused)
    here("install", "stage", "--", *STAGE, TOKEN.text).assert_refused("token has expired")
    assert not (live / "etc").exists()


def test_a_coordinator_needs_a_cluster_of_its_own(here: Here, live: Path, tmp_path: Path) -> None:
    state = live / STATE
    here("install", "coordinator").assert_refused(
        f"no cluster in {state}", f"init --cluster {state} --model ... --stages N", "sudo mv"
    )
    assert not (live / "etc").exists()
    ClusterFolder.create(state, ClusterSettings(stages=2))
    assert here("install", "coordinator").code == 0
    assert here("install", "stage", "--", *STAGE).code == 0, "the cluster's owner needs no token"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    added = ClusterFolder.open(state)
    added.add("closed", ClusterSettings(model=str(closed), stages=2))
    here("install", "coordinator").assert_refused(f"cannot read {closed}", "--user NAME")
    added.path_of_added("closed").unlink()
    ClusterFolder.create(state, ClusterSettings(model=str(closed), stages=2))
    here("install", "coordinator").assert_refused(f"cannot read {closed}", "--user NAME")


def test_a_device_is_no_coordinator(here: Here, member: Path) -> None:
    here("install", "coordinator").assert_refused(
        "device of a cluster", f"leave --cluster {member / STATE}"
    )


def test_only_root_installs(here: Here, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    here("install", "stage", "--", *STAGE).assert_refused("only root", "sudo")
    here("uninstall", "stage").assert_refused("only root", "sudo")


def test_without_systemd_the_way_out_is_told(here: Here, live: Path) -> None:
    (live / "run/systemd/system").rmdir()
    for command in (("install", "stage", "--", *STAGE), ("uninstall", "stage"), ("status",)):
        here(*command).assert_refused("systemd does not run here", "--dry-run")


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
