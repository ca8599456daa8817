"""Reference, results and decisions stay apart, and stay short.

`docs/*.md` say how things are, `docs/results/` what was measured, `docs/decisions/` why. A word is
what stands between blanks and has a letter or a digit; what tools/commands_page.py generates is
not counted.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
REFERENCE = sorted(DOCS.glob("*.md"))
RESULTS = sorted((DOCS / "results").glob("*.md"))
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
WORDS_OF_A_PAGE = 1_500
WORDS_OF_THE_REFERENCE = 45_000
WORDS_OF_A_DECISION = 300
ENTRIES_OF_A_RELEASE = 30
WORDS_OF_AN_ENTRY = 60
GENERATED = re.compile(r"<!-- [a-z][a-z ]+ -->\n.*?<!-- end -->", re.DOTALL)
OF_RESULTS = re.compile(r"not\s+reached|earlier\s+than\s+\d|\bgoals?\b", re.IGNORECASE)
PARTS = ["What", "Why", "Other ways", "What follows"]


def words(page: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in GENERATED.sub("", page).split())


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: str(path.stem))
def test_a_page_is_read_in_five_minutes_and_tells_no_results(path: Path) -> None:
    page = read(path)
    assert words(page) <= WORDS_OF_A_PAGE
    assert OF_RESULTS.findall(page) == []


def test_the_reference_is_short() -> None:
    assert sum(words(read(path)) for path in REFERENCE) <= WORDS_OF_THE_REFERENCE


def test_there_are_results_and_they_keep_their_marks() -> None:
    assert OF_RESULTS.search("".join(map(read, RESULTS)))


def test_decisions_are_numbered_short_and_whole() -> None:
    assert len(DECISIONS) >= 10
    assert [int(path.name[:2]) for path in DECISIONS] == [*range(1, len(DECISIONS) + 1)]
    for path in DECISIONS:
        page = read(path)
        assert page.startswith(f"# {int(path.name[:2])}. "), path.name
        assert re.findall(r"^\*\*([^*]+)\.\*\*", page, re.MULTILINE) == PARTS, path.name
        assert words(page) <= WORDS_OF_A_DECISION, path.name


def test_a_release_is_told_in_words_of_a_user() -> None:
    releases = read(DOCS.parent / "CHANGELOG.md").split("\n## ")[1:]
    for release in releases:
        entries = re.split(r"^- ", release, flags=re.MULTILINE)[1:]
        assert len(entries) <= ENTRIES_OF_A_RELEASE, release.partition("\n")[0]
        assert [entry for entry in entries if words(entry) > WORDS_OF_AN_ENTRY] == []


def test_words_are_counted_without_rules_and_generated_parts() -> None:
    assert words("| a | `b c` |\n| --- | --- |\n<!-- shared options -->\nd\n<!-- end -->\ne.") == 4


def test_a_missed_goal_is_found() -> None:
    assert OF_RESULTS.search("The goal of 2 is")
    assert OF_RESULTS.search("1.3: **not\nreached**")
    assert not OF_RESULTS.search("that cannot be reached earlier than this")
