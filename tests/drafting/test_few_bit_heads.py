"""A draft's own output head in few bits: it guesses as a model with the rounded matrix would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint, write_tokenizer
from torch import float64

from edgespec.config import QUANTISATIONS
from edgespec.drafting.registry import BUILDERS, BaseParts
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised, pack
from edgespec.model.source import LM_HEAD
from edgespec.types.features import NO_FEATURES
from edgespec.verify.sampling import Sampling


@pytest.mark.parametrize("name", ["independent", "easyspec"])
def test_a_draft_s_head_is_held_as_it_is_asked_for(name: str, tmp_path: Path) -> None:
    int8 = QUANTISATIONS["int8"]
    folders = [
        write_tokenizer(write_checkpoint(tmp_path / which, num_hidden_layers=6, seed=3))
        for which in ("draft", "rounded")
    ]
    file = folders[1] / "model.safetensors"
    tensors = load_file(file)
    tensors[LM_HEAD] = tensors[LM_HEAD].double()
    shape = tensors[LM_HEAD].shape
    tensors[LM_HEAD] = dequantised(pack(tensors[LM_HEAD], int8), shape, int8, float64)
    save_file(tensors, file, {"format": "pt"})
    source = Checkpoint(folders[0])
    plain = BaseParts(folders[0], source, OutputHead(source, "float64"), "float64", "cpu")
    scores = []
    for folder, parts in (
        (folders[0], replace(plain, head_quantisation=int8)),
        (folders[1], plain),
        (folders[0], plain),
    ):
        guesser = BUILDERS[name](str(folder), parts)
        guesser.open(1, Sampling())
        assert guesser.read(1, (5, 9, 3), NO_FEATURES)
        scores.append(guesser.guess(1, [(), (7,)], 8).scores)
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-9)
    assert np.abs(scores[0] - scores[2]).max() > 1e-7
