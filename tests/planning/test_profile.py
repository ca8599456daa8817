"""Profiles: what a file says comes back, a mistake is named, and more rows never cost less."""

from __future__ import annotations

import copy
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ConfigError
from edgespec.planning.profile import ROWS, Profile, RowTable


def fresh() -> dict[str, Any]:
    """A valid file's data."""

    def figure(value: float) -> dict[str, Any]:
        return {"value": value, "origin": "made up"}

    def table(unit: float) -> dict[str, Any]:
        return {"seconds": {str(rows): unit * rows for rows in ROWS}, "origin": "made up"}

    def logits(unit: float) -> dict[str, Any]:
        ways = ("greedy", "sampled", "filtered")
        times = {way: {"call": unit, "million": unit * n} for n, way in enumerate(ways)}
        return {**times, "origin": "made up"}

    return {
        "format": 2,
        "name": "board",
        "title": "A board",
        "memory_bytes": figure(8 * 10**9),
        "memory_bandwidth": figure(6.8e10),
        "four_bit": table(0.01),
        "sixteen_bit": table(0.005),
        "layer_seconds": figure(0),
        "launch_seconds": figure(0),
        "launches_ahead": False,
        "choosing": logits(0.001),
        "ranking": logits(0.002),
        "noise": figure(0.01),
        "copy_bandwidth": figure(1e10),
        "link_latency": figure(0.0),
        "link_bandwidth": figure(1e8),
    }


def changed(path: str, value: object) -> dict[str, Any]:
    """A valid file's data but for one value."""
    data = fresh()
    set_at(data, path, value)
    return data


def set_at(data: dict[str, Any], path: str, value: object) -> None:
    """Change one value."""
    *folders, last = path.split(".")
    for key in folders:
        data = data[key]
    data[last] = value


def test_a_profile_comes_back_as_it_was() -> None:
    data = fresh()
    profile = Profile.from_dict(copy.deepcopy(data), "board.json")
    assert profile.cost_model == ""
    assert list(profile.four_bit.seconds.values()) == [0.01 * rows for rows in ROWS]
    assert profile.to_dict() == {**data, "cost_model": ""}
    again = json.loads(json.dumps(profile.to_dict()))
    assert Profile.from_dict(again, "board.json") == profile
    assert Profile.from_dict(changed("cost_model", "llama-2-7b"), "x").cost_model == "llama-2-7b"


FIGURES = (
    "memory_bytes",
    "memory_bandwidth",
    "copy_bandwidth",
    "link_bandwidth",
    "layer_seconds",
    "launch_seconds",
    "noise",
    "link_latency",
)
NUMBERS = [
    *(f"{key}.value" for key in FIGURES),
    *("four_bit.seconds.1", "sixteen_bit.seconds.64"),
    *("choosing.greedy.call", "ranking.filtered.million"),
]


BAD_NUMBERS = [-1, -0.5, math.nan, math.inf, 10**400, True, "8", None, [1], {"value": 1}]


def refused(data: object, message: str) -> None:
    """The file is refused with this message, which names it."""
    with pytest.raises(ConfigError, match=rf"^board\.json(: | is | has ){message}"):
        Profile.from_dict(data, "board.json")


def test_a_value_that_is_no_fit_number_is_refused() -> None:
    for path, value in itertools.product(NUMBERS, BAD_NUMBERS):
        refused(changed(path, value), f"{path} is .*number")


def test_what_is_divided_by_is_not_zero() -> None:
    for path in NUMBERS:
        if path.split(".")[0] not in (*FIGURES[4:], "choosing", "ranking"):
            refused(changed(path, 0), f"{path} is 0(.0)?; it must be a number > 0")


def test_an_empty_text_is_refused() -> None:
    origins = [f"{key}.origin" for key in (*FIGURES, "four_bit", "sixteen_bit", "ranking")]
    for path, value in itertools.product(["name", "title", *origins], ["", "  ", 3, None]):
        refused(changed(path, value), f"{path} is .*; it must be a text")
    refused(changed("name", " "), "name is ' '; it must be a text that is not empty; profiles/REA")


def test_a_missing_key_is_named() -> None:
    for key in fresh():
        data = fresh()
        del data[key]
        what = "format None" if key == "format" else f"the key '{key}' is missing; profiles"
        refused(data, what)


