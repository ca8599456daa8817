"""The coordinator's own stage: its key, its command, its memory, and when it is started again."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon import doctor
from edgespec.daemon.access_store import AccessStore
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.daemon.doctor import OK, WARNING
from edgespec.daemon.memory import Available
from edgespec.daemon.own_stage import (
    MOST_PAUSE_S,
    OwnStage,
    address_beside,
    admitted,
    machine_needs,
)
from edgespec.daemon.process import BESIDE, Beside
from edgespec.model.loader import Checkpoint
from edgespec.planning.memory import RUNTIME_BYTES, SHARED_BYTES

HERE = Address("127.0.0.1", 7000)
CONFIG = CoordinatorConfig(
    bundled("base"), "", 3, "float32", Address("0.0.0.0", 7000), with_stage=3
)


@pytest.fixture
def cluster(tmp_path: Path) -> ClusterFolder:
    return ClusterFolder.create(tmp_path / "cluster", ClusterSettings(stages=3, with_stage=3))


def test_its_key_is_its_own_and_is_admitted_once(cluster: ClusterFolder) -> None:
    store = AccessStore(cluster)
    own = admitted(cluster, store, HERE)
    assert own.identity.coordinator == cluster.identity.coordinator
    assert own.identity.own != cluster.identity.own
    assert not own.is_coordinator
    assert store.role_of(own.identity.own.public) == "stage"
    assert store.tokens() == [], "nobody else can come in by it"
    again = admitted(cluster, store, replace(HERE, port=7001))
    assert (again.identity, again.name) == (own.identity, own.name)
    assert ClusterFolder.open(own.path).address == "127.0.0.1:7001"
    assert len(store.devices()) == 1
    assert ClusterFolder.open(cluster.path).is_coordinator


@pytest.mark.parametrize(
    ("host", "reached"),
    [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("10.0.0.5", "10.0.0.5"), ("::1", "::1")],
)
def test_where_it_finds_the_coordinator(host: str, reached: str) -> None:
    config = replace(CONFIG, address=Address(host, 0))
    assert address_beside(config, 7002) == Address(reached, 7002)


def own_stage(cluster: ClusterFolder, config: CoordinatorConfig = CONFIG) -> OwnStage:
    return OwnStage(config, admitted(cluster, AccessStore(cluster), HERE), HERE, 123)


def options_of(stage: OwnStage) -> list[str]:
    """What `edgespec` is told."""
    return stage.command[stage.command.index("edgespec.cli.main") + 1 :]


def test_its_command_is_that_of_a_stage_with_the_coordinators_models(
    cluster: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = own_stage(cluster)
    words = options_of(stage)
    folder = str(cluster.path / "stage")
    assert words == ["join", "--stage", "3", "--coordinator", str(HERE), "--cluster", folder]
    monkeypatch.setenv(BESIDE, stage.environment[BESIDE])
    assert Beside.read() == Beside("0.0.0.0", 123)
    monkeypatch.delenv(BESIDE)
    assert Beside.read() == Beside("", 0)
    words = options_of(own_stage(cluster, replace(CONFIG, model="org/name", cache="/c")))[7:]
    assert words == ["--cache", "/c", "--model", "org/name"]


def test_it_has_a_trace_of_its_own(cluster: ClusterFolder) -> None:
    config = replace(CONFIG, trace="/t/coordinator.jsonl")
    words = options_of(own_stage(cluster, config))[7:]
    assert words == ["--trace", "/t/coordinator-stage.jsonl"]


def test_systemd_s_socket_is_not_the_stages(
    cluster: ClusterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    environment = own_stage(cluster).environment
    assert {"NOTIFY_SOCKET", "WATCHDOG_PID"}.isdisjoint(environment)


def test_it_is_started_again_less_and_less_often(
    cluster: ClusterFolder, caplog: pytest.LogCaptureFixture
) -> None:
    stage = own_stage(cluster)
    assert stage.log_file is not None
    stage.log_file.write_text("12:00:00 error: no memory\n")
    pauses = [stage.again_after(-signal.SIGKILL, 1.0) for _ in range(8)]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MOST_PAUSE_S, MOST_PAUSE_S]
    assert stage.again_after(1, 3600.0) == 1.0, "it had run for long"
    assert stage.again_after(0, 1.0) == 2.0, "it never ends by itself"
    said = "stage 3 beside the coordinator was killed by SIGKILL (no memory); it is started again"
    assert said in caplog.text
    assert stage.again_after(2, 1.0) is None
    assert "cannot run: no memory" in caplog.text


def test_what_the_coordinator_needs_is_its_head_and_its_draft_and_its_stage_apart() -> None:
    base = Checkpoint(bundled("base")).config
    head = 2 * base.vocab_size * base.hidden_size
    alone, both = (machine_needs(replace(CONFIG, draft=draft)) for draft in ("", bundled("draft")))
    assert alone is not None
    assert both is not None
    assert RUNTIME_BYTES - SHARED_BYTES + head < alone.coordinator < both.coordinator
    assert alone.stage == both.stage > RUNTIME_BYTES
    first = machine_needs(replace(CONFIG, with_stage=1))
    assert first is not None
    assert first.stage > alone.stage, "three layers for two"
    assert (alone.first, alone.end, first.first, first.end) == (6, 8, 0, 3)
    last = machine_needs(replace(CONFIG, head="last-stage"))
    assert last is not None
    assert (last.coordinator, last.stage) == (alone.coordinator - head, alone.stage + head)
    assert machine_needs(replace(CONFIG, model="/nowhere")) is None


@pytest.mark.parametrize(("available", "state"), [(1 << 40, OK), (1 << 28, WARNING)])
def test_doctor_counts_both_together_while_neither_runs(
    cluster: ClusterFolder, monkeypatch: pytest.MonkeyPatch, available: int, state: str
) -> None:
    monkeypatch.setattr(doctor, "available_memory", lambda *_: Available(available, "a test"))
    (finding,) = doctor.machine_memory(cluster.path)
    assert (finding.name, finding.state) == ("both here", state)
    assert "stage 3 with layers 6 to 7 (0." in finding.text
    with cluster.served():
        assert not list(doctor.machine_memory(cluster.path))
    ClusterFolder.create(cluster.path, ClusterSettings(stages=3))
    assert not list(doctor.machine_memory(cluster.path))
    assert not list(doctor.machine_memory(cluster.path.parent / "none"))
