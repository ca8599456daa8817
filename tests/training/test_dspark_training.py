"""Training of one-pass heads: blocks see what they may, gradients are right, runs go on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.checkpoints import write_checkpoint, write_tokenizer
from support.dspark_heads import masked

from edgespec.drafting.dspark.format import read_head
from edgespec.drafting.dspark.head import BlockPlaces, DSparkHead, packed_masks
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.shape import Rope
from edgespec.errors import ConfigError, ModelError
from edgespec.training.blocks import beside, blocks_at, drawn
from edgespec.training.dspark import (
    CROSS_ENTROPY,
    VARIATION,
    DSparkStudent,
    DSparkTrainer,
    divergence,
)
from edgespec.training.evaluate import dspark_agreement
from edgespec.training.loop import TrainingSettings
from edgespec.training.run import DSparkPlan, train_dspark
from edgespec.training.teacher import KeptRows, Lesson, Teacher
from edgespec.training.texts import TextRows

CPU = torch.device("cpu")
SHAPE = DSparkShape(
    layers=2,
    hidden=16,
    base_hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    intermediate=24,
    vocab=30,
    block=5,
    eps=1e-5,
    aux_hidden=(1, 2),
    rope=Rope(theta=1e4),
    markov_rank=3,
    markov_rows=30,
    revealed=3,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, num_hidden_layers=6, vocab_size=420, initializer_range=0.1)
    return write_tokenizer(folder)


def plan(base: Path, text: Path, out: Path, steps: int, rate: float = 2e-3) -> DSparkPlan:
    out.mkdir(exist_ok=True)
    settings = TrainingSettings(steps, 2, 4, rate, low=False, warmup=4)
    return DSparkPlan(base, text, out, settings, 64, 12, 4, 1, 4, 8, 48, 60, 6)


def quiet(line: str) -> None:
    """Say nothing."""


def rows(*spans: tuple[int, int], length: int) -> TextRows:
    starts, ends = (torch.tensor(part) for part in zip(*spans, strict=True))
    tokens = torch.randint(0, 30, (len(spans), length), dtype=torch.int32)
    return TextRows(tokens, starts, ends)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_beside_each_other_see_what_the_masks_say(causal: bool) -> None:
    torch.manual_seed(1)
    shape = replace(SHAPE, causal=causal)
    head = DSparkHead(shape).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    anchors = torch.tensor([[3, 8, 1], [2, 9, 9]])
    slots = (anchors[:, :, None] + torch.arange(5)).flatten(1)
    places = BlockPlaces(torch.arange(12).expand(2, -1), slots)
    context = head.context(torch.randn((2, 12, 32), dtype=torch.float64))
    block = torch.randn((2, 15, 16), dtype=torch.float64)
    expected = head(context, block, places, masked(packed_masks(shape, places)))
    found = head(context, block, places, beside(shape, places))
    assert (found - expected).abs().max() < 1e-9


def test_a_block_is_shown_nothing_at_or_behind_its_anchor_but_what_is_revealed() -> None:
    """What comes at and behind the anchor may change: slots say the same, unless it is shown."""
    torch.manual_seed(2)
    student = DSparkStudent(SHAPE, torch.arange(30)).double()
    for weight in student.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    teacher = _Words(torch.randn((30, 16), dtype=torch.float64))
    text = rows((0, 20), length=20)
    tokens = text.tokens.long()
    given = torch.randn((1, 20, 32), dtype=torch.float64)
    blocks = blocks_at(torch.tensor([[7]]), torch.tensor([[2]]), text, SHAPE)
    assert blocks.shown.tolist() == [[True, True, True, False, False]]
    assert (blocks.weights > 0).tolist() == [[False, False, True, True, True]]
    assert blocks.sources.tolist() == [[7, 8, 9, 10, 11]]
    first = student.outputs(teacher, tokens, given, blocks)
    later_rows = given.clone()
    later_rows[:, 7:] = 0
    later_tokens = tokens.clone()
    later_tokens[:, 10:] = (later_tokens[:, 10:] + 1) % 30
    later_tokens[:, :7] = 0
    assert torch.equal(first, student.outputs(teacher, later_tokens, later_rows, blocks))
    for change in (6, 7, 9):
        other_rows, other_tokens = given.clone(), tokens.clone()
        if change < 7:
            other_rows[:, change] += 1
        else:
            other_tokens[:, change] = (other_tokens[:, change] + 1) % 30
        other = student.outputs(teacher, other_tokens, other_rows, blocks)
        assert not torch.equal(first, other), change


class _Words:
    """The part of a Teacher that embeds."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._table[tokens]


