"""Workloads: every format is read for what it is, and everything else is refused with its line."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.bench.workloads import Prompt, default_prompts, read_prompts
from edgespec.errors import ConfigError


def written(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> Path:
    """A file with this content."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines_of(*entries: Any) -> str:
    """JSON lines."""
    return "".join(f"{json.dumps(entry)}\n" for entry in entries)


def test_the_bundled_prompts_are_forty_problems_in_the_form_of_the_training_data() -> None:
    prompts = default_prompts()
    assert len(prompts) == 40
    assert {prompt.category for prompt in prompts} == {"gsm8k"}
    assert prompts[0].id == "1"
    assert prompts[0].text.startswith("Question: Janet\u2019s ducks lay 16 eggs")
    assert all(prompt.text.endswith("\nAnswer:") for prompt in prompts)
    assert default_prompts(3) == prompts[:3]


def test_their_source_and_licence_lie_beside_them() -> None:
    folder = Path(__file__).resolve().parents[2] / "edgespec" / "bench" / "prompts"
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "openai/grade-school-math" in text
    assert "MIT License" in text


def test_spec_bench_is_read_with_all_turns(tmp_path: Path) -> None:
    entry = {"question_id": 81, "category": "writing", "turns": ["One.", "Two."], "reference": []}
    (prompt,) = read_prompts(written(tmp_path, lines_of(entry)))
    assert prompt == Prompt("81", "writing", ("One.", "Two."))
    assert prompt.text == "One."


def test_gsm8k_is_numbered_by_its_lines(tmp_path: Path) -> None:
    entry = {"question": "What is 1 + 1?", "answer": "#### 2"}
    prompts = read_prompts(written(tmp_path, lines_of(entry, entry)))
    assert [prompt.id for prompt in prompts] == ["1", "2"]
    assert prompts[1] == Prompt("2", "gsm8k", ("Question: What is 1 + 1?\nAnswer:",))


def test_prompts_may_have_names_or_none(tmp_path: Path) -> None:
    named = {"id": "a", "category": "c", "prompt": "first"}
    path = written(tmp_path, "\n" + lines_of(named) + "\n" + lines_of({"prompt": "second"}))
    assert read_prompts(path) == [Prompt("a", "c", ("first",)), Prompt("4", "", ("second",))]


def test_formats_may_be_mixed_and_the_first_line_tells_json(tmp_path: Path) -> None:
    content = lines_of({"prompt": "a"}, {"question": "b"}, {"turns": ["c"]})
    assert [p.id for p in read_prompts(written(tmp_path, content, "x.txt"))] == ["1", "2", "3"]


def test_plain_lines_are_prompts_and_blank_ones_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, "one\r\n\r\n  two {\n\n", "prompts.txt")
    assert read_prompts(path) == [Prompt("1", "", ("one",)), Prompt("3", "", ("two {",))]


def test_a_byte_order_mark_and_other_line_separators_are_no_harm(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False).encode()
    assert read_prompts(written(tmp_path, content))[0].text == "a\u2028b"


def test_behind_the_limit_nothing_is_looked_at(tmp_path: Path) -> None:
    path = written(tmp_path, lines_of({"prompt": "a"}, {"prompt": "b"}) + "{broken\n")
    assert [prompt.text for prompt in read_prompts(path, 2)] == ["a", "b"]
    with pytest.raises(ConfigError, match="line 3 is not JSON"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="limit is -1"):
        read_prompts(path, -1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('["text"]', "line 2: there is no prompt in this"),
        ("plain", "line 2 is not JSON"),
        ("{}", "line 2: there is no prompt in this"),
        ('{"answer": "42"}', 'Spec-Bench), {"question", "answer"}'),
        ('{"turns": []}', "line 2: turns is []; it must be a list that is not empty"),
        ('{"turns": "text"}', "line 2: turns is 'text'; it must be a list"),
        ('{"turns": ["a", 3]}', "line 2: turns[1] is 3; it must be a text"),
        ('{"prompt": ""}', "line 2: prompt is ''; it must be a text that is not empty"),
        ('{"prompt": null}', "line 2: prompt is None"),
        ('{"prompt": "\\udcff"}', "line 2: the prompt holds half a surrogate pair"),
        ('{"question": 4}', "line 2: question is 4"),
        ('{"prompt": "a", "id": true}', "line 2: id is True; it must be a whole number or a text"),
        ('{"prompt": "a", "category": 1}', "line 2: category is 1; it must be a text"),
        ('{"turns": ["a"], "question_id": []}', "line 2: question_id is []"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = written(tmp_path, lines_of({"prompt": "fine"}) + line)
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.*No such file"):
        read_prompts(tmp_path / "none")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_prompts(tmp_path)
    with pytest.raises(ConfigError, match="null byte"):
        read_prompts("a\0b")
    with pytest.raises(ConfigError, match="line 2: byte 3 is not valid UTF-8"):
        read_prompts(written(tmp_path, b"ab\n\xff"))
    for empty in ("", "\n \n"):
        with pytest.raises(ConfigError, match="holds no prompt"):
            read_prompts(written(tmp_path, empty))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
KEYS = st.sampled_from(["turns", "prompt", "question", "answer", "id", "question_id", "category"])


@given(
    st.binary(max_size=60)
    | st.dictionaries(KEYS, JSON_VALUES | st.lists(st.text(max_size=5), max_size=3)).map(
        lambda entry: json.dumps(entry).encode()
    )
)
def test_any_line_is_prompts_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, line: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in ("any.jsonl", "any.txt"):
        path = written(folder, line, name)
        with suppress(ConfigError):
            prompts = read_prompts(path)
            assert prompts
            for prompt in prompts:
                assert all(turn and turn.encode() for turn in prompt.turns)
