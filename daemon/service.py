"""Installs and removes the coordinator or the stage as a systemd service; reports its state."""

from __future__ import annotations

import difflib
import grp
import os
import pwd
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from edgespec.errors import ConfigError, EdgespecError
from edgespec.files import write_whole

ROLES = ("coordinator", "stage")
UNITS_FOLDER = Path("etc/systemd/system")
STATE_FOLDER = Path("/var/lib/edgespec")
"""Where the units' StateDirectory lies: the cluster folder of a service."""

_RUNNING = Path("run/systemd/system")  # there if and only if systemd is the init of this machine
_GPU_GROUPS = ("video", "render")  # groups that may use a GPU; a missing group stops the unit
_HIDDEN = (Path("/home"), Path("/root"), Path("/run/user"))  # by ProtectHome=yes
_COMMAND = "/usr/bin/env edgespec"  # in the shipped units
_CONTROL_SECONDS = 60.0
_PROPERTIES = (
    "LoadState,ActiveState,SubState,ActiveEnterTimestamp,StateChangeTimestamp,UnitFileState,"
    "MainPID,NRestarts,Result,ExecMainStatus,StatusText"
)
_PLAIN = re.compile(r"[A-Za-z0-9_@+=:,./-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class State:
    """State of a service; the texts are systemd's, "" if there are none."""

    role: str
    unit: str
    installed: bool
    active: str
    sub: str
    since: str
    starts_at_boot: bool
    process: int
    restarts: int
    result: str
    exit_status: int
    status: str
    log: list[str]


def unit_name(role: str) -> str:
    """The unit of a role. Raises ConfigError for an unknown role."""
    if role not in ROLES:
        raise ConfigError(f"there is no service {role!r}; choose one of: {', '.join(ROLES)}")
    return f"edgespec-{role}.service"


# --- the unit's text ----------------------------------------------------------------------------


def unit_text(
    role: str, options: Sequence[str], user: str = "", command: Path | None = None
) -> str:
    """The unit of a role with its command and options, for this machine.

    `user`: the account that runs it; "" for a dynamic user. `command`: the edgespec
    executable, by default this installation's. Raises ConfigError for an unknown role or user.
    """
    text = (resources.files("edgespec.systemd") / unit_name(role)).read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    path = _quoted(str(command or executable())).replace("$$", "$")  # no variables in a path
    words = " ".join([line.replace(_COMMAND, path), *map(_quoted, options)])
    text = text.replace(line, words)
    if groups := " ".join(filter(has_group, _GPU_GROUPS)):
        text = text.replace("User=edgespec\n", f"User=edgespec\nSupplementaryGroups={groups}\n")
    return _run_by(user, text) if user else text


def _run_by(user: str, text: str) -> str:
    """The unit's text for a person's account, whose home it may read."""
    try:
        pwd.getpwnam(user)
    except (KeyError, ValueError):
        raise ConfigError(f"there is no user {user!r} on this machine; check --user") from None
    text = text.replace("DynamicUser=yes\nUser=edgespec\n", f"User={user}\n")
    return text.replace("ProtectHome=yes\n", "ProtectHome=read-only\n")


def _quoted(word: str) -> str:
    """One word of a command line as systemd reads it: neither split nor expanded."""
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"' + _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'


def has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def executable() -> Path:
    """The `edgespec` command of this installation. Raises ConfigError if it has none."""
    path = Path(sysconfig.get_path("scripts")) / "edgespec"
    if not path.is_file():
        raise ConfigError(f"there is no {path} to start; install edgespec with pip first")
    return path


def require_readable(paths: Iterable[Path]) -> None:
    """Raise ConfigError, with the ways out, for a path that the service's own user cannot read."""
    for path in paths:
        barrier = _barrier(path) or _barrier(path.resolve())
        if barrier is not None:
            raise ConfigError(
                f"the service's own user cannot read {path} ({barrier}); move it, "
                "for instance below /opt or /srv, make it readable for all, or let the service run "
                "as somebody who can read it, with --user NAME"
            )


def own_files() -> list[Path]:
    """Where this installation lies: command, packages, interpreter, and edgespec itself."""
    folders = [sysconfig.get_path("purelib"), sys.base_prefix, os.path.dirname(__file__)]
    return [executable(), *map(Path, folders)]


def _barrier(path: Path) -> str | None:
    """What keeps others from reading `path`, the uppermost part of it first."""
    for part in (*reversed(path.parents), path):
        if part in _HIDDEN:
            return f"{part} is hidden from it"
        try:
            mode = part.stat().st_mode
        except OSError as problem:
            return f"{part}: {problem.strerror}"
        needed = 0o1 if part != path else 0o5 if part.is_dir() else 0o4
        if mode & needed != needed:
            return f"{part} is closed to it"
    return None


# --- systemd ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Systemd:
    """The service manager of this machine, whose files are below `root`.

    Methods raise ConfigError where files or systemd itself cannot be used as wanted, and
    EdgespecError for what `systemctl` says when it fails.
    """

    root: Path = Path("/")

    def install(self, role: str, text: str, force: bool = False) -> bool:
        """Write the unit; returns whether that changed anything.

        A unit that is there and differs is replaced by `force` alone.
        """
        changes = self.require_replaceable(role, text, force)
        if changes:
            _write(self.path(role), text)
        return changes

    def require_replaceable(self, role: str, text: str, force: bool = False) -> bool:
        """Raise ConfigError if `install` would; returns whether it would change anything."""
        path = self.path(role)
        try:
            before = path.read_text("utf-8", "replace") if path.exists() else None
        except OSError as problem:
            raise ConfigError(f"cannot read {path}: {problem}") from None
        if before is not None and before != text and not force:
            lines = difflib.unified_diff(
                before.splitlines(), text.splitlines(), "installed", "new", lineterm="", n=1
            )
            difference = "\n".join(lines)
            raise ConfigError(
                f"{path} is there and differs:\n{difference}\n"
                "give --force to replace it; what you changed by hand is safer in "
                f"`systemctl edit {path.name}`"
            )
        return before != text

    def reload(self) -> None:
        """Let systemd read the units again."""
        self.control("daemon-reload")

    def start(self, role: str) -> None:
        """Let the service start now, with the unit as it is on disk, and at every boot."""
        self.reload()
        self.control("enable", "--quiet", unit_name(role))
        # It may have given up on a setting that is right by now. Loading takes minutes, so that
        # nobody waits for it here.
        self.control("reset-failed", unit_name(role), may_fail=True)
        self.control("restart", "--no-block", unit_name(role))

    def uninstall(self, role: str) -> None:
        """Stop the service and remove its unit; its folders stay."""
        path = self.path(role)
        if not path.exists():
            raise ConfigError(f"{path} is not there: the {role} is not installed as a service")
        self.control("disable", "--quiet", "--now", unit_name(role))
        try:
            path.unlink()
        except OSError as problem:
            raise ConfigError(f"cannot remove {path}: {problem.strerror}") from None
        self.reload()
        self.control("reset-failed", unit_name(role), may_fail=True)

    def state(self, role: str, lines: int = 5) -> State:
        """How the service is, with the last lines of its log where they can be read."""
        unit = unit_name(role)
        self.require_running()
        answer = self.control("show", unit, f"--property={_PROPERTIES}")
        said = defaultdict(str, (line.partition("=")[::2] for line in answer.splitlines()))
        active = said["ActiveState"]
        return State(
            role=role,
            unit=unit,
            installed=said["LoadState"] == "loaded",
            active=active,
            sub=said["SubState"],
            since=said["ActiveEnterTimestamp" if active == "active" else "StateChangeTimestamp"],
            starts_at_boot=said["UnitFileState"] == "enabled",
            process=_number(said["MainPID"]),
            restarts=_number(said["NRestarts"]),
            result=said["Result"],
            exit_status=_number(said["ExecMainStatus"]),
            status=said["StatusText"],
            log=_log(unit, lines),
        )

    def path(self, role: str) -> Path:
        return self.root / UNITS_FOLDER / unit_name(role)

    @property
    def state_folder(self) -> Path:
        """The cluster folder of the services."""
        return self.root / STATE_FOLDER.relative_to("/")

    def require_control(self) -> None:
        """Raise ConfigError if services cannot be changed: by us, or because none run here."""
        self.require_running()
        if os.geteuid() != 0:
            raise ConfigError(
                "only root may change services; give the same command with sudo and the whole "
                f"path: sudo {executable()} service ..."
            )

    def require_running(self) -> None:
        """Raise ConfigError if no systemd runs here, as in most containers."""
        if not (self.root / _RUNNING).is_dir():
            raise ConfigError(
                "systemd does not run here (a container, or another init); let what does start "
                "`edgespec serve` or `edgespec join`, or have the unit for another system printed: "
                "`edgespec service install --dry-run`"
            )

    def control(self, *arguments: str, may_fail: bool = False) -> str:
        try:
            done = _run("systemctl", *arguments)
        except FileNotFoundError:
            problem = "there is no systemctl on this machine; is systemd installed?"
            raise ConfigError(problem) from None
        except subprocess.TimeoutExpired:
            raise EdgespecError(
                f"systemctl {arguments[0]} did not answer for {_CONTROL_SECONDS:.0f} s; "
                "`systemctl list-jobs` shows what systemd waits for"
            ) from None
        if done.returncode and not may_fail:
            what = done.stderr.strip() or f"exit code {done.returncode}"
            raise EdgespecError(f"systemctl {' '.join(arguments)} failed: {what}")
        return done.stdout


def _write(path: Path, text: str) -> None:
    """Replace a file whole, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text, 0o644)
    except OSError as problem:
        raise ConfigError(f"cannot write {path}: {problem.strerror}") from None


def _log(unit: str, lines: int) -> list[str]:
    """The last lines that the service wrote; none where the journal is not there or not ours."""
    try:
        done = _run("journalctl", "--unit", unit, "-n", str(lines), "-o", "cat", "--no-pager", "-q")
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_CONTROL_SECONDS,
        env={**os.environ, "LC_ALL": "C", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"},
    )


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
