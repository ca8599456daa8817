"""The stop scanner gives the same text however it is cut, and never shows part of a stop string."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.errors import ConfigError
from edgespec.verify.stops import StopScanner

letters = st.text(alphabet="ab", max_size=40)
stop_strings = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=4).map(tuple)
cuts = st.lists(st.integers(0, 40), max_size=10)


def pieces(text: str, borders: list[int]) -> list[str]:
    """The text cut at these places; some pieces may be empty."""
    edges = [0, *sorted(min(border, len(text)) for border in borders), len(text)]
    return [text[left:right] for left, right in itertools.pairwise(edges)]


def first_completed(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop string that ends first begins; of several ending there, the earliest."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return min(found)[1] if found else None


def scan(parts: list[str], stops: tuple[str, ...]) -> tuple[str, bool]:
    """All the text that a scanner lets through, and whether it stopped."""
    scanner = StopScanner(stops)
    shown, stopped = "", False
    for part in parts:
        more, stopped_now = scanner.push(part)
        assert not (stopped and (more or not stopped_now))
        shown, stopped = shown + more, stopped_now
        assert scanner.stopped == stopped
    return shown + scanner.flush(), stopped


@given(letters, stop_strings, cuts)
def test_equals_a_search_of_the_whole_text(
    text: str, stops: tuple[str, ...], borders: list[int]
) -> None:
    where = first_completed(text, stops)
    expected = (text, False) if where is None else (text[:where], True)
    assert scan(pieces(text, borders), stops) == expected
    assert scan(list(text), stops) == expected


@given(letters, st.text(alphabet="ab", min_size=1, max_size=6), cuts)
def test_one_stop_string_is_found_where_str_find_finds_it(
    text: str, stop: str, borders: list[int]
) -> None:
    where = text.find(stop)
    expected = (text, False) if where < 0 else (text[:where], True)
    assert scan(pieces(text, borders), (stop,)) == expected


@given(letters, stop_strings, cuts)
def test_holds_back_no_more_and_no_less_than_it_must(
    text: str, stops: tuple[str, ...], borders: list[int]
) -> None:
    scanner, read, shown = StopScanner(stops), "", ""
    for part in pieces(text, borders):
        more, stopped = scanner.push(part)
        read, shown = read + part, shown + more
        if stopped:
            break
        held = max(
            (
                size
                for stop in stops
                for size in range(1, min(len(stop), len(read) + 1))
                if read.endswith(stop[:size])
            ),
            default=0,
        )
        assert shown == read[: len(read) - held]


def words(size: int) -> list[str]:
    return ["".join(letters) for letters in itertools.product("ab", repeat=size)]


def test_every_short_case() -> None:
    short = [word for size in (1, 2, 3) for word in words(size)]
    cases: list[tuple[tuple[str, ...], list[str]]] = [
        ((stop,), words(9)) for stop in short + words(4)
    ]
    cases += [(pair, words(6)) for pair in itertools.combinations(short, 2)]
    for stops, texts in cases:
        for text in texts:
            where = first_completed(text, stops)
            expected = (text, False) if where is None else (text[:where], True)
            assert scan([text], stops) == expected, (text, stops)


def test_examples() -> None:
    scanner = StopScanner(("\nUser:", "###"))
    assert scanner.push("Hello.\nUs") == ("Hello.", False)
    assert scanner.push("eful #") == ("\nUseful ", False)
    assert scanner.push("##tail") == ("", True)
    assert scanner.push("more") == ("", True)
    assert scanner.flush() == ""
    assert scanner.stopped


def test_an_inner_stop_string_that_ends_first_wins() -> None:
    for parts in (["xabcd"], list("xabcd"), ["xab", "cd"]):
        assert scan(parts, ("abcd", "bc")) == ("xa", True)
    assert scan(["xabc"], ("bc", "abc")) == ("x", True)
    assert scan(["xaba"], ("aba", "ab")) == ("x", True)


def test_flush_gives_back_what_was_held_and_starts_afresh() -> None:
    scanner = StopScanner(("END",))
    assert scanner.push("the EN") == ("the ", False)
    assert scanner.flush() == "EN"
    assert scanner.flush() == ""
    assert scanner.push("D") == ("D", False)


def test_no_stop_strings_let_everything_through_at_once() -> None:
    scanner = StopScanner()
    assert scanner.push("text") == ("text", False)
    assert scanner.push("") == ("", False)
    assert scanner.flush() == ""


def test_code_points_beyond_ascii() -> None:
    assert scan(["née 🙂", "🛑 ", "x"], ("🛑",)) == ("née 🙂", True)
    assert scan(["a🙂", "🙂b"], ("🙂🙂🙂",)) == ("a🙂🙂b", False)


def test_a_long_self_similar_stop_string_stays_cheap() -> None:
    stop = "a" * 20_000 + "b"
    scanner = StopScanner((stop,))
    shown = ""
    for _ in range(10):
        shown += scanner.push("a" * 10_000)[0]
    assert len(shown) == 80_000
    assert scanner.push("b") == ("", True)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        (("ok", ""), r"stop\[1\] is empty"),
        ((7,), r"stop\[0\] must be a string, not int"),
        ((None,), r"stop\[0\] must be a string, not NoneType"),
        ((b"x",), r"stop\[0\] must be a string, not bytes"),
        ("bare", "must be a list of strings"),
    ],
)
def test_refuses_unusable_stop_strings(stops: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StopScanner(stops)
