"""Block files: what is written is what is computed with, one tensor at a time."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.cases import case
from support.checkpoints import (
    FAMILY_SETTINGS,
    LATER_TYPES,
    write_checkpoint,
    write_family,
    write_tokenizer,
)
from support.packed_forms import FORMS, MixedSource
from support.tiers import tiered

from edgespec.config import FILE, NAMED, Quantisation
from edgespec.errors import BlockDamaged, ConfigError, ModelError
from edgespec.model.block import Block
from edgespec.model.block_file import BlockFile, write_block, write_head
from edgespec.model.block_folder import BlockFolder, verify
from edgespec.model.ends import OutputHead
from edgespec.model.inventory import block_inventory, stored_bytes
from edgespec.model.loader import Checkpoint
from edgespec.model.safetensors_writer import PADDING, SafetensorsWriter, Slot
from edgespec.model.sharding import Sharding
from edgespec.model.source import TensorSource
from edgespec.model.sources import QuantisingSource
from edgespec.model.tree_attention import tree_mask

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # every group of columns fits
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            one.kind == "nf4" and find_spec("bitsandbytes") is None, reason="needs bitsandbytes"
        ),
    )
    for name, one in NAMED.items()
]


def quiet(*_: object) -> None:
    """Progress that nobody looks at."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = write_checkpoint(tmp_path_factory.mktemp("m") / "tiny", kind="qwen2", **WIDE)
    return write_tokenizer(folder)


def source_of(folder: Path, name: str) -> TensorSource:
    plain = Checkpoint(folder)
    if name == "file":
        return MixedSource(plain)
    return plain if name == "none" else QuantisingSource(plain, Quantisation.parse(name))


def sharded(model: Path, folder: Path, name: str = "none") -> BlockFolder:
    """The model in two stages of three layers and one."""
    held = Quantisation.parse("none" if name == "file" else name)
    sharding = Sharding(str(model), held, held)
    if name == "file":
        sharding._source = sharding._head = source_of(model, name)
    sharding.into(folder, [(0, 3), (3, 4)], quiet)
    return BlockFolder(folder)


def run(block: Block, seed: int = 0) -> torch.Tensor:
    """What a block makes of a few random rows behind a few others."""
    generator = torch.Generator().manual_seed(seed)
    cache = block.new_cache(16)
    results = []
    for start, rows in ((0, 5), (5, 3)):
        if block.first == 0:
            inputs = torch.randint(0, block.vocab_size, (rows,), generator=generator)
        else:
            inputs = torch.randn(rows, block.hidden_size, generator=generator).to(block.dtype)
        mask = tree_mask(start, np.tri(rows, dtype=np.bool_))
        out = block.forward(inputs, torch.arange(start, start + rows), cache, mask)
        assert out is not None
        results.append(out)
    return torch.cat(results)


def test_what_was_read_is_given_back_and_read_again(model: Path, tmp_path: Path) -> None:
    """By the kernel's own count of pages of the file that this process has."""

    def held() -> int:
        maps = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
        of_file = [one for one in maps if str(source.path) in one]
        return sum(int(re.findall(r"Rss: +(\d+) kB", one)[0]) << 10 for one in of_file)

    source = sharded(model, tmp_path).block(0, 3)
    weight = "model.layers.1.mlp.down_proj.weight"
    first = source.tensor(weight).clone()
    size = first.nbytes
    before = held()
    assert before >= size
    source.give_back()
    assert held() <= before - size + 2 * mmap.PAGESIZE
    assert torch.equal(source.tensor(weight), first)


