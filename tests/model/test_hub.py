"""Models by hub id: only what is asked for is downloaded, and every refusal says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint, write_tokenizer
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.hub import COMMIT, Hub

from edgespec.errors import ModelError
from edgespec.model.hub import is_hub_id, local_folder, model_files
from edgespec.model.loader import Checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    many = write_checkpoint(root / "many", shard_size=12_000)
    one = write_checkpoint(root / "one")
    pickled = write_checkpoint(root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    return {f"org/{folder.name}": write_tokenizer(folder) for folder in (many, one, pickled)}


@pytest.fixture(scope="module")
def hub(folders: dict[str, Path]) -> Iterator[Hub]:
    with Hub(folders, gated=("org/gated", "google/gemma-3-4b-it")) as running:
        yield running


def files_with(folder: Path, *parts: str) -> set[str]:
    """The weight files with tensors whose names hold one of `parts`."""
    listed = json.loads((folder / INDEX).read_text())["weight_map"]
    return {file for name, file in listed.items() if any(part in name for part in parts)}


@pytest.mark.thorough
def test_a_block_downloads_the_files_with_its_tensors_and_no_others(
    hub: Hub, folders: dict[str, Path], tmp_path: Path
) -> None:
    code = """
from edgespec.model.block import Block
checkpoint = Checkpoint("org/many")
Block(checkpoint, 1, 3)
print(json.dumps([checkpoint.layers, len(checkpoint.names), str(checkpoint.path)]))
"""
    layers, names, path = hub.run(tmp_path, code)
    assert (layers, names, path) == (4, len(Checkpoint(folders["org/many"]).names), "org/many")
    fetched = hub.fetched()
    needed = files_with(folders["org/many"], "layers.1.", "layers.2.")
    assert len(needed) < len(list(folders["org/many"].glob("*.safetensors")))
    assert sorted(fetched) == sorted({"config.json", INDEX, *needed})
    # Another block of the same model: what is there is not fetched again.
    hub.run(
        tmp_path,
        'Block = __import__("edgespec.model.block", fromlist=["Block"]).Block\n'
        'Block(Checkpoint("org/many"), 2, 4)\nprint(1)',
    )
    more = files_with(folders["org/many"], "layers.3.", "model.norm.") - needed
    assert sorted(hub.fetched()) == sorted(more)


@pytest.mark.thorough
def test_config_fingerprint_and_tokenizer_need_no_weights(
    hub: Hub, folders: dict[str, Path], tmp_path: Path
) -> None:
    code = """
from edgespec.model.tokenizer import Tokenizer
folder = local_folder("org/one")
tokens = Tokenizer(folder).encode("The quick brown fox")
print(json.dumps([fingerprint("org/one"), folder.name, tokens]))
"""
    opened = 'assert Checkpoint("org/one").layers == 4\n'
    mark, name, tokens = hub.run(tmp_path, opened + code)
    assert (len(mark), name) == (64, COMMIT)
    assert tokens
    fetched = hub.fetched()
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(fetched)
    assert not any(file.endswith(".safetensors") for file in fetched)
    # The same again without any network: what the model does not have is remembered too.
    hub.broken = True
    try:
        assert hub.run(tmp_path, code) == [mark, name, tokens]
    finally:
        hub.broken = False
        hub.fetched()


@pytest.mark.thorough
def test_a_single_file_is_fetched_with_the_first_tensor(
    hub: Hub, folders: dict[str, Path], tmp_path: Path
) -> None:
    code = """
import torch
checkpoint = Checkpoint("org/one")
print(json.dumps(checkpoint.tensor("model.norm.weight").tolist()))
"""
    values = hub.run(tmp_path, code)
    assert values == Checkpoint(folders["org/one"]).tensor("model.norm.weight").tolist()
    assert hub.fetched() == ["config.json", "model.safetensors"]


@pytest.mark.thorough
def test_every_refusal_says_what_to_do(hub: Hub, tmp_path: Path) -> None:
    code = """
