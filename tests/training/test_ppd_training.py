"""Training of prompt tokens: chains of one run are chains apart; runs go on; folders are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint, write_family, write_tokenizer
from support.ggufs import all_as, write_gguf_family
from support.packed_folders import gptq, write_packed

from edgespec.drafting.ppd import read_ppd_tokens
from edgespec.errors import ModelError
from edgespec.model.ends import InputEmbedding, OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.training.loop import TrainingSettings
from edgespec.training.ppd import PPDVectors, anchors_in
from edgespec.training.run import PPDPlan, train_ppd
from edgespec.training.teacher import Teacher
from edgespec.training.texts import TextRows

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, num_hidden_layers=3, vocab_size=420, initializer_range=0.1)
    return write_tokenizer(folder)


def test_chains_of_one_run_are_chains_apart(base: Path) -> None:
    """Many chains in one text say what each says alone after the text up to its position."""
    torch.manual_seed(4)
    teacher = Teacher(base, CPU, torch.float64)
    prompts = PPDVectors(3, 2, torch.randn(6, 32)).double()
    tokens = torch.randint(0, 420, (2, 9))
    anchors = torch.tensor([[0, 3, 5], [8, 1, 1]])
    truth, said = prompts.logits(teacher, tokens, anchors)
    for row in range(2):
        alone, _ = prompts.logits(teacher, tokens[row : row + 1], torch.tensor([[0]]))
        assert (alone[0] - truth[row]).abs().max() < 1e-5, "real rows see no prompt rows"
        for chain in range(3):
            total = 0.0
            for copy in range(2):
                words = teacher.embedded(tokens[row : row + 1, : anchors[row, chain] + 1])
                vectors = torch.cat([words, prompts.table[None, copy::2].detach()], 1)
                with torch.no_grad():
                    hidden = teacher._model.model(inputs_embeds=vectors).last_hidden_state
                    total = total + teacher.logits(hidden[0, -3:])
            assert (total / 2 - said[row, chain]).abs().max() < 1e-5


def test_a_base_with_windows_or_sinks_is_refused(tmp_path: Path) -> None:
    for name in ("mistral", "gpt_oss"):
        teacher = Teacher(write_family(tmp_path / name, name), CPU, torch.float32)
        with pytest.raises(ModelError, match=f"'{name}' with sliding windows"):
            teacher.require_vectors()


def test_a_packed_base_teaches_what_its_values_teach(base: Path, tmp_path: Path) -> None:
    exact = write_packed(base, tmp_path / "m", gptq(16, act_order=True))
    packed, plain = (Teacher(one, CPU, torch.float64) for one in (tmp_path / "m", exact))
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(packed.read(tokens, ()).hidden, plain.read(tokens, ()).hidden)


@pytest.mark.parametrize("name", ["lfm2", "mixtral"])
def test_a_packed_base_whose_names_transformers_does_not_know_is_refused(
    name: str, tmp_path: Path
) -> None:
    file, plain = write_gguf_family(tmp_path, name, all_as("Q8_0"))
    with pytest.raises(ModelError, match=f"'{name}' so: train on the original 16-bit release"):
        Teacher(file, CPU, torch.float32)
    Teacher(plain, CPU, torch.float32)


def test_a_base_that_scales_is_read_as_a_block_computes_it(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "granite")
    teacher, checkpoint = Teacher(folder, CPU, torch.float64), Checkpoint(folder)
    tokens = torch.tensor([[1, 2, 3, 4]])
    vectors = teacher.embedded(tokens)
    assert torch.equal(vectors[0], InputEmbedding(checkpoint, "float64").rows(tokens[0]))
    whole = teacher.read(tokens, ()).hidden
    sees = torch.ones((1, 1, 4), dtype=torch.bool)
    _, after = teacher.read_with(tokens[:, :3], vectors[:, 3:], torch.tensor([[3]]), sees)
    assert (after[0, 0] - whole[0, 3]).abs().max() < 1e-5
    head = OutputHead(checkpoint, "float64").logits(whole[0])
    assert (teacher.logits(whole[0]) - head).abs().max() < 1e-5
    product = whole[0] @ teacher.head_matrix.T
    assert (product - head).abs().max() < 1e-5


def test_anchors_leave_room_for_what_is_guessed() -> None:
    rows = TextRows(torch.zeros((3, 20)), torch.tensor([0, 7, -1]), torch.tensor([20, 20, 6]))
    anchors = anchors_in(rows, 500, 3, torch.Generator().manual_seed(0))
    assert anchors.min(1).values.tolist() == [0, 7, 0]
    assert anchors.max(1).values.tolist() == [15, 15, 1]


def test_a_run_that_was_stopped_goes_on_and_its_folder_is_read(
    base: Path, text: Path, tmp_path: Path
) -> None:
    found = {}
    for name, parts in (("whole", [4]), ("stopped", [2, 4])):
        out = tmp_path / name
        out.mkdir()
        for steps in parts:
            settings = TrainingSettings(4, 2, 3, 1e-2, low=False)
            plan = PPDPlan(base, text, out, settings, 64, 6, 4, 3, 2, 5)
            lines: list[str] = []
            if steps < 4:
                with pytest.raises(KeyboardInterrupt):
                    train_ppd(plan, _stopping(f"step {steps} "), torch.float32)
                continue
            figures = train_ppd(plan, lines.append, torch.float32)
        found[name] = read_ppd_tokens(out, 32)
        assert set(figures["agreement_by_level"]) == {"top1", "top4", "top8"}
        assert len(figures["agreement_by_level"]["top4"]) == 3
        written = json.loads((out / "training.json").read_text())
        assert written.pop("seconds") >= 0
        assert written == figures
    assert any("going on behind step 2" in line for line in lines)
    assert (found["whole"].depth, found["whole"].copies) == (3, 2)
    torch.testing.assert_close(found["whole"].table, found["stopped"].table)


def _stopping(at: str):  # type: ignore[no-untyped-def]
    def say(line: str) -> None:
        if line.startswith(at):
            raise KeyboardInterrupt

    return say
