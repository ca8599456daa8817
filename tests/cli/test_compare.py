"""What `edgespec demo --compare` says of two answers, and what it does not compare."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.commands import run_here

from edgespec.cli.compare import Comparison
from edgespec.daemon.bundled_models import bundled
from edgespec.wire.client_messages import Finished

PLAIN = Finished(
    *(1, "abc", (5, 6, 7, 8), "stop", "autoregressive", "none", 3, 9, 4, 2.0, 0.5, 4.0, ()),
    *(4, 0, 0, 0.25),
)
USUAL = replace(PLAIN, policy="adaptive", seconds=0.8, smallest_margin=0.002)


def test_one_line_says_how_many_times_as_fast_it_is_and_whether_the_text_is_the_same() -> None:
    same = "plain 2.0 tok/s, edgespec 5.0 tok/s: 2.5 times as fast, same text"
    assert Comparison(PLAIN, USUAL).summary("float32") == same
    slower = Comparison(USUAL, PLAIN)
    assert "edgespec 2.0 tok/s: 0.4 times as fast" in slower.summary("float32")


@pytest.mark.parametrize(("tokens", "at"), [((5, 6, 9, 8), 3), ((5, 6), 3)])
def test_another_text_is_said(tokens: tuple[int, ...], at: int) -> None:
    compared = Comparison(PLAIN, replace(USUAL, token_ids=tokens))
    assert compared.figures()["same_text"] is False
    said = compared.summary("bfloat16")
    assert "same text" not in said
    assert f"the texts differ from token {at} on: rounding in bfloat16 may" in said
    assert "(the closest was 0.002)" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--draft", "none"), "--compare needs a draft source"),
        (("--draft", "ngram", "--policy", "autoregressive"), "compares nothing"),
    ],
)
def test_plain_decoding_is_not_compared_with_itself(
    options: tuple[str, ...],
    words: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    demo = ("demo", "--compare", "--model", bundled("base"), *options)
    run_here(capfd, monkeypatch, *demo).assert_refused(words)