def test_any_other_mistake_is_named() -> None:
    for path, value, message in (
        ("memory", 3, "unknown key 'memory'; known: name, title"),
        ("link_latency.unit", "s", "unknown key 'unit' in link_latency"),
        ("four_bit.seconds.3", 1, "four_bit: seconds has unknown keys: '3'"),
        ("four_bit.seconds", {"1": 1}, "four_bit: seconds lacks the keys 2, 4, 8"),
        ("four_bit", 0.02, "four_bit is 0.02; it must be an object"),
        ("four_bit.seconds", [1, 2], r"four_bit\.seconds is \[1, 2\]; it must be an object"),
        ("link_latency", {"value": 1}, "the key 'origin' is missing in link_latency"),
        ("cost_model", 7, "cost_model is 7"),
        ("launches_ahead", 1, "launches_ahead is 1; it must be true or false"),
        ("choosing.greedy.row", 1, "unknown key 'row' in choosing.greedy"),
        (
            "format",
            1,
            "format 1, and this edgespec reads format 2; measure it again with ",
        ),
        ("format", "1", "format '1'"),
        ("four_bit.seconds.16", 0.07, r"four_bit: seconds\.16 is 0\.07, less than for fewer rows"),
    ):
        refused(changed(path, value), message)
    for data in (None, [], "profile", 1):
        refused(data, ".*; it must be an object")


def test_between_the_entries_it_is_linear_and_beyond_them_the_slope_goes_on() -> None:
    table = RowTable.of((1.0, 1.0, 2.0, 4.0, 4.0, 20.0, 36.0), "made up")
    assert [table.at(rows) for rows in ROWS] == list(table.seconds.values())
    assert table.at(3) == 1.5
    assert table.at(7) == 3.5
    assert table.at(24) == 12.0
    assert table.at(65) == 36.5
    assert table.at(256) == 36.0 + 192 * 0.5


@given(
    st.lists(st.floats(1e-6, 10.0), min_size=len(ROWS), max_size=len(ROWS)).map(sorted),
    st.integers(1, 300),
    st.integers(0, 300),
)
def test_more_rows_never_take_less(seconds: list[float], rows: int, more: int) -> None:
    table = RowTable.of(seconds, "made up")
    assert table.at(rows) <= table.at(rows + more)


TABLE = {"seconds": {str(rows): 0.02 * rows for rows in ROWS}, "origin": "made up"}


def measured() -> dict[str, Any]:
    """What a device's own profile has on top."""
    return {
        **fresh(),
        "cost_model": "",
        "quantisation": "int4",
        "quantisations": {"int4": copy.deepcopy(TABLE), "int8": copy.deepcopy(TABLE)},
        "unusable": {"nf4": "not installed"},
        "board": {"CPU": "6 × Cortex-A78AE"},
    }


def test_what_only_a_device_can_tell_comes_back_too() -> None:
    data = measured()
    profile = Profile.from_dict(copy.deepcopy(data), "board.json")
    assert profile.quantisations["int8"].at(3) == pytest.approx(0.06)
    assert (profile.quantisation, profile.unusable) == ("int4", {"nf4": "not installed"})
    assert profile.to_dict() == data
    assert hash(profile) == hash(Profile.from_dict(measured(), "other.json"))


def test_each_of_these_keys_may_be_missing() -> None:
    for key in measured().keys() - fresh().keys():
        data = measured()
        del data[key]
        if key == "quantisations":
            del data["quantisation"]
        again = Profile.from_dict(data, "x").to_dict()
        assert again == {**data, "cost_model": ""}, key


def test_a_mistake_in_these_is_named() -> None:
    for path, value, message in (
        ("quantisations.none", TABLE, "quantisations has unknown keys: 'none'; known ones: int8"),
        ("quantisations.int5", TABLE, "quantisations has unknown keys: 'int5'"),
        ("quantisations.int4", 1, r"quantisations\.int4 is 1; it must be an object"),
        ("quantisations.int4.seconds.8", 0, r"quantisations\.int4\.seconds\.8 is 0"),
        ("quantisations.int4.origin", "", r"quantisations\.int4\.origin is ''"),
        ("quantisations.int8.origin", "", r"quantisations\.int8\.origin is ''"),
        ("quantisations", [], "quantisations is .*; it must be an object"),
        ("quantisation", "nf4", "quantisation is 'nf4', which has no table of its own"),
        ("quantisation", 4, "quantisation is 4"),
        ("unusable.fp4", "x", "unusable has unknown keys: 'fp4'"),
        ("unusable.nf4", "", r"unusable\.nf4 is ''"),
        ("board", ["x"], "board is .*; it must be an object"),
        ("board.CPU", 6, r"board\.CPU is 6"),
    ):
        data = measured()
        set_at(data, path, value)
        refused(data, message)
