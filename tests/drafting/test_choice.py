"""What --draft may say, and that what is chosen can be built."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import HEAD_ON_COORDINATOR, HEAD_ON_LAST_STAGE
from edgespec.drafting.choice import (
    DEFAULT_MEMBERS,
    SOURCES,
    DraftChoice,
    SourceChoice,
    parse_draft,
)
from edgespec.drafting.registry import BUILDERS
from edgespec.errors import ConfigError


def bundled(part: str) -> str:
    """Where the tests say that bundled weights are."""
    return f"/models/{part}"


NGRAM = SourceChoice("ngram", "")


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("none", ()),
        ("ngram", (NGRAM,)),
        ("my/draft", (SourceChoice("independent", "my/draft"),)),
        ("ORG/NAME", (SourceChoice("independent", "ORG/NAME"),)),
        ("./ngram", (SourceChoice("independent", "./ngram"),)),
        ("independent:a:b+c", (SourceChoice("independent", "a:b+c"),)),
        ("hybrid:ngram+independent:d", (NGRAM, SourceChoice("independent", "d"))),
        ("hybrid:independent:a+b+ngram", (SourceChoice("independent", "a+b"), NGRAM)),
    ],
)
def test_what_needs_nothing_bundled(text: str, members: tuple[SourceChoice, ...]) -> None:
    for where in (None, bundled):
        assert parse_draft(text, where).members == members


def test_the_bundled_base_finds_its_weights() -> None:
    independent = SourceChoice("independent", "/models/draft")
    assert parse_draft("", bundled).members == (independent,)
    assert parse_draft("independent", bundled).members == (independent,)
    assert parse_draft("hybrid:independent+ngram", bundled).members == (independent, NGRAM)
    whole = parse_draft("hybrid", bundled)
    assert tuple(member.name for member in whole.members) == DEFAULT_MEMBERS
    assert whole.folders == ("/models/draft",)


def test_without_a_base_model_of_ours_nothing_said_is_no_draft() -> None:
    assert parse_draft("") == DraftChoice()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("independent", "Give independent:FOLDER"),
        ("independent:", "Give independent:FOLDER"),
        ("hybrid", "Give independent:FOLDER"),
        ("ngram:folder", "ngram has no weights"),
        ("hybrid:ngram", "two or more different members"),
        ("hybrid:ngram+ngram", "two or more different members"),
        ("hybrid:", "weights"),
        ("hybrid:independent:a+dspark:b", "asks one model, and independent and dspark are 2"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_draft(text)


@pytest.mark.parametrize("name", SOURCES)
def test_what_guesses_from_hidden_rows_needs_the_head_on_the_coordinator(name: str) -> None:
    one = SourceChoice(name, "folder" if SOURCES[name] else "")
    choice = DraftChoice((SourceChoice("ngram", ""), one))
    choice.check_head(HEAD_ON_COORDINATOR)
    if name in ("eagle", "eagle3", "dspark", "mtp", "ppd"):
        with pytest.raises(ConfigError, match=rf"{name} guesses .*--head coordinator"):
            choice.check_head(HEAD_ON_LAST_STAGE)
    else:
        choice.check_head(HEAD_ON_LAST_STAGE)


FOLDERS = st.text("ab+:/", min_size=1, max_size=8)
MEMBERS = st.sampled_from(sorted(SOURCES)).flatmap(
    lambda name: st.builds(SourceChoice, st.just(name), FOLDERS if SOURCES[name] else st.just(""))
)


@given(st.lists(MEMBERS, max_size=1), st.booleans())
def test_its_text_says_the_same_again(members: list[SourceChoice], with_grams: bool) -> None:
    if with_grams and NGRAM not in members:
        members = [NGRAM, *members]
    choice = DraftChoice(tuple(members))
    assert parse_draft(str(choice)) == choice


def test_every_source_can_be_built() -> None:
    assert set(BUILDERS) == set(SOURCES)
