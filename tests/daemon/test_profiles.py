"""Reading profiles: the shipped ones by name, any by path, and where their figures come from."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from edgespec.daemon.profiles import profile_named, profile_names, unproven
from edgespec.errors import ConfigError
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import ring_costs
from edgespec.planning.profile import KERNELS, Profile

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SHIPPED = [
    "jetson-agx-orin-64gb",
    "jetson-orin-nano-8gb",
    "jetson-orin-nano-super-8gb",
    "jetson-orin-nx-16gb",
    "jetson-thor-t5000-128gb",
    "paper-flowspec-7b",
    "paper-specpipe-70b",
    "raspberry-pi-5-8gb",
]


Estimate = Callable[..., str]


@pytest.fixture(scope="module")
def script() -> Callable[[], None]:
    """That which makes the profiles, each of them once: to fit one takes a while."""
    names = runpy.run_path(str(REPOSITORY / "tools" / "estimate_profiles.py"))
    estimated, made = names["estimated"], dict[str, Profile]()

    def once(board: Any) -> Profile:
        if board.name not in made:
            made[board.name] = estimated(board)
        return made[board.name]

    main: Any = names["main"]
    main.__globals__["estimated"] = once
    return main


@pytest.fixture
def estimate(
    script: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Estimate:
    """What it prints."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["estimate_profiles.py", *arguments])
        script()
        return capsys.readouterr().out

    return run


def test_the_shipped_profiles() -> None:
    assert profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_profile_says_where_each_figure_comes_from(name: str) -> None:
    profile = profile_named(name)
    assert profile.name == name
    for key, entry in profile.to_dict().items():
        if isinstance(entry, dict):
            assert len(entry["origin"]) > 20, f"{name}: {key}"
    model = cost_model_named(profile.cost_model or "llama-2-13b")
    ring_costs([profile] * 5, model)  # a quarter of it fits


def test_the_files_are_what_the_script_estimates(estimate: Estimate, tmp_path: Path) -> None:
    estimate(str(tmp_path))
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    shipped = {
        path.name: path.read_text(encoding="utf-8")
        for path in (REPOSITORY / "profiles").glob("*.json")
    }
    assert made == shipped, "run tools/estimate_profiles.py"


def test_the_table_of_block_times_is_up_to_date(estimate: Estimate) -> None:
    readme = (REPOSITORY / "profiles" / "README.md").read_text(encoding="utf-8")
    assert estimate("--table") in readme, "put the table that the script prints there"


def test_a_profile_of_ones_own_is_read_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = profile_named(SHIPPED[0]).to_dict()
    for name in ("mine.json", "mine"):
        (tmp_path / name).write_text(json.dumps({**data, "name": "mine"}), encoding="utf-8")
        assert profile_named(str(tmp_path / name)).name == "mine"
    monkeypatch.chdir(tmp_path)
    assert profile_named("mine.json").name == "mine"
    assert profile_named("./mine").name == "mine"


@pytest.mark.parametrize("name", ["jetson", "", "README.md", "..", "mine"])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=f"choose one of: {', '.join(SHIPPED)}; or give the path"):
        profile_named(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON in UTF-8"),
        (b"", "is not JSON in UTF-8"),
        (b'"\xff"', "is not JSON in UTF-8"),
        (b"[" * 100_000, "is not JSON in UTF-8"),
        (b"[]", r"bad\.json is .*; it must be an object"),
        (b'{"format": 3}', r"bad\.json has format 3"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        profile_named(str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the profile .*none\.json: No such file"):
        profile_named(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"cannot read the profile .*: Is a directory"):
        profile_named(f"{tmp_path}/")


def test_a_profile_of_other_kernels_than_run_there_now_is_named() -> None:
    estimate = profile_named("jetson-orin-nano-8gb")
    timed = {"quantisation": "int4", "quantisations": {"int4": estimate.four_bit}}
    mine = structs.replace(estimate, name="mine", **timed)
    for overlaps, runs in ((True, "triton"), (False, "compiled")):
        for kernels, said in (("", "does not name"), *KERNELS.items()):
            made = structs.replace(mine, launches_ahead=overlaps, kernels=kernels)
            told = list(unproven([made]))
            assert len(told) == (kernels != runs)
            assert all(said in line and KERNELS[runs] in line for line in told)
    with pytest.raises(ConfigError, match="kernels is 'mine'; known ones: triton, compiled, torch"):
        Profile.from_dict({**estimate.to_dict(), "kernels": "mine"}, "mine.json")