class TestWriter:
    """Files that the format's own library reads, with every tensor aligned."""

    def test_the_library_reads_what_is_written(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(3)
        tensors = {}
        for index, dtype in enumerate(
            (torch.uint8, torch.float64, torch.bfloat16, torch.int8, torch.float16, torch.int32)
        ):
            for shape in ((), (0,), (index + 1,), (3, 5), (2, 3, 7)):
                made = (torch.rand(shape, generator=generator) * 100).to(dtype)
                tensors[f"{index}.{len(shape)}.{'x'.join(map(str, shape))}"] = made
        slots = [Slot(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        writer = SafetensorsWriter(slots, {"kind": "grün", "n": "1"})
        path = tmp_path / "x.safetensors"
        with writer.into(path) as file:
            for name, tensor in tensors.items():
                file.append(name, tensor)
        assert path.stat().st_size == writer.bytes
        read = load_file(path)
        assert {name for name in read if not name.startswith(PADDING)} == set(tensors)
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"kind": "grün", "n": "1"}
            assert all(opened.get_tensor(name).data_ptr() % 64 == 0 for name in tensors)

    def test_the_hash_is_that_of_the_file(self, tmp_path: Path) -> None:
        many = torch.arange(3_000_000, dtype=torch.int32)  # several pieces
        writer = SafetensorsWriter([Slot("a", many.shape, many.dtype)], {})
        with writer.into(tmp_path / "x") as file:
            file.append("a", many)
        printed = subprocess.run(["sha256sum", tmp_path / "x"], capture_output=True, text=True)
        assert file.sha256 == printed.stdout.split()[0]

    def test_views_are_written_as_they_are_seen(self, tmp_path: Path) -> None:
        base = torch.arange(24.0).reshape(4, 6)
        seen = {"t": base.T, "s": base[1:3, ::2], "e": torch.ones(1).expand(5)}
        slots = [Slot(name, tensor.shape, tensor.dtype) for name, tensor in seen.items()]
        with SafetensorsWriter(slots, {}).into(tmp_path / "x") as file:
            for name, tensor in seen.items():
                file.append(name, tensor)
        read = load_file(tmp_path / "x")
        assert all(torch.equal(read[name], tensor) for name, tensor in seen.items())

    @pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
    def test_another_tensor_than_announced_leaves_no_file(
        self, tmp_path: Path, wrong: torch.Tensor
    ) -> None:
        writer = SafetensorsWriter([Slot("a", torch.Size((2,)), torch.float32)], {})
        with pytest.raises(AssertionError), writer.into(tmp_path / "x") as file:
            file.append("a", wrong)
        with pytest.raises(AssertionError, match="not all"), writer.into(tmp_path / "x"):
            pass
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupted_file_does_not_replace_the_last_one(self, tmp_path: Path) -> None:
        path = tmp_path / "x"
        writer = SafetensorsWriter([Slot("a", torch.Size((2,)), torch.float32)], {})
        with writer.into(path) as file:
            file.append("a", torch.ones(2))
        interrupted = self.interrupted(writer, path)
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert torch.equal(load_file(path)["a"], torch.ones(2))
        assert list(tmp_path.iterdir()) == [path]

    @staticmethod
    def interrupted(writer: SafetensorsWriter, path: Path) -> Callable[[], None]:
        def write() -> None:
            with writer.into(path) as file:
                file.append("a", torch.zeros(2))
                raise KeyboardInterrupt

        return write


class TestBlocks:
    """A block from its file is the block from the checkpoint, bit by bit."""

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("dtype", tiered(["float32", "bfloat16"], ["bfloat16"]))
    def test_a_block_from_its_file_computes_the_same(
        self, model: Path, tmp_path: Path, name: str, dtype: str
    ) -> None:
        folder = sharded(model, tmp_path / "out", name)
        source = source_of(model, name)
        for first, end in folder.manifest.split:
            ours = Block(folder.block(first, end), first, end, dtype)
            made = Block(source, first, end, dtype)
            assert torch.equal(run(ours), run(made))
        head, made_head = OutputHead(folder.head(), dtype), OutputHead(source, dtype)
        rows = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).to(head.dtype)
        assert np.array_equal(head.logits(rows), made_head.logits(rows))

    @pytest.mark.parametrize(
        "family",
        tiered(FAMILY_SETTINGS, [*(set(FAMILY_SETTINGS) - set(LATER_TYPES)), "gpt_oss"]),
    )
    def test_a_file_has_exactly_what_a_block_asks_for(
        self, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint = Checkpoint(write_family(tmp_path / "m", family))
        source = QuantisingSource(checkpoint, Quantisation("int8"))
        for first, end in ((0, 1), (1, 3), (0, checkpoint.layers)):
            asked: set[tuple[str, bool]] = set()
            with monkeypatch.context() as patched:
                record(patched, asked)
                Block(source, first, end)
            listed = {(one.name, one.packed) for one in block_inventory(source, first, end)}
            assert listed == asked
            write_block(source, first, end, tmp_path / "b")
            with safe_open(tmp_path / "b", "pt") as opened:
                stored = {n for n in opened.keys() if not n.startswith(PADDING)}  # noqa: SIM118
            weights = {name for name, packed in listed if packed}
            assert {n.rpartition(".")[0] for n in stored} >= weights
            assert {n for n in stored if n.rpartition(".")[0] not in weights} == {
                name for name, packed in listed if not packed
            }

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_head_is_there_where_it_is_tied_as_well(self, tmp_path: Path, tied: bool) -> None:
        folder = write_checkpoint(tmp_path / "m", tie_word_embeddings=tied)
        source = Checkpoint(folder)
        entry = write_head(source, tmp_path / "head.safetensors")
        verify(tmp_path, entry)
        (name,) = load_file(tmp_path / "head.safetensors")
        assert name == ("model.embed_tokens.weight" if tied else "lm_head.weight")

    def test_tensors_stay_views_of_the_file(self, model: Path, tmp_path: Path) -> None:
        folder = sharded(model, tmp_path / "out", "int8")
        source = folder.block(0, 3)
        assert source.mapped
        name = "model.layers.0.mlp.up_proj.weight"
        shape = torch.Size((512, 256))
        one, other = source.packed(name, shape), source.packed(name, shape)
        for part in one:
            assert one[part].data_ptr() == other[part].data_ptr()
            assert one[part].data_ptr() % 64 == 0
            assert mapped_file(one[part].data_ptr()) == str(source.path)
        plain = source.tensor("model.layers.0.input_layernorm.weight")
        block = Block(source, 0, 3, "float32")
        assert block.embedding is not None
        assert mapped_file(block.embedding.data_ptr()) == str(source.path)
        assert mapped_file(plain.data_ptr()) == str(source.path)

    def test_the_embedding_is_looked_up_in_the_file(self, model: Path, tmp_path: Path) -> None:
        """Whatever the block computes in: rounding what was looked up is looking up what was
        rounded."""
        source = sharded(model, tmp_path / "out", "int8").block(0, 3)
        tokens = torch.tensor([5, 0, 5, 17])
        for dtype in ("bfloat16", "float64"):
            block, own = (Block(one, 0, 3, dtype) for one in (source, Checkpoint(model)))
            assert block.embedding is not None
            assert own.embedding is not None
            assert mapped_file(block.embedding.data_ptr()) == str(source.path)
            assert own.embedding.dtype == own.dtype
            rows = block.embedded(tokens)
            assert rows.dtype == block.dtype
            assert torch.equal(rows, own.embedded(tokens))

    def test_names_are_those_of_the_checkpoint(self, model: Path, tmp_path: Path) -> None:
        folder = sharded(model, tmp_path / "out", "int4")
        names = folder.block(0, 3).names | folder.block(3, 4).names | folder.head().names
        assert names == Checkpoint(model).names
        with pytest.raises(ModelError, match=r"no tensor 'model\.layers\.3"):
            folder.block(0, 3).tensor("model.layers.3.input_layernorm.weight")

    @pytest.mark.parametrize("name", NAMES)
    def test_the_size_is_known_before(self, model: Path, tmp_path: Path, name: str) -> None:
        source = source_of(model, name)
        entry = write_block(source, 0, 2, tmp_path / "b")
        said = stored_bytes(block_inventory(source, 0, 2), torch.float32)
        assert 0 <= entry.bytes - said < 16_000  # the header, and what aligns tensors

    def test_each_matrix_keeps_its_own_form(self, model: Path, tmp_path: Path) -> None:
        folder, source = sharded(model, tmp_path / "out", "file"), MixedSource(Checkpoint(model))
        assert folder.manifest.quantisation == FILE
        file, found = folder.block(0, 3), set()
        for one in block_inventory(source, 0, 3):
            if not one.name.endswith("_proj.weight"):
                continue
            assert file.form(one.name) == one.form
            found.add(one.form)
            if one.packed:
                kept, made = file.packed(one.name, one.shape), source.packed(one.name, one.shape)
                assert kept.keys() == made.keys()
                assert all(torch.equal(kept[part], made[part]) for part in made)
        assert found == {Quantisation(), *FORMS.values()}

    def test_wrong_forms_are_damage(self, model: Path, tmp_path: Path) -> None:
        entry = write_block(MixedSource(Checkpoint(model)), 0, 1, tmp_path / "b")
        content = (tmp_path / "b").read_bytes()
        config = Checkpoint(model).config
        for old, new in ((b"int4", b"int3"), (b":32", b":{}"), (b":true", b":null")):
            where = content.index(b'forms":"') + 8
            (tmp_path / "b").write_bytes(content[:where] + content[where:].replace(old, new, 1))
            with case(old, new), pytest.raises(BlockDamaged, match="forms of"):
                BlockFile(tmp_path / entry.name, config, FILE)

    def test_progress_counts_layers(self, model: Path, tmp_path: Path) -> None:
        heard: list[tuple[int, int]] = []
        write_block(Checkpoint(model), 1, 4, tmp_path / "b", lambda *news: heard.append(news))
        assert heard == [(1, 3), (2, 3), (3, 3)]

    def test_what_does_not_fit_the_config_is_refused(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "m")
        file = folder / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        strange = "model.layers.1.self_attn.q_proj.bias"
        save_file({**tensors, strange: torch.ones(32)}, file, {"format": "pt"})
        with pytest.raises(ModelError, match=strange):
            write_block(Checkpoint(folder), 0, 2, tmp_path / "b")
        write_block(Checkpoint(folder), 2, 4, tmp_path / "b")
        norm = "model.layers.1.input_layernorm.weight"
        save_file({**tensors, norm: torch.zeros(7)}, file, {"format": "pt"})
        with pytest.raises(ModelError, match=r"shape \[7\], config.json says \[32\]"):
            write_block(Checkpoint(folder), 0, 2, tmp_path / "c")
        with pytest.raises(ModelError, match="columns"):  # 48 columns, groups of 64
            write_block(source_of(folder, "int4"), 2, 3, tmp_path / "c")
        with pytest.raises(ModelError, match="4 layers"):
            write_block(Checkpoint(folder), 3, 5, tmp_path / "c")
        assert not (tmp_path / "c").exists()


OLDER = {
    "glm4": {
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
    },
    "gpt_oss": {".mlp.gate.": ".mlp.router."},
    "hunyuan_v1_dense": {".q_norm.": ".query_layernorm.", ".k_norm.": ".key_layernorm."},
    "ernie4_5_moe": {".mlp.expert_bias": ".mlp.gate.moe_statics.e_score_correction_bias"},
}
"""Names of today, and what blocks had that were cut while transformers' layers ran them."""


def test_a_block_with_older_names_says_to_cut_it_again(tmp_path: Path) -> None:
    """And is never read as something else, though a name may stand for another tensor now. It said
    to download the model."""
    for name, older in OLDER.items():
        source = Checkpoint(write_family(tmp_path / name, name))
        last = source.layers - 1
        write_block(source, last, last + 1, tmp_path / "block")
        block = BlockFile(tmp_path / "block", source.config, source.quantisation)
        Block(block, last, last + 1)
        tensors = {}
        for one in block.names:
            new = next((new for new in older if new in one), "")
            tensors[one.replace(new, older.get(new, ""))] = block.tensor(one).clone()
        assert tensors.keys() != block.names
        save_file(tensors, tmp_path / "older")
        with (
            case(name),
            pytest.raises(ModelError, match=r"an older edgespec cut it, .*`edgespec shard`"),
        ):
            Block(BlockFile(tmp_path / "older", source.config, source.quantisation), last, last + 1)


def record(patched: pytest.MonkeyPatch, asked: set[tuple[str, bool]]) -> None:
    """Note every name that QuantisingSource is asked for, and whether packed."""
    plain, packed = QuantisingSource.tensor, QuantisingSource.packed
    looked_up = QuantisingSource.table

    def tensor(self: QuantisingSource, name: str) -> torch.Tensor:
        asked.add((name, False))
        return plain(self, name)

    def weight(self: QuantisingSource, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        asked.add((name, True))
        return packed(self, name, shape)

    def table(self: QuantisingSource, name: str) -> tuple[str, torch.Tensor]:
        asked.add((name, False))
        return looked_up(self, name)

    patched.setattr(QuantisingSource, "table", table)
    patched.setattr(QuantisingSource, "tensor", tensor)
    patched.setattr(QuantisingSource, "packed", weight)


def mapped_file(address: int) -> str:
    """The file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= address < int(end, 16):
            return line.split(maxsplit=5)[-1]
    raise AssertionError("not mapped")


def test_a_file_that_cannot_be_written_is_said(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*/no/b, .* MiB \(No such file"):
        write_block(Checkpoint(model), 0, 1, tmp_path / "no" / "b")


MEMORY = """
import resource, sys
from pathlib import Path
import torch
from edgespec.config import Quantisation
from edgespec.model.block_file import write_block
from edgespec.model.loader import Checkpoint
from edgespec.model.sources import QuantisingSource

torch.set_num_threads(1)
source = QuantisingSource(Checkpoint(sys.argv[1]), Quantisation("int8"))
write_block(source, 7, 8, Path(sys.argv[2]))  # whatever the first time costs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
entry = write_block(source, 0, 8, Path(sys.argv[2]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) * 1024, entry.bytes)
"""


@pytest.mark.thorough
def test_memory_holds_one_tensor_and_not_a_block(tmp_path: Path) -> None:
    # A layer has 9.4 MB in float32, its largest tensor 2.6 MB.
    folder = write_checkpoint(
        tmp_path / "m",
        num_hidden_layers=8,
        hidden_size=512,
        intermediate_size=1280,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=512,
    )
    command = [sys.executable, "-c", MEMORY, str(folder), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    growth, size = map(int, done.stdout.split())
    print(f"writing {size} bytes of a block grew the peak memory by {growth} bytes")
    assert size > 20e6
    assert growth < 3e6
