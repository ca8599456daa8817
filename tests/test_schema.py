"""Schema: every JSON file is a typed value, or one sentence that names file, place and remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, to_builtins

from edgespec.errors import ConfigError
from edgespec.schema import FileStruct, Text, as_type, json_text, parse_json, read_as

VERSION = ("version", 1)
REPOSITORY = Path(__file__).resolve().parent.parent


class Part(FileStruct, frozen=True):
    """An inner object."""

    size: Annotated[int, Meta(ge=1)]
    title: Text = "x"

    def __post_init__(self) -> None:
        if self.size == 13:
            raise ValueError(f"size is 13 in {self.title!r}, which nothing has")


class Whole(FileStruct, frozen=True):
    """What a file holds."""

    name: Text
    parts: tuple[Part, ...] = ()
    by_name: dict[str, Part] = {}  # noqa: RUF012  (msgspec copies it)
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.name == "refused":
            raise ConfigError("the name is refused")


GOOD = {
    "version": 1,
    "name": "n",
    "parts": [{"size": 1}, {"size": 2, "title": "t"}],
    "by_name": {"a": {"size": 3}, "b.c": {"size": 4}, "d": {"size": 5}},
    "rate": 2,
}


def read(content: object) -> Whole:
    """The content of a file."""
    return read_as(Whole, json.dumps(content), "x.json", "do this", VERSION)


def test_what_is_written_is_read() -> None:
    whole = read(GOOD)
    assert whole.parts[1] == Part(2, "t")
    assert list(whole.by_name) == ["a", "b.c", "d"]
    text = json_text(whole, VERSION)
    assert read_as(Whole, text.encode(), "x.json", "", VERSION) == whole
    assert list(json.loads(text)) == ["version", "name", "parts", "by_name", "rate"]


def test_a_mistake_is_told_with_file_place_value_and_remedy() -> None:
    for change, message in (
        ({"name": 3}, "name is 3; it must be a text"),
        ({"name": " "}, "name is ' '; it must be a text that is not empty"),
        ({"name": "refused"}, "the name is refused"),
        ({"rate": "fast"}, "rate is 'fast'; it must be a number or null"),
        ({"rate": True}, "rate is True; it must be a number or null"),
        ({"colour": 1}, "unknown key 'colour'; known: name, parts, by_name, rate"),
        ({"parts": {}}, "parts is {}; it must be a list"),
        ({"parts": [{"size": 1}, 4]}, "parts[1] is 4; it must be an object"),
        ({"parts": [{"size": 0}]}, "parts[0].size is 0; it must be a whole number >= 1"),
        ({"parts": [{"size": 13}]}, "parts[0]: size is 13 in 'x', which nothing has"),
        (
            {"parts": [{"size": 13, "title": " - at `$.y`"}]},
            "parts[0]: size is 13 in ' - at `$.y`'",
        ),
        ({"parts": [{}]}, "the key 'size' is missing in parts[0]"),
        ({"parts": [{"size": 1, "y": 2}]}, "unknown key 'y' in parts[0]"),
        ({"by_name": {"a": {"size": 1}, "b.c": 7, "d": 8}}, "by_name.b.c is 7; it must be an"),
        ({"by_name": {"a": {"size": 1}, "b.c": {"size": "2"}}}, "by_name.b.c.size is '2'; it"),
        ({"name": "n" * 10**5, "rate": []}, "rate is []; it must be a number or null"),
        ({"rate": "n" * 10**5}, "; it must be a number or null"),
    ):
        with pytest.raises(ConfigError) as refused:
            read({**GOOD, **change})
        told = str(refused.value)
        assert told.startswith("x.json: "), told
        assert message in told
        assert told.endswith("; do this")
        assert len(told) < 300


def test_no_pattern_of_a_type_takes_a_line_break_behind_its_end() -> None:
    """In Python, "$" matches before one too."""
    text = "".join(
        file.read_text(encoding="utf-8")
        for folder in ("edgespec", "daemon", "cli")
        for file in (REPOSITORY / folder).rglob("*.py")
    )
    patterns = re.findall(r'pattern=r?"(.*?)"', text)
    assert len(patterns) >= 5
    assert not [one for one in patterns if one.endswith("$")]


def test_the_version_comes_first() -> None:
    for version in (2, "1", None, True, [1]):
        with pytest.raises(ConfigError, match=r"x\.json has version .*reads version 1; use the"):
            read({"version": version, "colour": "red"})


def test_a_file_that_is_no_json_object_is_refused() -> None:
    for text, message in (
        (b"", "x.json is not JSON in UTF-8: "),
        (b"{", "x.json is not JSON in UTF-8: "),
        (b'"\xff"', "x.json is not JSON in UTF-8: "),
        (b"[" * 100_000, "x.json is not JSON in UTF-8: "),
        (b'{"rate": NaN}', "NaN is no number"),
        (b'{"a": 1, "b": 2, "a": 3}', "a key is there twice in ['a', 'b', 'a']"),
        (b"[1]", "x.json is [1]; it must be an object"),
    ):
        with pytest.raises(ConfigError) as refused:
            read_as(Whole, text, "x.json", "do this", VERSION)
        assert message in str(refused.value)
        assert str(refused.value).endswith("; do this")


def test_keys_with_defaults_may_be_required() -> None:
    with pytest.raises(ConfigError, match="the key 'parts' is missing; do this"):
        read_as(Whole, '{"version": 1, "name": "n"}', "x", "do this", VERSION, all_keys=True)


def test_a_refused_value_is_left_as_it_was() -> None:
    value = {"name": "n", "by_name": {"a": {"size": 1}, "b": {"size": 0}, "c": {"size": 1}}}
    before = json.dumps(value)
    with pytest.raises(ConfigError, match=r"by_name\.b\.size is 0"):
        as_type(Whole, value, "x")
    assert json.dumps(value) == before


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*GOOD, "size", "title", "a.b"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_value_is_read_or_refused_in_one_sentence(value: object) -> None:
    told, whole = "x: ", None
    try:
        whole = as_type(Whole, value, "x")
    except ConfigError as problem:
        told = str(problem)
    assert told.startswith("x: ")
    assert whole is None or as_type(Whole, to_builtins(whole), "x") == whole


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    told = "x is not JSON in UTF-8: "
    try:
        parse_json(raw, "x")
    except ConfigError as problem:
        told = str(problem)
    assert told.startswith("x is not JSON in UTF-8: ")


@pytest.mark.parametrize("text", ['{"version": 1, "name": 3, "\\ud800": 1}', '{"a - at `$.x`": 1}'])
def test_odd_keys_are_refused_like_others(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        as_type(Whole, parse_json(text, "here", ""), "here")


def test_half_a_character_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^here: "):
        as_type(Whole, {"name": "n", "rate": "\ud800"}, "here")
