"""Head folders that cannot be used: each is refused by a message that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle_heads import FORMS, HIDDEN, VOCAB, write_eagle

from edgespec.drafting.eagle.format import read_head, write_head
from edgespec.drafting.eagle.shape import Rope
from edgespec.errors import ModelError


def read(folder: Path, hidden: int = HIDDEN, vocab: int = VOCAB, layers: int = 8) -> Any:
    return read_head(folder, hidden, vocab, layers)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def settings(folder: Path, **changed: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({"layers.0.odd.weight": torch.ones(1)}), "odd.weight"),
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "lacks the tensor 'layer.mlp.up_proj"),
        (lambda t: t.update({"fc.weight": torch.ones(HIDDEN, HIDDEN)}), r"\[32, 32\].*\[32, 64\]"),
        (lambda t: t.pop("fc.weight"), "no EAGLE head"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].to(torch.int8)}), "needs floats"),
    ],
)
def test_tensors_that_do_not_fit(
    edit: Callable[[dict[str, torch.Tensor]], Any], message: str, tmp_path: Path
) -> None:
    write_eagle(tmp_path, FORMS["eagle-llama3"])
    change(tmp_path, edit)
    with pytest.raises(ModelError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"fc_norm": True}, "sets 'fc_norm'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"num_attention_heads": 7}, "7 attention heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"rope_theta": "much"}, "rope_theta"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "names layers"),
    ],
)
def test_settings_that_cannot_be_used(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_eagle(tmp_path, FORMS["eagle3-official"])
    settings(tmp_path, **changed)
    with pytest.raises(ModelError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("name", FORMS)
def test_a_head_for_another_base(name: str, tmp_path: Path) -> None:
    write_eagle(tmp_path, FORMS[name])
    with pytest.raises(ModelError, match="trained for this base"):
        read(tmp_path, hidden=HIDDEN + 8)


def test_token_numbers_outside_the_base(tmp_path: Path) -> None:
    write_eagle(tmp_path, FORMS["eagle3-official"])
    with pytest.raises(ModelError, match="vocabulary of 50"):
        read(tmp_path, vocab=50)
    change(
        tmp_path, lambda t: t.update({"d2t": torch.zeros(40, dtype=torch.int64) - torch.arange(40)})
    )
    with pytest.raises(ModelError, match="a token twice"):
        read(tmp_path)
    change(tmp_path, lambda t: t.pop("d2t"))
    with pytest.raises(ModelError, match="no tensor 'd2t'"):
        read(tmp_path)


def test_no_files_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="neither model"):
        read(tmp_path)


def test_a_pickle_that_is_more_than_tensors(tmp_path: Path) -> None:
    write_eagle(tmp_path, FORMS["eagle-vicuna"])
    torch.save({"fc.weight": Path("x")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="use one that comes as model"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("layers", "said", "aux_hidden"),
    [
        (32, None, (2, 16, 29)),
        (32, [2, 16, 29], (2, 16, 29)),  # by what enters them
        (32, [1, 15, 28], (2, 16, 29)),  # by what leaves them
        (32, [3, 9, 20], (4, 10, 21)),
    ],
)
def test_tapped_layers(
    layers: int, said: list[int] | None, aux_hidden: tuple[int, ...], tmp_path: Path
) -> None:
    write_eagle(tmp_path, FORMS["eagle3-official"])
    if said:
        settings(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": said})
    assert read(tmp_path, layers=layers).shape.aux_hidden == aux_hidden


@pytest.mark.parametrize("name", ["eagle-llama3", "eagle3-official"])
def test_a_head_that_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    write_eagle(tmp_path / "one", FORMS[name])
    first = read(tmp_path / "one")
    shape = replace(first.shape, ropes=(Rope(5e5),))
    tensors = dict(first.weights)
    if first.matrix is not None:
        tensors["lm_head.weight"] = first.matrix
    (tmp_path / "two").mkdir()
    write_head(tmp_path / "two", shape, tensors, first.tokens, VOCAB, 512)
    second = read(tmp_path / "two")
    assert second.shape == replace(shape, ropes=(Rope(5e5), Rope()))
    for key, tensor in first.weights.items():
        assert torch.equal(second.weights[key], tensor.bfloat16())
    assert (second.tokens is None) == (first.tokens is None)
