"""Training of EAGLE heads: unrolled steps are what a guesser runs; runs go on; heads are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_checkpoint, write_tokenizer
from torch.nn.functional import smooth_l1_loss

from edgespec.drafting.eagle.format import read_head
from edgespec.drafting.eagle.guesser import load_eagle
from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.rows import EaglePasses, PairRows
from edgespec.drafting.eagle.shape import HeadShape, Kind
from edgespec.drafting.held_head import GuesserParts
from edgespec.drafting.steps import alone
from edgespec.errors import ConfigError, ModelError
from edgespec.model.aux_hidden import packed as taps_of
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.training.eagle import FEATURE_SHARE, Student, counted, learn, shape_for, unrolled
from edgespec.training.loop import DECAY, TrainingSettings
from edgespec.training.run import EaglePlan, train_eagle
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows, documents, packed
from edgespec.types.features import Features, Layers
from edgespec.verify.sampling import Sampling

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, num_hidden_layers=5, vocab_size=420, initializer_range=0.1)
    return write_tokenizer(folder)


def plan(base: Path, text: Path, out: Path, kind: Kind, steps: int, vocab: int = 0) -> EaglePlan:
    out.mkdir(exist_ok=True)
    settings = TrainingSettings(steps, 2, 2, 1e-3, low=False)
    return EaglePlan(base, text, out, settings, 64, 6, 4, kind, vocab)


def test_unrolled_steps_are_what_a_guesser_runs() -> None:
    """Step i's row p is the path of i guesses below the pair p - i."""
    torch.manual_seed(2)
    shape = HeadShape("eagle", 16, 16, 4, 2, 4, 24, 50, 1e-5)
    head = EagleHead(shape).double()
    given = torch.randn((1, 7, 16), dtype=torch.float64)
    table = torch.randn((50, 16), dtype=torch.float64)
    tokens = [3, 14, 15, 9, 2, 6, 5]
    embedded = table[torch.tensor(tokens)][None]

    with torch.inference_mode():
        steps = list(unrolled(head, given, embedded, 4))
        for row in range(3, 7):
            for step in range(4):
                parts = GuesserParts(table.__getitem__, torch.float64, CPU, lambda *ran: None, bool)
                passes = EaglePasses(head, parts)
                rows = PairRows(1, passes, shape.ropes[0])
                committed = row + 1 - step
                alone(rows.add(given[0, :committed], tokens[:committed]))
                out = alone(rows.behind([tokens[committed : row + 1]]))
                np.testing.assert_allclose(out[0], steps[step][0, row], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "vocab"), [("eagle", 0), ("eagle3", 100)])