def test_blocks_stand_in_the_bases_own_text() -> None:
    dice = torch.Generator().manual_seed(0)
    text = rows((4, 20), (-1, 12), (6, 9), length=20)
    blocks = drawn(text, SHAPE, 400, 2.5, dice)
    assert blocks.anchors.min(1).values.tolist() == [5, 1, 7]
    assert blocks.anchors.max(1).values.tolist() == [18, 10, 7]
    assert sorted(set(blocks.revealed.flatten().tolist())) == [0, 1, 2, 3]
    assert 0.7 < (blocks.revealed == 3).float().mean() < 0.9
    counts = (blocks.weights > 0).view(3, 400, 5)
    assert counts[blocks.anchors == 5][..., 0].any()
    last = counts[2]
    assert not last[:, 1:].any(), "a guess behind the text counts nothing"
    assert torch.equal(last[:, 0], blocks.revealed[2] == 0)


def test_the_slope_is_that_of_the_loss() -> None:
    torch.manual_seed(3)
    likely = torch.softmax(torch.randn((6, 9), dtype=torch.float64), -1)
    logits = torch.randn((6, 9), dtype=torch.float64, requires_grad=True)
    found = divergence(likely, logits.detach())
    surprise = -(likely * torch.log_softmax(logits, -1)).sum(-1)
    apart = (torch.softmax(logits, -1) - likely).abs().sum(-1) / 2
    loss = CROSS_ENTROPY * surprise + VARIATION * apart
    loss.sum().backward()
    assert logits.grad is not None
    assert (found[0] - loss.detach()).abs().max() < 1e-12
    assert (found[1] - logits.grad).abs().max() < 1e-12


def test_the_loss_falls_and_a_stopped_run_gives_the_same_head(
    base: Path, text: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    whole = train_dspark(plan(base, text, tmp_path / "a", 45, 4e-3), said.append, torch.float32)
    assert any("left" in line and line.startswith("own texts: ") for line in said)
    assert any(line.startswith("step 2 of 45: ") and line.endswith("left") for line in said)
    lines = (tmp_path / "a" / "progress.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 45
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])

    def stop(line: str) -> None:
        if line.startswith("step 7 "):
            raise KeyboardInterrupt

    stopped = plan(base, text, tmp_path / "b", 45, 4e-3)
    with pytest.raises(KeyboardInterrupt):
        train_dspark(stopped, stop, torch.float32)
    half = read_head(tmp_path / "b", 32, 420, 6)
    assert half.shape.shows
    assert half.shape.revealed == 3, "a head is there as soon as the run stops"
    again = train_dspark(stopped, quiet, torch.float32)
    assert again == whole
    one, two = (read_head(tmp_path / name, 32, 420, 6) for name in "ab")
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, two.weights[name]), name
    assert one.tokens is not None
    assert len(one.tokens) == 60
    assert len(whole["agreement_by_level"]["top1"]) == 4
    assert whole["at_temperature_1"]["held_out_tokens"] > 0


