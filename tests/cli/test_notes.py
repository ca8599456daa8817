"""Notes for the person at the terminal: shown as they are, and never on standard output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.nodes import until
from support.terminals import Terminal

from edgespec.cli.answer_view import AnswerView
from edgespec.cli.answering import cancelling, show
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.types.shown import BIDI
from edgespec.wire.client_messages import Finished, Progress, Tokens

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
    assert "2 tokens, 2.0 tokens a second" in err
    if not is_terminal:
        assert EVIL in err


def test_a_note_that_went_away_comes_again(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text may be in a file while the person looks at standard error."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    answer = [Tokens(1, (1,), "hé"), Progress(1, "the ring is lost"), Tokens(1, (2,), "llo"), END]
    show(answer, False, Notes())
    out, err = capfd.readouterr()
    assert out == "héllo\n"
    assert "the ring is lost" in err


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


def test_the_time_left_is_by_what_is_done() -> None:
    now = 100.0
    left = TimeLeft(lambda: now)
    assert left(1, 41) == ""  # how long loading took says nothing
    now = 130.0
    assert left(11, 41) == ", about 90 s left"
    assert left(2, 42) == ", about 20 min left"
    assert left(41, 41) == ""


# --- on a terminal --------------------------------------------------------------------------------

ROWS, COLUMNS = 6, 30
LOST = "stage 2 (board) is lost; waiting for it, which may take a while"

Streamed = list[Progress | Tokens | Finished]


def streamed(*pieces: str | None) -> Streamed:
    """An answer of these texts; None: the ring is lost in between."""
    told: Streamed = [
        Progress(1, LOST) if piece is None else Tokens(1, (1, 2), piece) for piece in pieces
    ]
    return [*told, END]


def test_a_pause_within_the_text_is_shown_below_it_and_goes_away() -> None:
    seen: list[str] = []
    with Terminal(ROWS, COLUMNS) as terminal:

        def answer() -> Iterator[Progress | Tokens | Finished]:
            for message in streamed("one ", None, None, "two", None):
                yield message
                seen.append(terminal.text)

        AnswerView(Notes()).follow(answer())
        text = terminal.text
    assert "stage 2" not in seen[0]
    assert seen[1].endswith("\0337\033[B\r\033[2Kstage 2 (board) is lost; wait\0338"), "not wider"
    assert seen[3].endswith("\0337\033[B\r\033[2K\0338two"), "gone before the text goes on"
    assert text.endswith("\0337\033[B\r\033[2K\0338\r\n"), "and at its end"


def test_what_a_model_writes_cannot_change_the_terminal() -> None:
    with Terminal() as terminal:
        view = AnswerView(Notes())
        view.follow(iter(streamed("a\033]0;evil\ab", "\x9b2J\tc\r\n")))
        text = terminal.text
    assert "a\ufffd]0;evil\ufffdb\ufffd2J" in text
    assert view.text == "a\033]0;evil\ab\x9b2J\tc\r\n", "the answer itself is what it is"


def test_what_turns_the_order_of_characters_is_an_escape_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    marks = "".join(map(chr, BIDI))
    AnswerView(Notes()).follow(iter(streamed(f"rm \u202egpj.x{marks}")))
    assert capsys.readouterr().out == f"rm \u202egpj.x{marks}\n"
    with Terminal(columns=300) as terminal:
        AnswerView(Notes()).follow(iter(streamed(f"rm \u202egpj.x{marks}")))
        text = terminal.text
    assert r"rm \u202egpj.x\u061c\u200e" in text
    assert not set(marks) & set(text)


def test_a_ctrl_c_during_an_answer_writes_nothing_into_it() -> None:
    with Terminal() as terminal:
        with cancelling(object()):  # type: ignore[arg-type]
            terminal.type("\x03")
            until(lambda: "\x03" in terminal.raw)  # as it is, which no terminal shows
            assert "^C" not in terminal.raw
        assert terminal.is_as_before()


@pytest.mark.parametrize("plain", [("NO_COLOR", "1"), ("TERM", "dumb"), None])
def test_the_colours_of_runs(plain: tuple[str, str] | None) -> None:
    with Terminal() as terminal:
        if plain is not None:
            terminal.set(*plain)
        show(streamed("one", " two", "", " four"), False, Notes(), speculation=True)
        raw = terminal.raw
    if plain is not None:
        assert "one two four" in raw.replace("\r", "")
        assert "\033[32m" not in raw
        assert "change with each result" not in raw
    else:
        text = raw.replace("\033[0m", "")
        assert "\033[35mone\033[32m two\033[32m four" in text, "the third gave no text yet"
        assert "4 of them, 2.00 tokens each" in raw


def test_a_thought_is_dim_on_a_terminal_and_as_it_is_elsewhere(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said = ("<thi", "nk>\nIt is noon?", "\n</thi", "nk>\n\nNoon", ".")
    with Terminal() as terminal:
        view = AnswerView(Notes())
        view.follow(iter(streamed(*said)))
        raw = terminal.raw.replace("\r", "")
    assert "\033[2mIt is noon?\033[0m\n\nNoon.\n" in raw
    assert view.text == "".join(said), "the answer itself is what it is"
    AnswerView(Notes()).follow(iter(streamed(*said)))
    assert capfd.readouterr().out == "".join(said) + "\n"


def test_without_a_terminal_there_are_no_colours(capfd: pytest.CaptureFixture[str]) -> None:
    show(streamed("one", " two"), False, Notes(), speculation=True)
    out, err = capfd.readouterr()
    assert out == "one two\n"
    assert "\033" not in err
    assert "change with each result" not in err


IN_TMUX = """
import sys
from edgespec.cli.answer_view import AnswerView
from edgespec.cli.notes import Notes, TimeLeft
from edgespec.wire.client_messages import (Finished, Progress, Tokens)
end = Finished(1, "", (1,), "stop", "p", "d", 2, 3, 2, 1.0, 0.5, 2.0, (1, 1), 4, 3, 1, 0.25)
why = Progress(1, "the ring is lost " * 9)
print("above\\n" * 9, end="")
for length in LENGTHS:
    cut = [Tokens(1, (1,), "x" * length), why, why, Tokens(1, (1,), "y" * (COLUMNS + 1))]
    AnswerView(Notes()).follow(iter([*cut, end]))
