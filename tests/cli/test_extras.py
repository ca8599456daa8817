"""What a command says where an extra's packages are not installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import run_here

from edgespec.daemon import extras
from edgespec.daemon.api_process import ApiOptions, served_http
from edgespec.daemon.cluster import ClusterFolder
from edgespec.errors import ConfigError
from edgespec.net.keys import KeyPair


def test_what_an_extra_would_bring_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in extras.EXTRAS:
        assert extras.missing(name) == []
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    folder = ClusterFolder(tmp_path, KeyPair.new(), None)
    with pytest.raises(ConfigError, match=r"the HTTP API .* needs starlette.*\[coordinator\]"):
        served_http("127.0.0.1", ApiOptions(), folder)
    assert served_http("none", ApiOptions(), folder) is None
    for extra, lacks, command in (
        ("bench", "matplotlib", ("bench",)),
        (
            "coordinator",
            "starlette, uvicorn, prometheus_client, segno",
            ("key", "new", "x", "--qr"),
        ),
    ):
        done = run_here(capfd, monkeypatch, *command)
        done.assert_refused(f"needs {lacks}, which is not installed", f"pip install '.[{extra}]'")