def test_what_is_no_written_head_is_no_beginning(base: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no head that edgespec train wrote"):
        train_dspark(replace(plan(base, text, tmp_path / "a", 1), start=base), quiet, torch.float32)


@pytest.mark.thorough
def test_a_new_run_begins_with_a_head_that_was_written(
    base: Path, text: Path, tmp_path: Path
) -> None:
    first = train_dspark(plan(base, text, tmp_path / "a", 12), quiet, torch.float32)
    more = replace(plan(base, text, tmp_path / "b", 1, 1e-9), start=tmp_path / "a", rank=0)
    more = replace(more, layers=3, block=9, vocab=70)
    second = train_dspark(more, quiet, torch.float32)
    for figures, started in ((first, False), (second, True)):
        has = [figures[name] for name in ("layers", "block", "rank", "vocab", "started")]
        assert has == [1, 4, 8, 60, started], "of the head, whatever the plan says"
    one, two = (read_head(tmp_path / name, 32, 420, 6) for name in "ab")
    assert one.shape == two.shape
    for name, tensor in one.weights.items():
        assert (tensor - two.weights[name]).abs().max() < 1e-2, name


def test_steps_that_lead_away_are_taken_back(base: Path, text: Path, tmp_path: Path) -> None:
    said: list[str] = []
    wild = plan(base, text, tmp_path, 12, rate=20.0)
    figures = train_dspark(wild, said.append, torch.float32)
    rose = [line for line in said if line.startswith("the loss rose at step ")]
    assert rose, said
    assert figures["rate_lowered_to"] == 0.5 ** len(rose)
    assert read_head(tmp_path, 32, 420, 6).shape.block == 4


def test_a_run_that_always_diverges_ends_with_advice(
    base: Path, text: Path, tmp_path: Path
) -> None:
    hopeless = plan(base, text, tmp_path, 12, rate=1e9)
    with pytest.raises(ModelError, match="give a lower --rate"):
        train_dspark(hopeless, quiet, torch.float32)


def test_prompts_of_a_batch_are_answered_as_each_alone(base: Path) -> None:
    teacher = Teacher(base, CPU, torch.float32)
    prompts = [[5, 6, 7, 8], [9, 10]]
    told: list[int] = []
    greedy = teacher.continued(prompts, 12, 1, (0.0, 0.0), told.append, (1, 2))
    for prompt, answer in zip(prompts, greedy, strict=True):
        alone = teacher.continued([prompt], 12, 1, [0.0], told.append)[0]
        tokens, rows = answer
        assert tokens == alone.tokens
        assert alone.rows is None
        assert list(tokens[: len(prompt)]) == prompt
        assert len(tokens) == 12 or tokens[-1] == 1
        lesson = teacher.read(torch.tensor([tokens[:-1]]), (1, 2))
        assert rows is not None
        assert lesson.aux_hidden is not None
        read = torch.cat([lesson.hidden, lesson.aux_hidden], -1)[0]
        assert (rows.float() - read).abs().max() < 1e-2
    torch.manual_seed(0)
    drawn_twice = [teacher.continued(prompts, 40, 1, (1.0, 1.0), told.append) for _ in range(2)]
    assert drawn_twice[0] != drawn_twice[1]
    greedy, hot = (teacher.continued(prompts, 40, 1, (0.0, t), told.append) for t in (1e-6, 9.0))
    assert greedy == teacher.continued(prompts, 40, 1, (0.0, 0.0), told.append)
    assert hot[0] == greedy[0]
    assert hot[1] != greedy[1]


def test_texts_that_end_leave_their_batch_and_the_others_go_on(base: Path) -> None:
    teacher = Teacher(base, CPU, torch.float32)
    prompts = [[n, n + 1] for n in range(5, 45, 5)]
    free = teacher.continued(prompts, 12, 419, [0.0] * 8, lambda _: None)
    end = free[0].tokens[4]
    together = teacher.continued(prompts, 12, end, [0.0] * 8, lambda _: None, (1,))
    for long, cut in zip(free, together, strict=True):
        stop = long.tokens[2:].index(end) + 3 if end in long.tokens[2:] else 12
        assert cut.tokens == long.tokens[:stop]
        assert cut.rows is not None
        assert len(cut.rows) == len(cut.tokens) - 1


def test_rows_of_answers_are_kept_and_no_others(tmp_path: Path) -> None:
    kept = KeptRows(tmp_path, 8, (1, 3), 4)
    rows = torch.randn((5, 12))
    kept.keep(2, rows)
    again = KeptRows(tmp_path, 8, (1, 3), 4)
    for number in (-1, 0, 1, 3):
        assert again.lesson([2, number], 3, torch.float32) is None, number
    found = again.lesson([2, 2], 4, torch.float32)
    assert found is not None
    assert found.aux_hidden is not None
    both = torch.cat([found.hidden, found.aux_hidden], -1)
    assert (both - rows[:4]).abs().max() < 1e-2
    assert KeptRows(tmp_path, 8, (1, 2), 4).lesson([2], 4, torch.float32) is None
    huge = KeptRows(tmp_path, 1_000_000, (1, 3), 4000)
    huge.keep(5, rows)
    assert huge.lesson([5], 4, torch.float32) is None, "the file would be too large"


def test_a_run_does_not_read_again_what_the_base_computed_while_it_answered(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": f"{n} dogs, {n % 7} foxes?"}] for n in range(200)]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    chatty = shutil.copytree(base, tmp_path / "chatty")
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    (chatty / "chat_template.jinja").write_text(template)
    only_answers = plan(chatty, file, tmp_path / "out", 3)
    read = Teacher.read

    def no(self: Teacher, tokens: torch.Tensor, layers: tuple[int, ...]) -> Lesson:
        raise AssertionError("it is known")

    def measure(self: Teacher, tokens: torch.Tensor, layers: tuple[int, ...]) -> Lesson:
        return read(self, tokens, layers)

    def say(line: str) -> None:
        monkeypatch.setattr(Teacher, "read", measure if line.startswith("measuring") else no)

    say("answering, then training")
    figures = train_dspark(only_answers, say, torch.float32)
    assert figures["rows"] == only_answers.own_rows


def test_a_file_of_wrong_messages_is_refused(base: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ConfigError, match="line 1 of"):
        train_dspark(plan(base, bad, tmp_path / "o", 1), quiet, torch.float32)


class _Oracle:
    """A teacher of random text: what enters its tapped layers at a position tells the tokens two
    and three further, and nothing else does."""

    device = CPU
    weights: ClassVar = {"model.norm.weight": torch.ones(32)}

    def __init__(self) -> None:
        rows = torch.randn((30, 32), generator=torch.Generator().manual_seed(0))
        self.head_matrix = torch.nn.functional.normalize(rows, dim=-1) * 32**0.5

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head_matrix[tokens % 30]

    def read(self, tokens: torch.Tensor, aux_hidden: tuple[int, ...]) -> Lesson:
        first, second, third = (self.embedded(tokens.roll(-n, 1)) for n in (1, 2, 3))
        return Lesson(first, torch.cat([second, third], -1))


@pytest.mark.thorough
def test_a_head_learns_what_the_row_before_the_anchor_tells_and_no_more(tmp_path: Path) -> None:
    """The row before the anchor tells the first two tokens behind it; later ones are chance, as
    they would not be if a block saw rows at its anchor or tokens behind it."""
    shape = replace(SHAPE, hidden=32, base_hidden=32, head_dim=8, intermediate=64, block=4)
    shape = replace(shape, markov_rank=0, markov_rows=0, revealed=0)
    torch.manual_seed(0)
    student = DSparkStudent(shape, torch.arange(30))
    settings = TrainingSettings(360, 8, 4, 1e-2, low=False)
    trainer = DSparkTrainer(_Oracle(), student, settings, tmp_path, 10, True)  # type: ignore[arg-type]
    trainer.write = lambda: None  # type: ignore[method-assign]
    dice = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 30, (1200, 40), dtype=torch.int32, generator=dice)
    text = TextRows(tokens, torch.zeros(1200, dtype=torch.int64), torch.full((1200,), 36))
    trainer.run(text.take(torch.arange(1100)), quiet)

    held_out = text.take(torch.arange(1100, 1200))
    found = dspark_agreement(student, trainer.teacher, held_out, 4, quiet).by_level[1]
    assert min(found[:2]) > 0.7, found
    assert max(found[2:]) < 0.12, found
