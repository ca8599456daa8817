"""The block library: made once, found again, never loaded damaged, shared between processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import write_checkpoint

from edgespec.config import Quantisation
from edgespec.daemon import blocks
from edgespec.daemon.blocks import BLOCK, BlockKey, BlockLibrary
from edgespec.errors import BlockDamaged, ConfigError
from edgespec.model import block_folder
from edgespec.model.block import Block
from edgespec.model.block_folder import BlockFolder, verify
from edgespec.model.loader import Checkpoint, fingerprint
from edgespec.model.sharding import Sharding
from edgespec.model.sources import QuantisingSource

INT8 = Quantisation("int8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("m") / "tiny")


@pytest.fixture
def library(tmp_path: Path) -> BlockLibrary:
    return BlockLibrary(tmp_path / "cache")


@pytest.fixture
def key(model: Path) -> BlockKey:
    return BlockKey(fingerprint(model), 1, 3, INT8)


def source_of(model: Path) -> QuantisingSource:
    return QuantisingSource(Checkpoint(model), INT8)


def parts(folder: BlockFolder, first: int = 1, end: int = 3) -> dict[str, torch.Tensor]:
    """Some tensors of a block."""
    file = folder.block(first, end)
    name = f"model.layers.{first}.mlp.up_proj.weight"
    return file.packed(name, torch.Size((48, 32)))


def test_a_block_is_made_once_and_found_again(
    model: Path, library: BlockLibrary, key: BlockKey
) -> None:
    assert library.find(key) is None
    assert not library.folder.exists()
    heard: list[tuple[int, int]] = []
    made = library.make(source_of(model), key, lambda *news: heard.append(news))
    assert heard == [(1, 2), (2, 2)]
    assert made.manifest.model == "tiny"
    assert made.manifest.fingerprint == key.fingerprint
    again = BlockLibrary(library.folder)
    found = again.find(key)
    assert found is not None
    expected = source_of(model).packed("model.layers.1.mlp.up_proj.weight", torch.Size((48, 32)))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in parts(found).items())
    Block(found.block(1, 3), 1, 3)
    heard.clear()
    again.make(source_of(model), key, lambda *news: heard.append(news))
    assert heard == []  # nothing was written


def test_every_part_of_the_key_counts(model: Path, library: BlockLibrary, key: BlockKey) -> None:
    library.make(source_of(model), key)
    for change in (
        {"fingerprint": "0" * 64},
        {"first": 0},
        {"end": 4},
        {"quantisation": Quantisation()},
    ):
        assert library.find(replace(key, **change)) is None  # type: ignore[arg-type]
    assert library.find(key) is not None


@pytest.mark.parametrize("name", [BLOCK, "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_block_is_named_and_removed_and_made_again(
    model: Path,
    library: BlockLibrary,
    key: BlockKey,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: str,
) -> None:
    file = library.make(source_of(model), key).path / name
    content = file.read_bytes()
    if damage == "flip":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        file.unlink()
    assert library.find(key) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert str(file) in record.getMessage()
    assert not file.parent.exists()
    library.make(source_of(model), key)
    assert library.find(key) is not None


def test_a_block_in_the_folder_of_another_is_not_taken_for_it(
    model: Path, library: BlockLibrary, key: BlockKey
) -> None:
    made = library.make(source_of(model), key)
    other = replace(key, fingerprint="1" * 64)
    shutil.copytree(made.path, library.folder / other.name)
    assert library.find(other) is None


def test_what_a_killed_process_left_does_no_harm(
    model: Path, library: BlockLibrary, key: BlockKey
) -> None:
    making = library.folder / f"{key.name}.making"
    making.mkdir(parents=True)
    (making / f"{BLOCK}.part").write_bytes(b"half")
    made = library.make(source_of(model), key)
    assert {path.name for path in made.path.iterdir()} == {BLOCK, "config.json", "manifest.json"}
    assert not making.exists()


def test_a_source_that_fails_leaves_nothing(model: Path, library: BlockLibrary) -> None:
    class Failing(QuantisingSource):
        def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
            if "layers.2" in name:
                raise ConfigError("no")
            return super().packed(name, shape)

    key = BlockKey("0" * 64, 1, 3, INT8)
    with pytest.raises(ConfigError, match="no"):
        library.make(Failing(Checkpoint(model), INT8), key)
    assert [path.suffix for path in library.folder.iterdir()] == [".lock"]


class TestReceiving:
    """What a transfer writes is kept when it is whole and sound, and only then."""

    @pytest.fixture
    def sender(self, model: Path, tmp_path: Path) -> BlockFolder:
        Sharding(str(model), INT8, INT8).into(tmp_path / "out", [(0, 1), (1, 3), (3, 4)], print)
        return BlockFolder(tmp_path / "out")

    @staticmethod
    def send(sender: BlockFolder, into: Path) -> None:
        for name in ("stage-2.safetensors", "config.json"):
            shutil.copy(sender.path / name, into)

    def test_a_whole_block_is_kept(
        self,
        sender: BlockFolder,
        library: BlockLibrary,
        key: BlockKey,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with library.begin(key, 1000) as incoming:
            assert incoming.found is None
            self.send(sender, incoming.folder)
            received = incoming.finish(sender.manifest)
        with monkeypatch.context() as patch:
            patch.setattr(block_folder, "verify", lambda *_: pytest.fail("it is read again"))
            received.block(1, 3)
        found = library.find(key)
        assert found is not None
        assert found.manifest == received.manifest
        assert found.manifest.split == ((1, 3),)
        assert found.manifest.head is None
        assert all(
            torch.equal(tensor, parts(sender)[name]) for name, tensor in parts(found).items()
        )
        with library.begin(key, 1000) as incoming:
            assert incoming.found is not None

    def test_what_came_stays_for_the_next_try(
        self, sender: BlockFolder, library: BlockLibrary, key: BlockKey
    ) -> None:
        with pytest.raises(ConnectionError), library.begin(key, 1000) as incoming:
            self.cut_off(incoming.folder)
        assert library.find(key) is None
        with library.begin(key, 1000) as incoming:
            assert (incoming.folder / "stage-2.safetensors.part").read_bytes() == b"some"

    @staticmethod
    def cut_off(folder: Path) -> None:
        (folder / "stage-2.safetensors.part").write_bytes(b"some")
        raise ConnectionError

    @pytest.mark.parametrize("name", ["stage-2.safetensors", "config.json"])
    def test_a_damaged_file_is_named_and_fetched_again(
        self, sender: BlockFolder, library: BlockLibrary, key: BlockKey, name: str
    ) -> None:
        with library.begin(key, 1000) as incoming:
            self.send(sender, incoming.folder)
            content = (incoming.folder / name).read_bytes()
            (incoming.folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            with pytest.raises(BlockDamaged, match=name):
                incoming.finish(sender.manifest)
            assert not (incoming.folder / name).exists()
        assert library.find(key) is None
        with library.begin(key, 1000) as incoming:
            self.send(sender, incoming.folder)
            incoming.finish(sender.manifest)
        assert library.find(key) is not None

    def test_a_manifest_of_something_else_is_refused(
        self, sender: BlockFolder, library: BlockLibrary, key: BlockKey
    ) -> None:
        for wrong in (
            replace(key, first=0),
            replace(key, quantisation=Quantisation()),
            replace(key, fingerprint="2" * 64),
        ):
            with library.begin(wrong, 1000) as incoming:
                self.send(sender, incoming.folder)
                with pytest.raises(BlockDamaged, match="of something else than layers"):
                    incoming.finish(sender.manifest)
            assert library.find(wrong) is None


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_said_with_numbers(
    model: Path, library: BlockLibrary, key: BlockKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10, 10, 5000))
    with pytest.raises(ConfigError, match=r"cache.* needs 1.0 MiB, its disk has 0.0 MiB free"):
        library.make(source_of(model), key)
    with pytest.raises(ConfigError, match=r"needs 2.00 GiB"), library.begin(key, 2**31 - 2**20):
        pass
    assert library.find(key) is None


def test_a_disk_that_fills_up_meanwhile_is_said(
    model: Path, library: BlockLibrary, key: BlockKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match=r"cannot write .*block.safetensors.*No space left"):
        library.make(source_of(model), key)
    monkeypatch.undo()
    assert library.find(key) is None
    assert [path.suffix for path in library.folder.iterdir()] == [".lock"]


def test_a_folder_that_cannot_be_used_is_named(model: Path, key: BlockKey, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot keep blocks in .*file/x.*--cache"):
        BlockLibrary(tmp_path / "file" / "x").make(source_of(model), key)


def test_the_default_folder_is_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert BlockLibrary().folder == tmp_path / "edgespec" / "blocks"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert BlockLibrary().folder == tmp_path / "home" / ".cache" / "edgespec" / "blocks"


def _make_and_count(model: str, folder: str, mark: str, start: object, answers: object) -> None:
    torch.set_num_threads(1)
    written = 0
    original = blocks.write_block

    def counting(*arguments: object) -> object:
        nonlocal written
        written += 1
        return original(*arguments)  # type: ignore[arg-type]

    blocks.write_block = counting  # type: ignore[assignment]
    start.wait()  # type: ignore[attr-defined]
    made = BlockLibrary(folder).make(source_of(Path(model)), BlockKey(mark, 0, 4, INT8))
    verify(made.path, made.manifest.blocks[0])
    answers.put((written, made.manifest.blocks[0].sha256))  # type: ignore[attr-defined]


def test_processes_that_want_the_same_block_at_once_make_it_once(
    model: Path, library: BlockLibrary, key: BlockKey
) -> None:
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(4), context.Queue()
    arguments = (str(model), str(library.folder), key.fingerprint, start, answers)
    processes = [context.Process(target=_make_and_count, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    results = [answers.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(written for written, _ in results) == [0, 0, 0, 1]
    assert len({sha256 for _, sha256 in results}) == 1