models = ("org/none", "org/gated", "google/gemma-3-4b-it", "org/pickled")
print(json.dumps([refused(lambda: Checkpoint(model)) for model in models]))
"""
    unknown, gated, named, pickled = hub.run(tmp_path, code)
    assert "no folder org/none" in unknown
    assert "check the spelling" in unknown
    assert "accept it at https://huggingface.co/org/gated" in gated
    assert "hf auth login" in gated
    assert named.endswith("then run `hf auth login`; gemma-3-4b.gguf is given to all")
    assert "org/pickled holds pickled weights" in pickled
    assert "safetensors" in pickled
    assert not {"pytorch_model.bin", "model.safetensors"} & set(hub.fetched())
    (offline,) = hub.run(
        tmp_path, 'print(json.dumps([refused(lambda: Checkpoint("org/one"))]))', offline=True
    )
    assert "was not downloaded before" in offline
    assert "HF_HUB_OFFLINE" in offline
    assert hub.fetched() == []


@pytest.mark.thorough
def test_what_init_looks_at_is_refused_now_or_downloaded_later(hub: Hub, tmp_path: Path) -> None:
    code = """
from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.settings import look_into_models

def look(model):
    return look_into_models(CoordinatorConfig(model, "", 2, "float32", Address("127.0.0.1", 0)))

print(json.dumps([refused(lambda: look(sys.argv[1])) or look(sys.argv[1])]))
"""
    (unknown,) = hub.run(tmp_path, code, "org/none")
    assert "check the spelling" in unknown
    (pickled,) = hub.run(tmp_path, code, "org/pickled")
    assert "pickled weights" in pickled
    assert hub.run(tmp_path / "other", code, "org/one", offline=True) == [["org/one"]]
    assert hub.run(tmp_path, code, "org/one") == [[]]
    assert "model.safetensors" not in hub.fetched()


def test_a_hub_out_of_reach_is_tried_once_and_not_asked_who_we_are(
    hub: Hub, tmp_path: Path
) -> None:
    code = """
from huggingface_hub import constants
from edgespec.model import hub_download
from edgespec.model.hub import model_files

tries = []
constants.HF_HUB_DISABLE_TELEMETRY = False
hub_download._is_reachable = lambda endpoint: bool(tries.append(endpoint))
words = refused(lambda: model_files("org/one"))
print(json.dumps(["the hub cannot be reached" in words, len(tries) > 0]))
"""
    hub.log.clear()
    assert hub.run(tmp_path, code) == [True, True]
    assert hub.log == []


def test_what_is_written_like_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/name", "meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-0.5B"):
        assert is_hub_id(name)
    for name in ("name", "./org/name", "/org/name", "a/b/c", "../name", "org/", "~/x", "org/na me"):
        assert not is_hub_id(name)
        with pytest.raises(ModelError, match=r"no model folder .*ORGANISATION/NAME"):
            model_files(name)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert not is_hub_id("org/name")


def test_a_folder_is_its_own_local_folder(folders: dict[str, Path]) -> None:
    assert local_folder(folders["org/one"]) == folders["org/one"]


@pytest.mark.thorough
def test_of_gguf_files_the_one_that_is_named_is_downloaded(tmp_path: Path) -> None:
    code = """
from edgespec.model.sources import open_source
from edgespec.model.tokenizer import Tokenizer
name = "org/packed/m.gguf"
source = open_source(name)
tokens = Tokenizer(local_folder(name)).encode("fox")
missing = refused(lambda: open_source("org/packed/other.gguf"))
print(json.dumps([source.layers, str(source.path), len(tokens) > 1, missing]))
"""
    folder = tmp_path / "packed"
    folder.mkdir()
    original = write_checkpoint(tmp_path / "original", intermediate_size=64)
    write_gguf(original, folder / "m.gguf", all_as("Q8_0"), tokenizer_values(tmp_path))
    (folder / "m.IQ4_XS.gguf").write_bytes(b"another")
    with Hub({"org/packed": folder}) as hub:
        layers, path, has_tokens, missing = hub.run(tmp_path, code)
        assert (layers, path, has_tokens) == (4, "org/packed/m.gguf", True)
        assert "org/packed on the Hugging Face Hub has no other.gguf" in missing
        assert set(hub.fetched()) == {"m.gguf"}
