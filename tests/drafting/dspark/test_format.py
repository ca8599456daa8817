"""Folders of one-pass heads that cannot be used: each is refused by a message that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.dspark_heads import FORMS, HIDDEN, LAYERS, VOCAB, write_dspark

from edgespec.drafting.dspark.format import read_head, usual_taps
from edgespec.errors import ModelError

Edit = Callable[[dict[str, torch.Tensor]], Any]


def refused(folder: Path, message: str, hidden: int = HIDDEN, layers: int = LAYERS) -> None:
    with case(message), pytest.raises(ModelError, match=message):
        read_head(folder, hidden, VOCAB, layers)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    edits: list[tuple[Edit, str]] = [
        (lambda t: t.update({"layers.0.odd.weight": torch.ones(1)}), "odd.weight"),
        (lambda t: t.update({"conv.weight": torch.ones(1)}), "no DSpark or DFlash head that edge"),
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "lacks the tensor 'layers.1.mlp.up_proj"),
        (lambda t: t.update({"fc.weight": torch.ones(HIDDEN, HIDDEN)}), r"\[32, 32\].*\[32, 96\]"),
        (lambda t: t.pop("fc.weight"), "this is no DSpark or DFlash head"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int8)}), "needs floats"),
        (
            lambda t: t.update({"markov_head.markov_w1.weight": torch.ones(7, 5)}),
            "knows 7 tokens, the base has 96",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(50, HIDDEN)}),
            r"markov_w2.*needs floats \[50, 5\]",
        ),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(50, HIDDEN)}), r"floats \[96, 32\]"),
    ]
    for number, (edit, message) in enumerate(edits):
        folder = tmp_path / str(number)
        write_dspark(folder, FORMS["deepspec"])
        file = folder / "model.safetensors"
        tensors = load_file(file)
        edit(tensors)
        save_file(tensors, file)
        refused(folder, message)


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu', edgespec computes silu"),
        ({"markov_head_type": "gated"}, "markov_head_type 'gated'"),
        ({"projector_type": "domino"}, "projector_type 'domino'"),
        ({"num_target_layers": 36}, "for a base of 36 layers, this base has 8"),
        ({"num_attention_heads": 5}, "says 5 attention heads"),
        ({"num_attention_heads": None}, "no whole number 'num_attention_heads'"),
        ({"block_size": 0}, "no whole number 'block_size'"),
        ({"block_size": 100}, "block_size .* is 100"),
        ({"target_layer_ids": [0, 3, 7]}, "names layers .*the base has 8"),
        ({"target_layer_ids": [0, 3, 3]}, "names layers .*the base has 8"),
        ({"target_layer_ids": "all"}, "no list of layers 'target_layer_ids'"),
        ({"mask_token_id": 96}, "mask_token_id .* is 96, the base has 96 tokens"),
        ({"mask_token_id": None}, "mask_token_id .* is None"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": None},
            "do not say what each of 2 layers sees",
        ),
        ({"causal_head": 1}, "causal_head .* is 1, no flag"),
        ({"sample_from_anchor": "yes"}, "sample_from_anchor .* is 'yes', no flag"),
        ({"revealed_tokens": 6}, "revealed_tokens .* is 6, a block has 6 slots"),
    ]
    write_dspark(tmp_path, FORMS["deepspec"])
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    for changed, message in changes:
        file.write_text(json.dumps(settings | changed))
        refused(tmp_path, message)


def test_a_base_of_another_width(tmp_path: Path) -> None:
    write_dspark(tmp_path, FORMS["z-lab"])
    refused(tmp_path, "32 wide and brings no embedding .* the base is 48 wide", hidden=48)


def test_the_taps_that_a_dflash_head_reads_unless_it_says(tmp_path: Path) -> None:
    # By what leaves a layer 1, 7, 13, 19, 25 and 1, 8, 15, 22, 29, as the published heads have it.
    assert usual_taps(28, 5) == (2, 8, 14, 20, 26)
    assert usual_taps(32, 5) == (2, 9, 16, 23, 30)
    assert usual_taps(8, 1) == (5,)


@pytest.mark.parametrize(("name", "offset"), [("deepspec", 1), ("z-lab", 0)])
def test_what_the_file_leaves_open_is_as_its_writers_have_it(
    name: str, offset: int, tmp_path: Path
) -> None:
    write_dspark(tmp_path, FORMS[name])
    shape = read_head(tmp_path, HIDDEN, VOCAB, LAYERS).shape
    assert (shape.offset, shape.causal, shape.shows) == (offset, False, False)
