"""What a chat keeps: its turns, what of them the model is given, its file, the lines typed."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.cli.chat_commands import WORDS
from edgespec.cli.conversation import Conversation, Turn
from edgespec.cli.line_input import MOST_LINES, History, LineInput, history_file
from edgespec.errors import ConfigError


def test_room_is_made_for_several_turns_at_once() -> None:
    talk = Conversation("", [Turn("q" * 10, "a" * 10) for _ in range(10)])
    talk.make_room("q" * 10, 50)
    assert talk.left_out == 0, "nothing is known of tokens yet"
    talk.learn("q" * 10, 105)  # half a token a character
    talk.make_room("q" * 10, 105)
    assert talk.left_out == 0
    for _ in range(2):
        talk.make_room("q" * 10, 104)
        assert talk.left_out == 6
    assert len(talk.messages("q")) == 2 * 4 + 1
    for left_out in (8, 9, 10):
        talk.leave_out_half()
        assert talk.left_out == left_out
    assert not talk.has_more_to_leave_out


# --- files ----------------------------------------------------------------------------------------


def test_a_conversation_is_saved_for_its_owner_alone_and_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    talk = Conversation("be ☺", [Turn("q", "a"), Turn("q\n2", "b", "cancelled")], unanswered="r")
    talk.save(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Conversation.load(file) == talk
    replace(talk, turns=[]).save(file)  # a conversation may be replaced
    assert Conversation.load(file).turns == []
    assert os.listdir(tmp_path) == ["talk.json"]


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with pytest.raises(ConfigError, match="is there already and is no saved conversation"):
        Conversation().save(file)
    assert file.read_text() == "mine"
    with pytest.raises(ConfigError, match="cannot write"):
        Conversation().save(tmp_path / "no" / "folder")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("not json", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("{}", "no list of messages"),
        ("[1]", "role"),
        ('[{"role": "user"}]', "role"),
        ('[{"role": "user", "content": 1}]', "both texts"),
        ('[{"role": "assistant", "content": "x"}]', "take turns"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "take turns"),
    ],
)
def test_files_that_hold_no_conversation_are_refused(
    tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "talk.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        Conversation.load(file)
    assert str(file) in str(caught.value)


def test_lines_are_kept_for_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    file = history_file()
    kept = History(file)
    for line in ("one", "one", " ", "two\nlines", "ünï"):
        kept.add(line)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        "one",
        "two\nlines",
        "ünï",
    ]
    with file.open("a") as more:
        more.write("rubbish\n[1]\n" + '"x"\n' * (2 * MOST_LINES))
    History(file)
    assert len(file.read_text().splitlines()) == MOST_LINES
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_kept_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    History(tmp_path / "file" / "below").add("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    History(tmp_path / "link").add("x")
    assert (tmp_path / "file").read_text() == ""


def test_commands_are_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineInput(History(None), WORDS)
    assert [lines._complete("/s", n) for n in range(5)] == [
        "/system",
        "/save",
        "/set",
        "/stats",
        None,
    ]
    assert lines._complete("", 0) is None
