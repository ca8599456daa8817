"""Training corpus: the base answers whole prompts, half of them sampled, and never twice."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint, write_tokenizer

from edgespec.errors import ConfigError
from edgespec.model.tokenizer import Tokenizer
from edgespec.training.corpus import OwnAnswers, TrainingPlan, prepared
from edgespec.training.loop import LossCourse, RowOrder, TrainingSettings, duration
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows, counted_tokens

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, num_hidden_layers=2, vocab_size=420, initializer_range=0.1)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def teacher(base: Path) -> Teacher:
    return Teacher(base, torch.device("cpu"), torch.float32)


def plan(base: Path, text: Path) -> TrainingPlan:
    settings = TrainingSettings(1, 2, 1, 1e-3, low=False)
    return TrainingPlan(base, text, text.parent, settings, 64, 4, 10)


def quiet(line: str) -> None:
    """Say nothing."""


def test_conversations_are_answered_from_the_whole_prompt_on(
    base: Path, teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": f"{n} dogs, {n % 7} foxes?"}] for n in range(200)]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    tokenizer = Tokenizer(base)
    said: list[str] = []
    corpus = prepared(plan(base, file), tokenizer, teacher, said.append)
    prompts = {tuple(tokenizer.encode_chat(chat)) for chat in chats}
    rows = corpus.trained
    assert len(rows) == 10
    for tokens, start in zip(rows.tokens.tolist(), rows.starts.tolist(), strict=True):
        assert tuple(tokens[: start + 1]) in prompts
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == 10 + len(corpus.greedy) + len(corpus.sampled)
    assert abs(2 * sum(line["sampled"] for line in lines) - len(lines)) <= 2
    assert any("of 10" in line and "token" in line for line in said)

    def no(*given: object) -> object:
        raise AssertionError("they are there")

    with monkeypatch.context() as patch:
        patch.setattr(teacher, "continued", no)
        again = prepared(plan(base, file), tokenizer, teacher, quiet)
    assert torch.equal(again.trained.tokens, rows.tokens)

    # A run that was stopped in the middle of a line makes the rest anew.
    answers = tmp_path / "answers.jsonl"
    whole = answers.read_text()
    answers.write_text(whole[: len(whole) - 30])
    third = prepared(plan(base, file), tokenizer, teacher, quiet)
    assert third.trained.tokens.shape == rows.tokens.shape
    assert len(answers.read_text().splitlines()) == len(lines)
    answers.write_text("{}\n" + whole)
    with pytest.raises(ConfigError, match=r"line 1 of .* is no answer"):
        prepared(plan(base, file), tokenizer, teacher, quiet)


def test_a_gpu_answers_as_many_side_by_side_as_have_room(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert teacher.texts_at_once(64) == 64
    config = teacher.config
    of_one = 2 * 64 * 2 * config.num_key_value_heads * config.head_dim * 4  # bytes, two layers
    monkeypatch.setattr(teacher, "device", torch.device("cuda"))
    for room, texts in ((40.5, 10), (0.5, 1), (1e6, 2048)):
        free = int(room * of_one)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 0))
        assert teacher.texts_at_once(64) == texts


def test_what_is_left_of_the_answers_is_never_less_than_nothing(
    base: Path, teacher: Teacher, tmp_path: Path
) -> None:
    file, said = tmp_path / "answers.jsonl", list[str]()
    prompts = [range(2, 2 + length) for length in (3, 4, 20, 30)]
    OwnAnswers(file, teacher, 32, 1, 0).to(prompts, said.append)
    counts = [int(line.split()[2]) for line in said]
    assert counts == sorted(counts)
    assert counts[-1] <= int(said[-1].split()[4].rstrip(","))


def test_rows_of_a_step_are_about_as_long_and_each_comes_once() -> None:
    ends = torch.randint(10, 100, (210,), generator=torch.Generator().manual_seed(0))
    rows = TextRows(torch.zeros((210, 100), dtype=torch.int32), torch.zeros(210), ends)
    settings = replace(TrainingSettings(1, 4, 1, 1.0, low=False), seed=3)
    order = RowOrder(rows, settings)
    steps = [order.of(step) for step in range(53)]
    assert sorted(torch.cat(steps)[:210].tolist()) == list(range(210))
    spread = [int(ends[step].max() - ends[step].min()) for step in steps[:30]]
    assert sum(spread) / len(spread) < 10
    fresh = RowOrder(rows, settings)
    assert torch.equal(fresh.of(60), order.of(60)), "a run that goes on takes the same rows"


def test_only_what_counts_is_counted() -> None:
    tokens = torch.arange(10).reshape(2, 5)
    rows = TextRows(tokens, torch.tensor([3, -1]), torch.tensor([5, 2]))
    assert counted_tokens(rows).tolist() == [3, 4, 5, 6]
    assert rows.trimmed().tokens.shape == (2, 5)


def test_a_course_that_leads_away_is_noticed() -> None:
    course = LossCourse()
    for loss in (10.0, 9, 8, 7, 6, 5, 5, 5, 5):
        course.took(loss)
    assert course.is_good
    assert not course.has_diverged
    for loss in (6.0, 12, 12, 12, 12):
        course.took(loss)
    assert course.has_diverged
    assert not course.is_good
    for seed in range(20):  # rows are not equally hard: a course that was taken for one led away
        dice, uneven = random.Random(seed), LossCourse(sure=40)
        for _ in range(2000):
            uneven.took(dice.uniform(0.24, 0.52))
            assert not uneven.has_diverged, seed
    none = LossCourse()
    none.took(float("inf"))
    assert none.has_diverged


def test_durations() -> None:
    said = [duration(seconds) for seconds in (0, 89, 200, 3 * 3600 + 1200)]
    assert said == ["0 s", "89 s", "3 min", "3 h 20 min"]
