"""edgespec doctor: a table for people, an object for programs, and what blocks decides the code."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Done, run_here

from edgespec.config import QUANTISATIONS
from edgespec.daemon import doctor, doctor_network, kernels
from edgespec.daemon.doctor import BLOCKED, OK, WARNING, Finding

Here = Callable[..., Done]


@pytest.fixture
def here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Here:
    """Runs `edgespec doctor` in this process, without trying kernels one by one, before there is
    a cluster, and on a network on which nobody is heard."""
    monkeypatch.setenv("COLUMNS", "400")  # no line is broken
    monkeypatch.setenv("EDGESPEC_CLUSTER", str(tmp_path / "cluster"))
    monkeypatch.setattr(doctor_network, "browse", lambda *_: [])
    monkeypatch.setattr(
        kernels,
        "usable_quantisations",
        lambda *_: dict.fromkeys(QUANTISATIONS, "") | {"nf4": "no bitsandbytes"},
    )
    return lambda *arguments: run_here(capfd, monkeypatch, "doctor", *arguments)


def test_this_machine_can_run(here: Here, tmp_path: Path) -> None:
    done = here("--cache", str(tmp_path / "blocks"))
    assert done.code == 0, done
    lines = {line.split()[1]: line.split() for line in done.out.splitlines() if line.strip()}
    assert lines["torch"][0] == "ok"
    assert lines["int4"] == ["ok", "int4", "runs", "here"]
    assert lines["nf4"] == ["warning", "nf4", "no", "bitsandbytes"]
    assert str(tmp_path) in done.out
    assert "edgespec can run here" in done.err
    assert not (tmp_path / "blocks").exists()


@pytest.mark.thorough
def test_programs_get_an_object(here: Here, tmp_path: Path) -> None:
    done = here("--json", "--cache", str(tmp_path))
    assert done.code == 0, done
    result = json.loads(done.out)
    assert result["can_run"] is True
    states = {finding["name"]: finding["state"] for finding in result["findings"]}
    assert states["python"] == states["torch"] == states["memory"] == OK
    assert states["nf4"] == WARNING
    assert set(states.values()) <= {OK, WARNING}


def test_what_blocks_is_named_and_ends_with_1(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    done = here("--cache", str(tmp_path / "file" / "blocks"))
    assert done.code == 1
    assert "edgespec cannot run here yet: cache" in done.err
    assert "Traceback" not in done.err
    monkeypatch.setattr(doctor, "import_problem", lambda: "torch cannot be loaded")
    done = here("--json")
    assert done.code == 1
    result = json.loads(done.out)
    assert result["can_run"] is False
    broken = {"name": "import", "state": BLOCKED, "text": "torch cannot be loaded"}
    assert broken in result["findings"]
    names = [finding["name"] for finding in result["findings"]]
    assert names[names.index("import") + 1 :] == ["clock", "cluster", "mDNS", "coordinator"]


def test_the_way_to_the_coordinator_is_looked_at(here: Here, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closing:
        gone = f"127.0.0.1:{closing.getsockname()[1]}"
    done = here("--coordinator", gone, "--cluster", str(tmp_path / "other"))
    assert done.code == 1
    assert f"none yet in {tmp_path / 'other'}" in done.out
    assert f"{gone} (--coordinator): nothing listens there" in done.out
    assert "edgespec cannot run here yet: coordinator" in done.err
    here("--coordinator", "a:b").assert_refused("is no HOST:PORT")


def test_extras_for_tests_are_no_requirement(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch>=2.6", "numpy>=999.0", "no-such-thing>=1", 'pytest>=8.2; extra == "test"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: needed)
    states = {finding.name: finding.state for finding in doctor.check_versions()}
    assert states["torch"] == OK
    assert states["numpy"] == states["no-such-thing"] == BLOCKED
    assert "pytest" not in states


def test_a_library_that_cannot_be_loaded_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    assert "cannot be loaded (libcudart.so.12" in doctor.import_problem()


def test_without_any_four_bit_kernel_it_runs_but_says_so(
    here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = {name: "its kernel failed" for name in QUANTISATIONS if "4" in name}
    monkeypatch.setattr(
        kernels, "usable_quantisations", lambda *_: dict.fromkeys(QUANTISATIONS, "") | broken
    )
    done = here("--cache", str(tmp_path))
    assert done.code == 0, done
    assert "no 4-bit quantisation runs here" in done.out


def test_a_jetson_is_told_what_to_do_about_nf4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        kernels,
        "usable_quantisations",
        lambda *_: dict.fromkeys(QUANTISATIONS, "") | {"nf4": "its first kernel failed"},
    )
    assert kernels.tried_kernels(tmp_path).unusable == {"nf4": "its first kernel failed"}
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nv_tegra_release").write_text("# R36", encoding="utf-8")
    found = kernels.tried_kernels(tmp_path)
    assert "not built for L4T" in found.unusable["nf4"]
    assert found.has_four_bit


def test_every_finding_has_a_known_state() -> None:
    for finding in doctor.check_versions():
        assert isinstance(finding, Finding)
        assert finding.state in (OK, WARNING, BLOCKED)
        assert finding.text
