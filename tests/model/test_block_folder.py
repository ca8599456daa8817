"""Block folders: whatever damages one is found and named, and nothing of it is loaded."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from support.cases import case
from support.checkpoints import write_checkpoint, write_tokenizer

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.errors import BlockDamaged, ConfigError, ModelError
from edgespec.model.block_file import write_block
from edgespec.model.block_folder import BlockFolder, put_manifest, require_room
from edgespec.model.hub import TOKENIZER_FILES
from edgespec.model.loader import Checkpoint
from edgespec.model.manifest import MANIFEST, Manifest, manifest_of, read_manifest
from edgespec.model.sharding import Sharding
from edgespec.model.sources import QuantisingSource

INT8 = Quantisation("int8")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two blocks, of three layers and one, to be copied."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("made")
    model = write_tokenizer(write_checkpoint(root / "tiny", kind="qwen2"))
    Sharding(str(model), INT8, INT8).into(root / "out", [(0, 3), (3, 4)], lambda *_: None)
    return root / "out"


class TestDamage:
    """Whatever happens to a file: it is found, named, and nothing of it is loaded."""

    @pytest.fixture
    def folder(self, made: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(made, tmp_path / "out"))

    @staticmethod
    def open_all(folder: Path) -> None:
        opened = BlockFolder(folder)
        for first, end in opened.manifest.split:
            opened.block(first, end)
        opened.head()

    @pytest.fixture
    def change(self, folder: Path) -> Callable[[str, Callable[[bytes], bytes]], str]:
        """Changes a file, and gives what opening the folder says; puts it right again."""

        def changed(name: str, how: Callable[[bytes], bytes]) -> str:
            original = (folder / name).read_bytes()
            (folder / name).write_bytes(how(original))
            try:
                with pytest.raises(BlockDamaged, match=name) as found:
                    self.open_all(folder)
            finally:
                (folder / name).write_bytes(original)
            return str(found.value)

        return changed

    def test_a_sound_folder_opens(self, folder: Path) -> None:
        self.open_all(folder)

    def test_any_flipped_bit(
        self, folder: Path, change: Callable[[str, Callable[[bytes], bytes]], str]
    ) -> None:
        for seed in range(40):
            chance = random.Random(seed)
            name = chance.choice(sorted(p.name for p in folder.iterdir() if p.name != MANIFEST))
            original = (folder / name).read_bytes()
            damaged = bytearray(original)
            damaged[chance.randrange(len(original))] ^= 1 << chance.randrange(8)
            with case("seed", seed):
                assert "SHA-256" in change(name, lambda old, new=bytes(damaged): new)

    def test_any_length_but_the_right_one(
        self, folder: Path, change: Callable[[str, Callable[[bytes], bytes]], str]
    ) -> None:
        for seed in range(20):
            chance = random.Random(seed)
            name = chance.choice(sorted(p.name for p in folder.iterdir() if p.name != MANIFEST))
            cut = chance.randrange((folder / name).stat().st_size)
            more = chance.randbytes(chance.randrange(1, 5000))
            with case("seed", seed):
                assert "cut off" in change(name, lambda old, cut=cut: old[:cut])
                assert "something was added" in change(name, lambda old, more=more: old + more)

    def test_a_file_that_is_missing_or_of_another_stage(self, folder: Path, tmp_path: Path) -> None:
        one, two = folder / "stage-1.safetensors", folder / "stage-2.safetensors"
        aside = tmp_path / "aside"
        os.replace(one, aside)
        with pytest.raises(BlockDamaged, match=r"stage-1.safetensors is missing; make .* again"):
            self.open_all(folder)
        os.replace(two, one)
        os.replace(aside, two)
        with pytest.raises(BlockDamaged, match=r"stage-1.safetensors has \d+ bytes"):
            self.open_all(folder)
        BlockFolder(folder).head()

    def test_a_file_of_another_model_of_the_same_size(self, folder: Path, tmp_path: Path) -> None:
        other = write_checkpoint(tmp_path / "other", kind="qwen2", seed=9)
        write_block(QuantisingSource(Checkpoint(other), INT8), 0, 3, folder / "stage-1.safetensors")
        with pytest.raises(BlockDamaged, match=r"stage-1.safetensors was changed"):
            self.open_all(folder)

    def test_every_value_of_the_manifest_is_sealed(self, folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        places = list(places_in(content))
        assert len(places) > 30
        for *path, last in places:
            edited = json.loads(json.dumps(content))
            holder = edited
            for step in path:
                holder = holder[step]
            old = holder[last]
            holder[last] = old + 1 if isinstance(old, int) else f"{old}0"
            (folder / MANIFEST).write_text(json.dumps(edited))
            with pytest.raises(BlockDamaged, match=MANIFEST):
                BlockFolder(folder)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
    def test_a_manifest_that_is_none(self, folder: Path, content: bytes) -> None:
        (folder / MANIFEST).write_bytes(content)
        with pytest.raises(BlockDamaged, match=MANIFEST):
            BlockFolder(folder)

    def test_a_file_is_hashed_once_for_each_opening(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        heard: list[tuple[int, int]] = []
        opened = BlockFolder(folder)
        opened.block(0, 3, lambda *news: heard.append(news))
        size = (folder / "stage-1.safetensors").stat().st_size
        assert heard[-1] == (size, size)
        heard.clear()
        opened.block(0, 3, lambda *news: heard.append(news))
        assert heard == []

    def test_a_block_that_is_not_there_is_said_with_those_that_are(self, folder: Path) -> None:
        with pytest.raises(ModelError, match=r"layers 1 to 2, only of 0 to 2, 3 to 3"):
            BlockFolder(folder).block(1, 3)


def places_in(content: Any) -> Any:
    """The way to every number and text in a JSON value."""
    pairs: Any = ()
    if isinstance(content, dict):
        pairs = content.items()
    elif isinstance(content, list):
        pairs = enumerate(content)
    for key, value in pairs:
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in places_in(value))
        elif value is not None:
            yield (key,)


class TestManifest:
    """A manifest with a right seal and wrong values, as another program might write."""

    @pytest.fixture
    def manifest(self, made: Path, tmp_path: Path) -> Manifest:
        return BlockFolder(Path(shutil.copytree(made, tmp_path / "out"))).manifest

    def test_it_is_read_as_it_was_written(self, manifest: Manifest, tmp_path: Path) -> None:
        assert manifest_of(tmp_path / "out") == manifest
        assert Manifest.from_json(json.dumps(manifest.to_dict()), "x") == manifest
        assert manifest.split == ((0, 3), (3, 4))
        assert manifest.layers_of_stages == (3, 1)
        assert manifest.quantisation == QUANTISATIONS["int8"]
        assert {"config.json", "tokenizer.json"} <= {file.name for file in manifest.files}
        assert {file.name for file in manifest.files} <= {"config.json", *TOKENIZER_FILES}
        assert manifest_of(tmp_path) is None
        assert manifest_of("no/where") is None

    def test_a_wrong_value_is_named(self, manifest: Manifest, tmp_path: Path) -> None:
        for change, message in (
            ({"format": 2}, "has format 2, and this edgespec reads format 1"),
            ({"extra": 1}, "unknown key 'extra'"),
            ({"layers": "4"}, "layers is '4'"),
            ({"layers": 3}, "blocks go up to layer 3 of 3 layers"),
            ({"layers": True}, "layers is True"),
            ({"fingerprint": "xyz"}, "fingerprint is 'xyz'"),
            ({"quantisation": "int3"}, "quantisation is 'int3'.*nf4-dq"),
            ({"quantisation": ["nf4"]}, "quantisation is"),
            ({"quantisation": {"kind": "nf4"}}, "quantisation is"),
            ({"dtype": "int8"}, "dtype is 'int8'; it must be one of: float32"),
            ({"model": ""}, "model is ''"),
            ({"version": None}, "version is None"),
            ({"blocks": {}}, "blocks is {}; it must be a list"),
            ({"head": 3}, "head is 3; it must be an object"),
            ({"files": [{"name": "a"}]}, r"the key 'bytes' is missing in files\[0\]"),
        ):
            self.refused(tmp_path, {**manifest.to_dict(), **change}, message)

    def test_a_wrong_entry_is_named(self, manifest: Manifest, tmp_path: Path) -> None:
        for change, message in (
            ({"name": "../x"}, r"blocks\[0\]: name '../x' is no plain file name"),
            ({"name": "/etc/passwd"}, "no plain file name"),
            ({"name": MANIFEST}, "no plain file name"),
            ({"name": 7}, "name is 7"),
            ({"name": "a\0"}, "no plain file name"),
            ({"name": "head.safetensors"}, "listed twice"),
            ({"bytes": -1}, "bytes is -1"),
            ({"sha256": "A" * 64}, "sha256"),
            ({"end": 0}, "first 0 and end 0"),
            ({"end": 4}, "blocks overlap"),
            ({"first": 1.5}, "first is 1.5"),
            ({"size": 1}, r"unknown key 'size' in blocks\[0\]"),
        ):
            content = manifest.to_dict()
            content["blocks"] = [{**content["blocks"][0], **change}, *content["blocks"][1:]]
            self.refused(tmp_path, content, message)

    @staticmethod
    def refused(folder: Path, content: dict[str, Any], message: str) -> None:
        from edgespec.model.manifest import _seal

        content = {key: value for key, value in content.items() if key != "seal"}
        file = folder / MANIFEST
        file.write_text(json.dumps({**content, "seal": _seal(content)}))
        with pytest.raises(BlockDamaged, match=message) as found:
            read_manifest(file)
        assert str(file) in str(found.value)

    def test_a_config_of_other_layers_is_refused(self, manifest: Manifest, tmp_path: Path) -> None:
        put_manifest(structs.replace(manifest, layers=5), tmp_path / "out" / MANIFEST)
        with pytest.raises(BlockDamaged, match=r"a model of 4 layers.*one of 5"):
            BlockFolder(tmp_path / "out")


def test_a_full_disk_is_said_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 1073741824.00 GiB, its disk has \d+\.\d\d GiB"):
        require_room(tmp_path, 2**60)
    require_room(tmp_path, 0)
