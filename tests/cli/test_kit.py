"""edgespec bench --kit: one file with what a board shows, and with nothing of its owner."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from msgspec import structs
from support.commands import run_here

from edgespec.cli import kit as kit_file
from edgespec.cli.kit import (
    HIDDEN,
    Watch,
    beside,
    bundled_profile,
    figures,
    own_names,
    power,
    without_names,
)
from edgespec.config import QUANTISATIONS
from edgespec.daemon import bandwidths, doctor_network, kernels, storage
from edgespec.daemon.measure import Measured, MeasureRequest
from edgespec.daemon.profiles import profile_named
from edgespec.errors import PeerLost


@pytest.mark.slow
def test_one_command_measures_and_hides_whose_board_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With names and folders of a person, which doctor and profile tell otherwise."""
    home = tmp_path / "ada-lovelace"
    home.mkdir()
    for name in ("HOME", "XDG_CACHE_HOME", "EDGESPEC_CLUSTER"):
        monkeypatch.setenv(name, str(home))
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "ada99")
    monkeypatch.setattr(kit_file.socket, "gethostname", lambda: "engine7.ada.example")
    monkeypatch.setattr(bandwidths, "LEAST_BUFFER", 2**22)
    monkeypatch.setattr(bandwidths, "MOST_BUFFER", 2**22)
    monkeypatch.setattr(storage, "TRIED_BYTES", 1 << 20)
    monkeypatch.setattr(kit_file, "SECONDS", 0.02)
    usable = {name: "" if name in ("none", "int4") else "not tried" for name in QUANTISATIONS}
    monkeypatch.setattr(kernels, "usable_quantisations", lambda *_: usable)
    monkeypatch.setattr(doctor_network, "browse", lambda *_: [])
    done = run_here(capfd, monkeypatch, "bench", "--kit", "--out", str(home / "out"))
    assert done.code == 0, done.err
    text = (home / "out" / "edgespec-kit.json").read_text(encoding="utf-8")
    for private in ("ada-lovelace", "ada99", "engine7", str(tmp_path), str(Path.cwd())):
        assert private not in text, private
    _, own, *_ = Path.cwd().parts
    assert not re.search(rf"(?<![\w.])/(?:home|tmp|root|usr|{re.escape(own)})/", text)
    content = json.loads(text)
    assert content["exactness"]["same_tokens"] is True, content["exactness"]
    measured = content["measured"]
    assert set(measured["layer_seconds"]) == {"none", "int4"}
    assert measured["profile"]["quantisation"] == "int4"
    assert {"torch", "linux", "machine"} <= set(content["versions"])
    assert "watts" in content["meanwhile"]
    assert (content["predicted"] == {}) == ("nothing was predicted for it" in done.err)


def test_what_was_predicted_for_a_board_is_told_beside_what_was_measured() -> None:
    boards = {
        "NVIDIA Jetson Orin Nano Developer Kit": "jetson-orin-nano-8gb",
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super": (
            "jetson-orin-nano-super-8gb"
        ),
        "NVIDIA Jetson AGX Orin Developer Kit": "jetson-agx-orin-64gb",
        "Raspberry Pi 5 Model B Rev 1.0": "raspberry-pi-5-8gb",
        "Raspberry Pi 4 Model B": "",
        "": "",
    }
    for board, name in boards.items():
        found = bundled_profile(board)
        assert (found.name if found else "") == name, board
    profile = profile_named("jetson-orin-nano-8gb")
    predicted = figures(profile.to_dict())
    assert predicted["memory_bandwidth"] == 68e9
    assert predicted["four_bit 16"] == 0.02768
    measured = {"memory_bandwidth": 51e9, "another": 1.0}
    assert beside(predicted, measured) == [
        ("memory_bandwidth", "predicted 68 GB/s, measured 51 GB/s: 0.75 times")
    ]
    assert figures({}) == {}


