"""The coordinator's own stage: a process beside `edgespec serve` that computes layers, too."""

from __future__ import annotations

import logging
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

from edgespec.config import LOOPBACK, Address, CoordinatorConfig
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.child_process import ChildProcess
from edgespec.daemon.cluster import ClusterFolder, own_key
from edgespec.daemon.planning import planned_needs
from edgespec.daemon.private_files import make_folder
from edgespec.daemon.process import Beside
from edgespec.errors import EXIT_USAGE
from edgespec.net.discovery_interfaces import listens_everywhere
from edgespec.planning.partition import blocks_of
from edgespec.types.own_module import own_command

FOLDER = "stage"
"""Below the cluster folder: this stage's key and log."""

LOG_FILE = "stage.log"

LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
"""Seconds until a stage that ended is started again: twice as long each time."""

CALM_S = 60.0
"""One that ran for so long begins with the shortest pause again."""

log = logging.getLogger(__name__)


def admitted(cluster: ClusterFolder, store: AccessStore, address: Address) -> ClusterFolder:
    """The stage's own key and membership, made and admitted the first time.

    `address`: the coordinator's. Raises ConfigError or AccessRefused as ClusterFolder does.
    """
    path = cluster.path / FOLDER
    make_folder(path)
    if os.geteuid() == 0:  # for a service that runs as a user of its own
        owner = cluster.path.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
    own = own_key(path)
    name = store.admit(own.public, socket.gethostname())
    return ClusterFolder.remember(path, own, cluster.identity.coordinator, name, str(address))


def trace_beside(trace: Path) -> Path:
    """The stage's trace, where the coordinator's is `trace`."""
    return trace.with_name(f"{trace.stem}-stage{trace.suffix}")


def address_beside(config: CoordinatorConfig, port: int) -> Address:
    """Where a program of this machine reaches the coordinator."""
    host = config.address.host
    return Address(LOOPBACK if listens_everywhere(host) else host, port)


@dataclass(frozen=True, slots=True)
class MachineNeeds:
    """Bytes that the two processes of the coordinator's machine need, as they are planned.

    `first`, `end`: the layers of the stage."""

    coordinator: int
    stage: int
    first: int
    end: int


def machine_needs(config: CoordinatorConfig) -> MachineNeeds | None:
    """What coordinator and own stage need; None if the planner does not know the model or draft."""
    what = "what the coordinator needs beside its stage is not known"
    needs = planned_needs(config, config.context, what)
    if needs is None:
        return None
    of, number = needs.model.of, config.with_stage
    first, end = blocks_of(of.layers, config.stages, config.layers, of.bound)[number - 1]
    stage = needs.stage(end - first, last=number == config.stages)
    return MachineNeeds(needs.coordinator(beside_stage=True).total, stage.total, first, end)


class OwnStage(ChildProcess):
    """The stage, as a child of `edgespec serve`. It is started again whenever it ends, unless a
    setting is wrong or its key was removed; the ring waits for it as for any other stage."""

    def __init__(
        self, config: CoordinatorConfig, folder: ClusterFolder, address: Address, reserved: int
    ) -> None:
        """`folder`: what `admitted` gave; `address`: the coordinator's, on this machine;
        `reserved`: bytes of the available memory that the coordinator will take."""
        command = [*own_command("edgespec.cli.main"), "join"]
        command += ["--stage", str(config.with_stage), "--coordinator", str(address)]
        command += ["--cluster", str(folder.path)]
        if config.cache:
            command += ["--cache", config.cache]
        if not Path(config.model).exists():  # the hub's files are here: nothing has to be sent
            command += ["--model", config.model]
        if config.trace:
            command += ["--trace", str(trace_beside(Path(config.trace)))]
        log_file = folder.path / LOG_FILE
        name = f"stage {config.with_stage} beside the coordinator"
        beside = Beside(config.address.host, reserved)
        super().__init__(name, command, beside.environment, log_file, is_watched=True)
        self._pause = LEAST_PAUSE_S
        log.info("%s: its log is %s", name, log_file)

    def again_after(self, code: int, lived: float) -> float | None:
        if code == EXIT_USAGE:
            log.error("%s cannot run: %s; mend it and restart the coordinator", *self._said)
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "ended"
        pause = LEAST_PAUSE_S if lived >= CALM_S else self._pause
        self._pause = min(2 * pause, MOST_PAUSE_S)
        name, words = self._said
        log.warning("%s %s (%s); it is started again in %.0f s", name, how, words, pause)
        return pause

    @property
    def _said(self) -> tuple[str, str]:
        return self.name, self.last_words or "its log is empty"