AnswerView(Notes()).follow(iter([Tokens(1, (1,), "z"), why, end]))
print("done")
input()
"""


def test_the_text_is_whole_on_a_real_screen_wherever_the_pause_is(tmp_path: Path) -> None:
    """At the last line, and at the last column, too: a terminal keeps those in its own way."""
    tmux = shutil.which("tmux")
    if tmux is None:
        assert not os.environ.get("CI"), "tmux is missing, which CI installs"
        pytest.skip("there is no tmux here")
    lengths = (3, COLUMNS - 1, COLUMNS, COLUMNS + 1, 2 * COLUMNS)
    script = tmp_path / "script.py"
    script.write_text(f"LENGTHS, COLUMNS = {lengths}, {COLUMNS}\n{IN_TMUX}")
    command = [tmux, "-f", "/dev/null", "-S", str(tmp_path / "socket")]

    def screen() -> str:
        shot = [*command, "capture-pane", "-p", "-S", "-"]
        return subprocess.run(shot, capture_output=True, text=True, check=True).stdout

    size = ["-x", str(COLUMNS), "-y", str(ROWS)]
    start = [*command, "new-session", "-d", *size, sys.executable, str(script)]
    subprocess.run(start, check=True)
    try:
        until(lambda: "done" in screen())
        shown = screen()
    finally:
        subprocess.run([*command, "kill-server"], check=True)
    expected: list[str] = ["above"] * 9
    for length in lengths:
        text = "x" * length + "y" * (COLUMNS + 1)
        expected += [text[at : at + COLUMNS] for at in range(0, len(text), COLUMNS)]
    assert shown.split() == [*expected, "z", "done"]
