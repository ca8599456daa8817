"""Notes for the person at the terminal: shown as they are, and never on standard output."""

from __future__ import annotations

import pytest

from edgespec.cli.answering import show
from edgespec.cli.notes import Notes
from edgespec.wire.messages import Finished, Progress, Tokens

EVIL = "stage 1: [/bold] [red]board :smile: loading 1 of 2 layers"
END = Finished(1, "héllo", (1, 2), "stop", "p", "d", 2, 3, 2, 1.0, 0.5, 2.0, (1, 1), 4, 3, 1, 0.25)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_an_answer_with_notes_that_look_like_markup(
    is_terminal: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    answer = [Progress(1, EVIL), Tokens(1, (1,), "hé"), Tokens(1, (2,), "llo"), END]
    show(answer, False, Notes())
    out, err = capfd.readouterr()
    assert out == "héllo\n"
    assert "2.0 tokens/s" in err
    if not is_terminal:
        assert EVIL in err


def test_where_there_is_no_terminal_progress_is_a_line_now_and_then(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with Notes().waiting("loading") as update:
        for number in range(1000):
            update(f"{number} of 1000")
        update("")
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == ["0 of 1000"]
