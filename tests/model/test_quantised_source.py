"""Quantising source and self-test: packing a checkpoint on the way, and what is offered at all."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_checkpoint, write_family
from support.ggufs import in_blocks
from support.tiers import tiered

from edgespec.config import FILE, NAMED, QUANTISATIONS, Quantisation
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.layers import layers_of
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised import linear, nf4, selftest
from edgespec.model.quantised.linear import dequantised, pack
from edgespec.model.source import TensorSource
from edgespec.model.sources import QuantisingSource
from edgespec.model.tree_attention import tree_mask

BUSY = "while [ $((n=n+1)) -lt 400000 ]; do :; done"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    torch.set_num_threads(1)
    return Checkpoint(write_checkpoint(tmp_path / "m"))


@pytest.fixture(autouse=True)
def fresh_verdicts() -> None:
    selftest.verdict.cache_clear()


def test_it_packs_what_the_checkpoint_has(checkpoint: Checkpoint) -> None:
    int8 = QUANTISATIONS["int8"]
    source = QuantisingSource(checkpoint, int8)
    assert (source.names, source.layers) == (checkpoint.names, checkpoint.layers)
    assert (source.path, source.config) == (checkpoint.path, checkpoint.config)
    weight = checkpoint.tensor(WEIGHT)
    expected = pack(weight, int8)
    for part, tensor in source.packed(WEIGHT, weight.shape).items():
        assert torch.equal(tensor, expected[part])
    assert torch.equal(source.tensor("model.norm.weight"), checkpoint.tensor("model.norm.weight"))


def test_a_weight_that_does_not_fit_is_named(checkpoint: Checkpoint) -> None:
    shape = checkpoint.tensor(WEIGHT).shape
    source = QuantisingSource(checkpoint, QUANTISATIONS["int4-g128"])
    assert shape[1] % 128
    with pytest.raises(ModelError, match=f"cannot hold {WEIGHT!r} of .* as int4-g128: .*choose"):
        source.packed(WEIGHT, shape)


def test_a_weight_of_another_shape_or_name_is_refused(checkpoint: Checkpoint) -> None:
    source = QuantisingSource(checkpoint, QUANTISATIONS["int8"])
    with pytest.raises(ModelError, match=r"config\.json says"):
        source.packed(WEIGHT, torch.Size((1, 2)))
    with pytest.raises(ModelError, match="has no tensor 'nothing'"):
        source.packed("nothing", torch.Size((1, 2)))


LATER = (
    *("lfm2_moe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid-experts"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"),
    *("falcon_h1", "nemotron_h", "nemotron_h-experts"),
)
"""Families of mixtures, latents and states."""


class Dequantised(Checkpoint):
    """A checkpoint whose matrices are what their packed forms stand for."""

    def __init__(self, folder: Path, form: Quantisation) -> None:
        super().__init__(folder)
        layers = layers_of(self.config, 0, self.layers)
        self._form = form
        self._packed = {
            f"model.layers.{number}.{name}"
            for number in range(self.layers)
            for name in layers.matrices(number)
        }

    def tensor(self, name: str) -> torch.Tensor:
        plain = super().tensor(name)
        if name not in self._packed:
            return plain
        return dequantised(pack(plain, self._form), plain.shape, self._form, torch.float32)


@pytest.mark.parametrize("name", tiered(LATER, ["deepseek_v3", "nemotron_h-experts"]))
def test_blocks_in_4_bits(tmp_path: Path, name: str) -> None:
    """They multiply by what is packed, and to the bit wherever they are cut; far enough for a state
    to be folded."""
    torch.set_num_threads(1)
    folder, form = write_family(tmp_path / "m", name, **in_blocks(name)), QUANTISATIONS["int4-g32"]
    packed, plain = QuantisingSource(Checkpoint(folder), form), Dequantised(folder, form)
    inputs = torch.randn((54, 32), generator=torch.Generator().manual_seed(2))
    positions, mask = torch.arange(54), tree_mask(0, np.tri(54, dtype=np.bool_))

    def rows(source: TensorSource, *cuts: int) -> torch.Tensor:
        out = inputs
        for first, end in pairwise((*cuts, packed.layers)):
            block = Block(source, first, end, "float32")
            made = block.forward(out, positions, block.new_cache(64), mask)
            assert made is not None
            out = made
        return out

    whole = rows(packed, 0)
    assert torch.equal(rows(packed, 0, 1, 3), whole)
    torch.testing.assert_close(whole, rows(plain, 0), rtol=0, atol=1e-3)
    assert (whole - rows(Checkpoint(folder), 0)).abs().max() > 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_needs_torch_alone_is_usable(dtype: str) -> None:
    verdicts = selftest.usable_quantisations(dtype, "cpu")
    assert list(verdicts) == list(NAMED)
    assert not any(reason for name, reason in verdicts.items() if not name.startswith("nf4"))


def test_forms_of_files_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selftest.usable(FILE, "bfloat16", "cpu") == ""
    selftest.verdict.cache_clear()
    real, tried = selftest.linear_from, []

    def last_is_wrong(packed: dict[str, torch.Tensor], *how: object) -> torch.nn.Module:
        form = how[2]
        tried.append(form)
        if form == selftest.FILE_FORMS[-1]:
            packed = packed | {"scales": packed["scales"] + 1}
        return real(packed, *how)  # type: ignore[arg-type]

    monkeypatch.setattr(selftest, "linear_from", last_is_wrong)
    assert "1 rows is wrong" in selftest.usable(FILE, "bfloat16", "cpu")
    assert tried == list(selftest.FILE_FORMS)


@pytest.mark.parametrize("name", ["nf4", "nf4-dq"])
def test_nf4_is_usable_where_bitsandbytes_is(name: str) -> None:
    pytest.importorskip("bitsandbytes")
    assert selftest.usable(QUANTISATIONS[name], "float32", "cpu") == ""


def test_a_dtype_that_models_do_not_compute_in_is_the_reason() -> None:
    assert "float8" in selftest.usable(QUANTISATIONS["int4"], "float8", "cpu")


def test_a_missing_library_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ModelError("nf4 needs bitsandbytes, which is not installed; choose int4")

    monkeypatch.setattr(nf4, "library", missing)
    assert "not installed" in selftest.usable(QUANTISATIONS["nf4"], "float32", "cpu")


def broken(layer_result: object) -> type[torch.nn.Module]:
    """A layer whose product is `layer_result`, or raises it."""

    class Broken(torch.nn.Module):
        def __init__(self, *arguments: object) -> None:
            super().__init__()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(layer_result, Exception):
                raise layer_result
            assert isinstance(layer_result, float)
            return torch.full((x.shape[0], 200), layer_result)

    return Broken


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (RuntimeError("no kernel image\nmore"), "its first kernel failed: no kernel image"),
        (1.0, "its result for 1 rows is wrong"),
        (float("nan"), "its result for 1 rows is wrong"),
    ],
)
def test_a_broken_kernel_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, result: object, said: str
) -> None:
    Broken = broken(result)
    monkeypatch.setattr(selftest, "linear_from", lambda *arguments: Broken())
    assert selftest.usable(QUANTISATIONS["int8"], "float32", "cpu") == said


def test_wrong_weights_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real = linear.pack
    monkeypatch.setattr(selftest, "pack", lambda weight, one: real(weight * 2, one))
    assert "weights are wrong" in selftest.usable(QUANTISATIONS["int8"], "float32", "cpu")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo imported; echo noise; echo verdict:", ""),
        ("echo imported; echo verdict: $5 is slow on $6", "float16 is slow on cuda"),
        ("echo imported; kill -ILL $$", "ended the process (SIGILL)"),
        ("kill -ILL $$", "ended the process (SIGILL)"),
        ("echo imported; echo a >&2; echo last words >&2; exit 1", "failed: last words"),
        ("echo imported; exec sleep 99", "did not end within"),
        (f"{BUSY}; echo imported; sleep 1.5; echo verdict:", ""),
        ("exec sleep 99", "did nothing for"),
    ],
)
def test_a_process_that_tries_a_kernel_may_die(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, said: str
) -> None:
    """Or take long: a machine that imports slowly has more time for the kernel, too."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(selftest.sys, "executable", str(python))
    monkeypatch.setattr(selftest, "STILL_S", 1.0)
    monkeypatch.setattr(selftest, "PATIENCE", 1.0)
    reason = selftest.usable(Quantisation.parse("nf4"), "float16", "cuda")
    assert reason == said if not said else said in reason


def test_a_process_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest.sys, "executable", "/nowhere/python")
    reason = selftest.usable(Quantisation.parse("nf4"), "float16", "cuda")
    assert "could not be tried: " in reason


def test_the_process_prints_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    selftest.main(["int8", "float32", "cpu"])
    assert capsys.readouterr().out == "imported\nverdict: \n"
