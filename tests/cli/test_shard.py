"""edgespec shard: what it writes, how it goes on, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import write_checkpoint, write_tokenizer
from support.commands import Done, run_here
from support.hub import Hub

from edgespec.cli.shard import progress_line
from edgespec.daemon.bundled_models import bundled
from edgespec.files import locked
from edgespec.model import sharding
from edgespec.model.block import Block
from edgespec.model.block_file import write_block
from edgespec.model.block_folder import BlockFolder
from edgespec.model.ends import OutputHead
from edgespec.model.tokenizer import Tokenizer

Here = Callable[..., Done]
MODEL = bundled("base")


@pytest.fixture
def here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Here:
    """Runs `edgespec shard` in this process, in a folder of its own."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(capfd, monkeypatch, "shard", *arguments)


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def ages(folder: Path) -> dict[str, int]:
    """When each block file and the head were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}


def test_it_writes_a_folder_that_a_ring_can_start_from(here: Here, tmp_path: Path) -> None:
    done = here(MODEL, "--stages", "3", "--quant", "int4")
    assert done.code == 0, done.err
    assert "stage 2: layers 3 to 5" in done.out
    folder = tmp_path / "base-int4-3stages"
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "stage-1.safetensors",
        "stage-2.safetensors",
        "stage-3.safetensors",
        "head.safetensors",
    }
    opened = BlockFolder(folder)
    assert opened.manifest.split == ((0, 3), (3, 6), (6, 8))
    for first, end in opened.manifest.split:
        Block(opened.block(first, end), first, end)
    OutputHead(opened.head())
    text = "Question: what?"
    assert Tokenizer(folder).encode(text) == Tokenizer(MODEL).encode(text)
    said = {entry.name: entry.sha256 for entry in opened.manifest.entries}
    assert {**said, "manifest.json": ""} == {**hashes(folder), "manifest.json": ""}


def test_json_has_the_sizes_and_nothing_else_is_printed(here: Here, tmp_path: Path) -> None:
    done = here(
        MODEL, "--stages", "2", "--layers", "2,6", "--quant", "int8", "--out", "o", "--json"
    )
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["split"] == [[0, 2], [2, 8]]
    assert (result["model"], result["quantisation"], result["layers"]) == ("base", "int8", 8)
    assert result["folder"] == str(tmp_path / "o")
    assert [block["bytes"] for block in result["blocks"]] == [
        (tmp_path / "o" / f"stage-{stage}.safetensors").stat().st_size for stage in (1, 2)
    ]


def test_progress_is_told_layer_by_layer_with_its_rate() -> None:
    said: list[str] = []
    seconds = iter([0.0, 3.0, 6.0, 10.0])
    news = progress_line(said.append, lambda: next(seconds))
    for what, done in (("writing a", 0), ("writing a", 1), ("writing a", 2), ("writing b", 2)):
        news(what, done, 4)
    assert said == [
        "writing a: 0 of 4 layers",
        "writing a: 1 of 4 layers, 3 s a layer",
        "writing a: 2 of 4 layers, 3 s a layer",
        "writing b: 2 of 4 layers",
    ]


REFUSED: dict[str, tuple[list[str], str]] = {
    "no stages": ([MODEL], "give --stages N, or --layers"),
    "zero stages": ([MODEL, "--stages", "0"], "0 stages; a ring has 1 to 256"),
    "too many": ([MODEL, "--stages", "9"], "9 stages for a model of 8 layers"),
    "quantisation": ([MODEL, "--stages", "2", "--quant", "int3"], "unknown quantisation 'int3'"),
    "layers": ([MODEL, "--stages", "2", "--layers", "3,x"], "layers is '3,x'; give one number"),
    "no layers": ([MODEL, "--stages", "2", "--layers", "8,0"], "layers 8,0 are no split of 8"),
    "other stages": ([MODEL, "--stages", "2", "--layers", "8"], "8 are no split of 8 layers over"),
    "other layers": (
        [MODEL, "--stages", "2", "--layers", "3,4"],
        "layers 3,4 are no split of 8 layers over 2",
    ),
    "no model": (["/none", "--stages", "2"], "there is no model folder /none"),
    "hub id": (["org/none", "--stages", "2"], "there is no folder org/none"),
    "group": (
        [bundled("draft"), "--stages", "1", "--quant", "int4-g128"],
        "int4 with groups of 128 columns does not fit",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_one_clear_error(here: Here, what: str) -> None:
    arguments, words = REFUSED[what]
    here(*arguments, "--out", "o").assert_refused(words)


class TestFolders:
    """What is there already: kept if it is ours and sound, refused if it is not ours."""

    ARGUMENTS = (MODEL, "--stages", "3", "--quant", "int8", "--out", "o")

    @pytest.fixture
    def whole(self, here: Here, tmp_path: Path) -> Path:
        assert here(*self.ARGUMENTS).code == 0
        return tmp_path / "o"

    @pytest.mark.thorough
    @pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
    def test_an_interrupted_run_goes_on(
        self,
        here: Here,
        whole: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        stop_at: int,
    ) -> None:
        expected = hashes(whole)
        shutil.rmtree(whole)
        left = stop_at

        def stopping(*arguments: object) -> object:
            nonlocal left
            if left == 0:
                Path(str(arguments[3]) + ".part").write_bytes(b"half of it")  # as when killed
                raise KeyboardInterrupt
            left -= 1
            return write_block(*arguments)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(sharding, "write_block", stopping)
            if stop_at == 3:
                patched.setattr(sharding, "write_head", lambda *_: stopping(0, 0, 0, "head"))
            assert here(*self.ARGUMENTS).code == 130
        (tmp_path / "head.part").unlink(missing_ok=True)
        assert not (whole / "manifest.json").exists()
        made = ages(whole)
        assert len(made) == stop_at
        assert here(*self.ARGUMENTS).code == 0
        assert {name: ages(whole)[name] for name in made} == made
        assert hashes(whole) == expected

    def test_a_whole_folder_is_checked_and_kept(self, here: Here, whole: Path) -> None:
        before, old = hashes(whole), ages(whole)
        assert here(*self.ARGUMENTS).code == 0
        assert (hashes(whole), ages(whole)) == (before, old)

    def test_damaged_and_missing_files_are_written_again(self, here: Here, whole: Path) -> None:
        before, old = hashes(whole), ages(whole)
        content = (whole / "stage-2.safetensors").read_bytes()
        (whole / "stage-2.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        (whole / "head.safetensors").unlink()
        (whole / "config.json").write_text("{}")
        assert here(*self.ARGUMENTS).code == 0
        assert hashes(whole) == before
        kept = ("stage-1.safetensors", "stage-3.safetensors")
        assert {name: ages(whole)[name] for name in kept} == {name: old[name] for name in kept}

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        "change", [("--quant", "none"), ("--stages", "2"), ("--layers", "2,3,3")]
    )
    def test_a_folder_of_something_else_is_left_alone(
        self, here: Here, whole: Path, change: tuple[str, str]
    ) -> None:
        before = hashes(whole)
        here(*self.ARGUMENTS, *change).assert_refused(
            "o holds base as int8, cut before layers 0, 3, 6", "--out"
        )
        assert hashes(whole) == before

    def test_a_folder_of_another_model_is_left_alone(
        self, here: Here, whole: Path, tmp_path: Path
    ) -> None:
        other = write_tokenizer(write_checkpoint(tmp_path / "other", num_hidden_layers=8))
        here(str(other), *self.ARGUMENTS[1:]).assert_refused("o holds base as int8", "--out")

    @pytest.mark.parametrize("name", ["notes.txt", "config.json", "stage-1.safetensors"])
    def test_files_of_others_are_left_alone(self, here: Here, tmp_path: Path, name: str) -> None:
        (tmp_path / "o").mkdir()
        (tmp_path / "o" / name).write_text("mine")
        here(*self.ARGUMENTS).assert_refused("o ", name, "choose a new folder with --out")
        assert (tmp_path / "o" / name).read_text() == "mine"
        assert len(list((tmp_path / "o").iterdir())) == 1

    def test_a_damaged_manifest_is_not_guessed_at(self, here: Here, whole: Path) -> None:
        (whole / "manifest.json").write_text("{")
        here(*self.ARGUMENTS).assert_refused("manifest.json", "remove o first")

    def test_a_file_in_the_way_is_named(self, here: Here, tmp_path: Path) -> None:
        (tmp_path / "o").write_text("")
        here(*self.ARGUMENTS).assert_refused("cannot make the folder o")

    def test_two_at_once_are_kept_apart(self, here: Here, whole: Path) -> None:
        with locked(whole, lambda: None):
            here(*self.ARGUMENTS).assert_refused("another process is writing o")

    def test_too_little_room_is_said_with_numbers_and_leaves_nothing_half_done(
        self, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 3 << 20))
        here(*self.ARGUMENTS).assert_refused("o needs 8.2 MiB, its disk has 3.0 MiB free")
        assert list((tmp_path / "o").iterdir()) == []


@pytest.mark.thorough
def test_a_model_of_the_hub(tmp_path: Path) -> None:
    model = write_tokenizer(write_checkpoint(tmp_path / "tiny", shard_size=12_000))
    code = """
import os
from edgespec.cli.main import main
sys.argv = ["edgespec", "shard", "org/tiny", "--stages", "2", "--quant", "int8", "--json"]
os.chdir(os.environ["HF_HOME"])
main()
"""
    (tmp_path / "home").mkdir()
    with Hub({"org/tiny": model}) as hub:
        result = hub.run(tmp_path / "home", code)
        fetched = hub.fetched()
    assert result["model"] == "tiny"
    assert sorted(set(fetched)) == sorted(fetched)  # nothing twice
    folder = tmp_path / "home" / "tiny-int8-2stages"
    assert result["folder"] == os.path.realpath(folder)
    opened = BlockFolder(folder)
    for first, end in opened.manifest.split:
        Block(opened.block(first, end), first, end)
    assert Tokenizer(folder).encode("fox") == Tokenizer(model).encode("fox")