def test_gradients_of_a_few_rows_at_a_time_are_those_of_all(
    kind: Kind, vocab: int, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    teacher = Teacher(base, CPU, torch.float64)
    kept = torch.arange(0, 400, 4) if vocab else None
    student = Student(shape_for(kind, teacher.config, vocab or 420), kept).double()
    tokens = torch.randint(0, 420, (2, 12), dtype=torch.int32)
    rows = TextRows(tokens, torch.tensor([3, 0]), torch.tensor([12, 9]))
    found = []
    for at_once in (256, 5):
        monkeypatch.setattr("edgespec.training.eagle._AT_ONCE", at_once)
        student.zero_grad()
        found.append(learn(student, teacher, rows, 3))
        found.append(tuple(w.grad for w in student.parameters() if w.grad is not None))
    assert found[0] == pytest.approx(found[2])
    assert len(found[1]) == len(found[3]) > 5
    for one, two in zip(found[1], found[3], strict=True):
        assert (one - two).abs().max() < 1e-6

    # And those of the plain sum over levels.
    student.zero_grad()
    lesson = teacher.read(tokens.long(), student.head.shape.aux_hidden)
    given = lesson.hidden if lesson.aux_hidden is None else lesson.aux_hidden
    truth = teacher.logits(lesson.hidden[:, 1:])
    likely = torch.softmax(truth if kept is None else truth[..., kept], -1)
    total = torch.zeros(())
    words = teacher.embedded(tokens[:, 1:].long())
    for level, features in enumerate(unrolled(student.head, given[:, :-1], words, 3)):
        counts = counted(rows, level)
        said = torch.log_softmax(student.logits(features, teacher), -1)
        loss = -(likely * said).sum(-1)
        if kind == "eagle":
            apart = smooth_l1_loss(features, lesson.hidden[:, 1:], reduction="none").mean(-1)
            loss = loss + FEATURE_SHARE * apart
        total = total + DECAY**level * loss[counts].mean()
    total.backward()
    assert found[0][0] == pytest.approx(float(total.detach()), rel=1e-4)
    grads = [w.grad for w in student.parameters() if w.grad is not None]
    for one, two in zip(found[1], grads, strict=True):
        assert (one - two).abs().max() < 1e-4 * max(1.0, float(two.abs().max()))


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "vocab"), [("eagle", 0), ("eagle3", 100)])
def test_a_run_that_was_stopped_goes_on_and_its_head_guesses(
    kind: Kind, vocab: int, base: Path, text: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    whole = train_eagle(
        plan(base, text, tmp_path / "a", kind, 4, vocab=vocab), said.append, torch.float32
    )
    assert said[-1].startswith("measuring on held-out text: ")
    assert len([line for line in said if line.startswith("step ")]) == 4
    stopped = plan(base, text, tmp_path / "b", kind, 4, vocab=vocab)

    def stop(line: str) -> None:
        if line.startswith("step 2 "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_eagle(stopped, stop, torch.float32)
    said.clear()
    again = train_eagle(stopped, said.append, torch.float32)
    assert "going on behind step 2" in said
    assert again == whole
    written = json.loads((tmp_path / "b" / "training.json").read_text())
    assert written.pop("seconds") >= 0
    assert written == whole
    source = Checkpoint(base)
    one, two = (read_head(tmp_path / name, 32, 420, 5) for name in "ab")
    for name, tensor in one.weights.items():
        assert torch.equal(tensor, two.weights[name]), name
    draft = load_eagle(tmp_path / "a", kind, source, OutputHead(source))
    draft.open(1, Sampling())
    features = Features(final=from_torch(torch.randn(2, 32)))
    if kind == "eagle3":
        aux_hidden = taps_of([torch.randn(2, 32) for _ in range(2)])
        features = Features(aux_hidden=aux_hidden, aux_layers=Layers((2, 2)))
        assert one.shape.aux_hidden == (2, 2, 2)
    assert draft.read(1, [4, 5, 6], features)
    assert len(draft.guess(1, [[]], 3)) == 3


def test_a_checkpoint_of_another_run(base: Path, text: Path, tmp_path: Path) -> None:
    train_eagle(plan(base, text, tmp_path, "eagle", 1), lambda line: None, torch.float32)
    with pytest.raises(ModelError, match="of another run: delete it"):
        train_eagle(plan(base, text, tmp_path, "eagle3", 1), lambda line: None, torch.float32)


def test_text_that_cannot_be_used(base: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("one line\n")
    with pytest.raises(ConfigError, match="too short"):
        train_eagle(plan(base, short, tmp_path, "eagle", 1), lambda line: None, torch.float32)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"texts": "b"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        list(documents(bad))
    with pytest.raises(ConfigError, match="cannot read"):
        list(documents(tmp_path / "none.txt"))


def test_rows_are_packed_without_losing_a_short_document() -> None:
    lengths = [5, 3, 4, 20]
    numbers = iter(range(100))
    texts = [torch.tensor([next(numbers) for _ in range(n)], dtype=torch.int32) for n in lengths]
    rows = packed(texts, 8, 10).tokens.tolist()
    assert rows == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [8, 9, 10, 11, 12, 13, 14, 15],
        [16, 17, 18, 19, 20, 21, 22, 23],
        [24, 25, 26, 27, 28, 29, 30, 31],
    ]
    cut = packed([torch.arange(6), torch.arange(10, 16)], 8, 10).tokens.tolist()
    assert cut == [[0, 1, 2, 3, 4, 5, 10, 11]]


def test_the_teachers_rows_are_those_that_enter_the_layers(base: Path) -> None:
    teacher = Teacher(base, CPU, torch.float32)
    lesson = teacher.read(torch.tensor([[1, 2, 3]]), (0, 2))
    assert lesson.aux_hidden is not None
    assert torch.equal(lesson.aux_hidden[..., :32], teacher.embedded(torch.tensor([[1, 2, 3]])))
    assert lesson.hidden.shape == (1, 3, 32)
    assert shape_for("eagle3", teacher.config, 420).aux_hidden == (2, 2, 2)