def test_an_owner_sees_the_prediction_first_and_has_a_profile_last(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On a board whose own figures are those of another one's profile."""
    pi = profile_named("raspberry-pi-5-8gb")
    own = structs.replace(profile_named("jetson-orin-nano-8gb"), name="measured")
    said: list[str] = []

    def measured(request: MeasureRequest, *_: object) -> Measured:
        said.append(capfd.readouterr().err)
        assert request.name == "measured"
        return Measured(own, "a model", {"int4": 1}, {"int4": {1: 0.5}}, ())

    monkeypatch.setattr(kit_file, "board_facts", lambda root: {"board": "Raspberry Pi 5 Model B"})
    monkeypatch.setattr(kit_file, "examine", lambda *_: [])
    monkeypatch.setattr(kernels, "usable_quantisations", lambda *_: {"none": "", "int4": ""})
    monkeypatch.setattr("edgespec.daemon.measure.measure", measured)
    monkeypatch.setattr(kit_file, "ring_here", lambda *_: 1 / 0)
    done = run_here(capfd, monkeypatch, "bench", "--kit", "--out", str(tmp_path))
    assert done.code == 0, done.err
    (before,) = said
    assert "predicted for this board, by raspberry-pi-5-8gb, before anything" in before
    assert ["memory_bandwidth", "17.1 GB/s"] in cells(before)
    assert ["four_bit 16", "404 ms a GB of weights"] in cells(before)
    beside = dict(row for row in cells(done.err) if len(row) == 2)
    assert beside["memory_bandwidth"] == "predicted 17.1 GB/s, measured 68 GB/s: 3.98 times"
    assert beside["ranking greedy million"].startswith("predicted 7.7 ms, measured ")
    content = json.loads((tmp_path / "edgespec-kit.json").read_text())
    assert content["exactness"] == {"failed": "ZeroDivisionError: division by zero"}
    assert content["predicted"]["raspberry-pi-5-8gb"]["four_bit 1"] == pi.four_bit.seconds["1"]
    file = tmp_path / "edgespec-profile.json"
    assert profile_named(str(file)) == own
    assert f"--devices {file}" in done.err


def cells(table: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]


def test_a_figure_that_was_assumed_is_not_called_measured() -> None:
    link = {"value": 0.1, "origin": "assumed, not measured: one switch"}
    assert figures({"link_latency": link, "noise": {"value": 2, "origin": "measured"}}) == {
        "noise": 2.0
    }


def test_what_fails_is_in_the_report() -> None:
    def lost() -> dict[str, object]:
        raise PeerLost("no answer")

    assert kit_file._tried(lost) == {"failed": "no answer"}


def test_addresses_paths_and_names_are_hidden_and_figures_are_not() -> None:
    kept = (
        *("reads 85 MB/s, 0.25 ms", "L4T R36.4.3", "2.13.0+cpu", "07:16:52", "CUDA 12.6", "1/2 Hz"),
        *("NVIDIA Jetson Orin Nano Developer Kit", "6 × Cortex-A78AE", "3:1", "and/or", "a.b.c"),
    )
    for text in kept:
        assert without_names(text, ["ada"]) == text
    hidden = {
        "at 192.168.1.17:7430, eth0": f"at {HIDDEN}:7430, eth0",
        "fe80::1%eth0 and 2001:db8::5": f"{HIDDEN} and {HIDDEN}",
        "mac 48:b0:2d:aa:bb:cc.": f"mac {HIDDEN}.",
        "in /home/ada/.cache/edgespec/blocks, 3 GiB": f"in {HIDDEN}, 3 GiB",
        "~/x and (/opt/a b": f"{HIDDEN} and ({HIDDEN} b",
        "Ada's board; ada-pi, Adamant": f"{HIDDEN}'s board; {HIDDEN}-pi, Adamant",
        "[::1]:7430": f"[{HIDDEN}]:7430",
    }
    for text, wanted in hidden.items():
        assert without_names(text, ["ada"]) == wanted, text
    nested = {"/home/ada": [{"x": ("ada", 5, None, True)}]}
    assert without_names(nested, ["ada"]) == {HIDDEN: [{"x": [HIDDEN, 5, None, True]}]}


def test_no_address_or_path_of_any_form_is_left() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        number = ".".join(str(rng.randrange(256)) for _ in range(4))
        long = ":".join(f"{rng.randrange(1, 65536):x}" for _ in range(8))
        path = "/" + "/".join(rng.choices(("home", "ada", ".cache", "a+b", "x.so"), k=3))
        for secret in (number, long, path):
            text = rng.choice(("{}", "at {}, now", "({})", "x {}: gone", "'{}'", "{} {}"))
            said = without_names(text.format(secret, secret), [])
            assert secret not in said, (text, secret, said)


def test_names_that_everybody_has_are_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit_file.socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(kit_file.getpass, "getuser", lambda: "root")
    monkeypatch.setattr(Path, "home", lambda: Path("/root"))
    assert own_names() == []
    monkeypatch.setattr(kit_file.socket, "gethostname", lambda: "pi-3.lan")
    assert own_names() == ["pi-3.lan", "pi-3"]


def test_power_and_heat_are_watched(tmp_path: Path) -> None:
    files = {
        "sys/class/hwmon/hwmon1/name": "ina3221",
        "sys/class/hwmon/hwmon1/in1_label": "VDD_IN",
        "sys/class/hwmon/hwmon1/in1_input": "5000",
        "sys/class/hwmon/hwmon1/curr1_input": "1600",
        "sys/class/hwmon/hwmon2/name": "battery",
        "sys/class/hwmon/hwmon2/power1_input": "2500000",
        "sys/class/hwmon/hwmon2/curr2_input": "broken",
        "sys/class/thermal/thermal_zone0/type": "cpu",
        "sys/class/thermal/thermal_zone0/temp": "40000",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert power(tmp_path) == {"VDD_IN": 8.0, "battery power1": 2.5}
    with Watch(tmp_path) as watch:
        (tmp_path / "sys/class/thermal/thermal_zone0/temp").write_text("90000")
    assert watch.as_json()["celsius"] == {
        "cpu": {"first": 40.0, "most": 90.0, "last": 90.0, "mean": 65.0}
    }
    assert watch.as_json()["watts"]["VDD_IN"]["mean"] == 8.0  # type: ignore[index]
    assert power(tmp_path / "none") == {}
