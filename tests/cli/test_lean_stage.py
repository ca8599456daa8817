"""A device that only computes runs without what the extras bring, and says what a command lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.commands import run, run_here
from support.starting import at_start

from edgespec.daemon import extras
from edgespec.daemon.api_process import ApiOptions, served_http
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import ClusterFolder
from edgespec.errors import ConfigError
from edgespec.net.keys import KeyPair

ABSENT = (
    *("matplotlib", "starlette", "uvicorn", "prometheus_client", "segno", "rich", "bitsandbytes"),
    *("transformers", "tokenizers", "llguidance", "jinja2"),
)
BLOCKED = """
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)
sys.meta_path.insert(0, Absent())
open({record!r}, "w").close()
"""


def test_a_stage_computes_without_what_only_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of processes, of which the stage has none of those modules."""
    record = tmp_path / "blocked"
    at_start(monkeypatch, tmp_path, "join", BLOCKED.format(absent=ABSENT, record=str(record)))
    demo = ("demo", "--stages", "1", "--model", bundled("base"), "--draft", bundled("draft"))
    done = run(*demo, "--max-new-tokens", "4", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["new_tokens"] == 4
    assert record.exists()


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
