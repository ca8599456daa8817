"""Checkpoint folders: what is read, what is refused and how, and fingerprints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import write_checkpoint

from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint, fingerprint

SHARD = 12_000  # bytes: about a layer's tensors


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "whole")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "sharded", shard_size=SHARD)
    assert len(list(folder.glob("*.safetensors"))) >= 4
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config.update(changes)
    file.write_text(json.dumps(config))


def test_one_file_and_many_hold_the_same_tensors(whole: Path, sharded: Path) -> None:
    one, many = Checkpoint(whole), Checkpoint(sharded)
    assert one.names == many.names
    assert one.layers == 4
    for name in one.names:
        assert torch.equal(one.tensor(name), many.tensor(name))


def test_a_block_reads_its_own_tensors_and_no_others(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = Checkpoint.tensor

    def counting(self: Checkpoint, name: str) -> torch.Tensor:
        read.append(name)
        return original(self, name)

    monkeypatch.setattr(Checkpoint, "tensor", counting)
    checkpoint = Checkpoint(sharded)
    assert read == []
    Block(checkpoint, 1, 3)
    expected = {n for n in checkpoint.names if n.startswith(("model.layers.1.", "model.layers.2."))}
    assert set(read) == expected
    assert len(read) == len(expected)
    read.clear()
    Block(checkpoint, 0, 1)
    assert {name for name in read if "layers.0." not in name} == {"model.embed_tokens.weight"}
    read.clear()
    Block(checkpoint, 3, 4)
    assert {name for name in read if "layers.3." not in name} == {"model.norm.weight"}
    read.clear()
    OutputHead(checkpoint)
    assert read == ["lm_head.weight"]


def test_a_block_works_without_the_files_of_other_layers(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if name.startswith("model.layers.2.")}
    for file in set(index.values()) - needed:
        (sharded / file).unlink()
    checkpoint = Checkpoint(sharded)
    Block(checkpoint, 2, 3)
    with pytest.raises(ModelError, match="download the model again"):
        Block(checkpoint, 0, 1)


def test_a_loaded_block_does_not_lean_on_the_file(whole: Path) -> None:
    block = Block(Checkpoint(whole), 0, 4)
    assert block.embedding is not None
    before = block.embedding.detach().clone()
    size = (whole / "model.safetensors").stat().st_size
    with open(whole / "model.safetensors", "r+b") as file:
        file.write(bytes(size))
    assert torch.equal(block.embedding, before)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_only_where_tied(tmp_path: Path, tied: bool) -> None:
    folder = write_checkpoint(tmp_path / "m", tie_word_embeddings=tied)
    checkpoint = Checkpoint(folder)
    hidden = torch.randn(3, 32)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    expected = hidden @ checkpoint.tensor(name).T
    block = Block(checkpoint, 0, 4)
    for share in (None, block):
        logits = OutputHead(checkpoint, share=share).logits(hidden)
        assert torch.allclose(logits, expected, atol=1e-5)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder .*nowhere"):
        Checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(whole: Path, name: str) -> None:
    (whole / name).unlink()
    with pytest.raises(ModelError, match=f"{name}.*download") as failure:
        Checkpoint(whole)
    assert str(whole) in str(failure.value)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    shard = sorted(sharded.glob("*.safetensors"))[1]
    names = [n for n in checkpoint.names if checkpoint._places[n].file == shard.name]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        checkpoint.tensor(names[0])
    with pytest.raises(ModelError, match=shard.name):
        fingerprint(sharded)


def test_pickled_weights_alone_are_refused(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pickled weights.*safetensors"):
        Checkpoint(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, r"'gpt_neox'.*use qwen3-8b"),
        ({"model_type": None}, "type None"),
        ({"model_type": "gemma4", "auto_map": {"AutoConfig": "evil.Config"}}, "gemma4"),
        ({"num_hidden_layers": "many"}, r"cannot read .*config.json"),
        ({"quantization_config": {"quant_method": "mxfp8"}}, "packed as mxfp8"),
        (
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "rope_theta": 10000.0,
                    "factor": 2.0,
                }
            },
            "'dynamic'",
        ),
        ({"sliding_window": 64}, "sliding_window 64"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    whole: Path, change: dict[str, Any], message: str
) -> None:
    edit_config(whole, **change)
    with pytest.raises(ModelError, match=message):
        Checkpoint(whole)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"{", b"\xff" * 40, b"[]"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_files_are_refused(whole: Path, name: str, content: bytes) -> None:
    (whole / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        Checkpoint(whole)


def test_a_cut_off_download_is_refused(whole: Path) -> None:
    file = whole / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"bytes, its header says"):
        Checkpoint(whole)


@pytest.mark.parametrize("target", ["../secret.safetensors", "/etc/passwd", 7])
def test_an_index_cannot_point_outside_the_folder(sharded: Path, target: object) -> None:
    file = sharded / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {"model.norm.weight": target}}))
    with pytest.raises(ModelError, match="plain file names"):
        Checkpoint(sharded)


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"no tensor 'model.layers.1.mlp.up_proj"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}, r"shape \[3, 3\]"),
        ({"model.layers.1.self_attn.q_proj.bias": torch.ones(32)}, "q_proj.bias"),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.zeros(48, 32, dtype=torch.int8)},
            "already quantised",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(
    whole: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    rewrite(whole, change)
    with pytest.raises(ModelError, match=message):
        Block(Checkpoint(whole), 0, 2)
    Block(Checkpoint(whole), 2, 4)  # another block is none the worse


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (2, 2), (3, 2), (0, 5)])
def test_a_block_lies_within_the_model(whole: Path, first: int, end: int) -> None:
    with pytest.raises(ModelError, match="4 layers"):
        Block(Checkpoint(whole), first, end)


@pytest.mark.parametrize("dtype", ["int8", "float8"])
def test_dtypes_that_models_do_not_compute_in_are_refused(whole: Path, dtype: str) -> None:
    with pytest.raises(ModelError, match=dtype):
        Block(Checkpoint(whole), 0, 1, dtype)


class TestFingerprint:
    """Equal for one model wherever and however it is stored, different for any other."""

    def test_place_sharding_and_writer_do_not_matter(
        self, whole: Path, sharded: Path, tmp_path: Path
    ) -> None:
        ours = fingerprint(whole)
        assert len(ours) == 64
        assert fingerprint(sharded) == ours
        shutil.copytree(whole, tmp_path / "elsewhere")
        edit_config(tmp_path / "elsewhere", transformers_version="4.0", _name_or_path="x")
        assert fingerprint(tmp_path / "elsewhere") == ours

    def test_other_weights_of_the_same_shape_are_another_model(self, tmp_path: Path) -> None:
        one = write_checkpoint(tmp_path / "one", seed=1)
        other = write_checkpoint(tmp_path / "other", seed=2)
        assert fingerprint(one) != fingerprint(other)

    def test_a_changed_setting_shape_or_dtype_is_another_model(self, whole: Path) -> None:
        seen = {fingerprint(whole)}
        edit_config(whole, rms_norm_eps=0.5)
        seen.add(fingerprint(whole))
        tensors = load_file(whole / "model.safetensors")
        rewrite(whole, {"model.norm.weight": tensors["model.norm.weight"].double()})
        seen.add(fingerprint(whole))
        rewrite(whole, {"model.norm.weight": tensors["model.norm.weight"].view(1, -1)})
        seen.add(fingerprint(whole))
        assert len(seen) == 4

    def test_it_is_known_from_release_to_release(self, tmp_path: Path) -> None:
        # A coordinator and a stage of different releases must agree, so this value never changes.
        config = {"model_type": "llama", "hidden_size": 2, "_name_or_path": "ignored"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        norm = torch.arange(2, dtype=torch.float32)
        save_file({"model.norm.weight": norm}, tmp_path / "model.safetensors")
        known = "bedf65711f2d2badf5604b48d494f69999e2c638178605dcc1b8e6c7b0dc9280"
        assert fingerprint(tmp_path) == known

    def test_folders_that_cannot_be_used_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="no model folder"):
            fingerprint(tmp_path / "nowhere")
