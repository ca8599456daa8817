"""The tool by which a base writes questions: what it keeps, and that it goes on where it was."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint, write_tokenizer
from support.wheel_index import REPOSITORY

TOOL = runpy.run_path(str(REPOSITORY / "tools" / "own_questions.py"))
TEMPLATE = (
    "{% for one in messages %}<s>{{ one.role }} {{ one.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)


def test_what_was_said_or_is_reported_on_is_not_kept() -> None:
    kept = TOOL["Kept"](["one two three four five six seven eight nine"])
    assert kept.takes("How do bees find their way home?")
    assert not kept.takes("How do bees find their way home?!")
    assert not kept.takes("Is it so: two three four five six seven eight nine?")
    assert kept.takes("Is it so: two three four five, seven eight nine?")
    assert not kept.takes("too short")
    assert not kept.takes("a dog and " * 20)


def test_every_text_of_a_file_of_prompts_is_found(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": 1, "turns": ["a", "b"]}, {"prompt": "c", "messages": [{"content": "d"}]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sorted(TOOL["prompts_in"](file)) == ["a", "b", "c", "d"]


def test_questions_of_all_kinds_are_written_and_a_stopped_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, out = tmp_path / "base", tmp_path / "questions.jsonl"
    write_checkpoint(base, num_hidden_layers=1, vocab_size=420, initializer_range=0.1)
    write_tokenizer(base, chat_template=TEMPLATE)
    for count in (5, 20):
        command = ["own_questions.py", str(base), "--out", str(out), "--count", str(count)]
        monkeypatch.setattr(sys, "argv", command)
        before = out.read_text() if out.exists() else ""
        TOOL["main"]()
        assert out.read_text().startswith(before)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(rows) >= count
    assert len({row["category"] for row in rows}) > 1
    for row in rows:
        (message,) = row["messages"]
        assert message["role"] == "user"
        begins = TOOL["KINDS"][row["category"]].begins
        assert any(message["content"].startswith(begin.strip()) for begin in begins)
