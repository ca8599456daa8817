"""What listens on every interface says addresses that a person can open."""

from __future__ import annotations

import logging
import socket
from ipaddress import IPv4Interface
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.config import LOOPBACK, Address, CoordinatorConfig
from edgespec.daemon import api, coordinator
from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.errors import PeerLost
from edgespec.net import discovery_interfaces
from edgespec.net.discovery_interfaces import EVERY_ADDRESS, Interface
from edgespec.serving import stage_metrics
from edgespec.serving.protocol import opened

EVERYWHERE = Address(EVERY_ADDRESS, 0)


@pytest.fixture(autouse=True)
def _network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One with a name; what would listen everywhere does so on loopback."""
    lan = Interface("eth0", (IPv4Interface("192.168.1.10/24"),), False)
    monkeypatch.setattr(discovery_interfaces, "own_interfaces", lambda: [lan])
    monkeypatch.setattr(discovery_interfaces, "RESPONDER", tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "nano")


def on_loopback(address: Address, backlog: int) -> socket.socket:
    return opened(Address(LOOPBACK, address.port), backlog)


def test_the_api(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.INFO)
    folder = ClusterFolder.create(tmp_path / "cluster", ClusterSettings())
    ApiKeys(folder.path).new("laptop")
    monkeypatch.setattr(api, "opened", on_loopback)
    monkeypatch.setattr(api, "AsyncClient", lambda *_: SimpleNamespace(status=None))
    ends = SimpleNamespace(run=lambda sockets: None)
    monkeypatch.setattr(api, "server_of", lambda *_: ends)
    api.run_api(api.ApiConfig(EVERYWHERE, Address(LOOPBACK, 9)), folder)
    told = capsys.readouterr().out
    port = told.rpartition(":")[2].strip()
    assert told == f"API at http://192.168.1.10:{port}\n"
    words = f"HTTP API at http://192.168.1.10:{port} or http://nano.local:{port}"
    assert words in caplog.text
    assert EVERY_ADDRESS not in caplog.text


def test_the_coordinator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def not_made(*_: object) -> None:
        raise PeerLost("as far as this test goes")

    transport = SimpleNamespace(control_port=7430, close=lambda: None)
    made = SimpleNamespace(coordinator=lambda *_: transport)
    monkeypatch.setattr(coordinator, "PacedTransport", made)
    monkeypatch.setattr(coordinator, "_build", not_made)
    config = CoordinatorConfig(bundled("base"), "", 1, "float32", EVERYWHERE)
    folder = ClusterFolder.create(tmp_path / "cluster", ClusterSettings())
    with pytest.raises(PeerLost):
        coordinator.run_coordinator(config, folder, None)
    assert capsys.readouterr().out == "coordinator at 192.168.1.10:7430\n"


def test_the_metrics_of_a_stage(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(stage_metrics, "opened", on_loopback)
    stage: Any = SimpleNamespace(place=None, machine=None)
    monkeypatch.setattr(stage_metrics._Stage, "collect", lambda self: [])
    with stage_metrics.StageMetrics(EVERYWHERE, stage):
        pass
    assert "metrics at http://192.168.1.10:" in caplog.text
    assert EVERY_ADDRESS not in caplog.text
