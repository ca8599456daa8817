"""GGUF files as untrusted input: what is refused, damaged files, split ones, fingerprints."""

from __future__ import annotations

import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import case
from support.checkpoints import write_family
from support.ggufs import all_as, tokenizer_values, write_gguf
from support.own_cache import own_cache
from support.tiers import examples

from edgespec.errors import ModelError
from edgespec.model.gguf.architectures import places
from edgespec.model.gguf.configs import config_of
from edgespec.model.gguf.llama3_rope import Llama3, llama3_settings
from edgespec.model.gguf.reader import open_gguf
from edgespec.model.gguf.vocabulary import tokenizer_files
from edgespec.model.hub import model_files, require_model
from edgespec.model.loader import fingerprint
from edgespec.model.sources import open_source

MOST_KILOBYTES = 64 << 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gguf")
    folder = write_family(root / "original", "llama", intermediate_size=64, num_hidden_layers=2)
    write_gguf(folder, root / "m.gguf", all_as("Q8_0"), tokenizer_values(root))
    return root / "m.gguf"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


def read_all(file: Path) -> None:
    """Everything that is made of a header, and one tensor of each kind."""
    opened = open_gguf(file)
    settings = config_of(opened)
    heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    places(opened, *heads, settings["num_hidden_layers"], ())
    tokenizer_files(opened)


def test_damaged_files_give_model_errors_and_take_little_memory(model: Path) -> None:
    whole = model.read_bytes()
    header = len(whole) - sum(t.bytes for t in open_gguf(model).tensors.values())
    numbers = iter(range(1 << 30))

    @examples(160, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, header), st.integers(0, 255)), max_size=4),
        st.one_of(st.none(), st.integers(0, len(whole))),
    )
    def damaged(changes: list[tuple[int, int]], end: int | None) -> None:
        content = bytearray(whole)
        for place, byte in changes:
            content[place] = byte
        file = model.with_name(f"damaged-{next(numbers)}.gguf")
        file.write_bytes(content[:end])
        with suppress(ModelError):
            read_all(file)
        file.unlink()

    read_all(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    damaged()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KILOBYTES


def written(file: Path, changes: dict[str, object], **tensors: np.ndarray) -> Path:
    """A file of a few keys and tensors, in one case damaged by hand."""
    writer = gguf.GGUFWriter(file, str(changes.pop("architecture", "llama")))
    for key, value in changes.items():
        writer.add_uint32(key, value) if isinstance(value, int) else writer.add_string(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_what_is_not_read_is_named(model: Path, tmp_path: Path) -> None:
    whole = model.read_bytes()
    cases = {
        "not a GGUF file;": b"GGML" + whole[4:],
        "not a GGUF file but Git LFS' pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "version 9": whole[:4] + b"\x09\0\0\0" + whole[8:],
        "big-endian": whole[:4] + b"\0\0\0\x03" + whole[8:],
        r"cut off \(it has": whole[:-4],
        r"cut off \(it ends within": whole[:500],
        r"cut off \(it is empty": b"",
        "counts 1099511627775": whole[:8] + b"\xff" * 5 + b"\0\0\0" + whole[16:],
        "architecture 'gpt2s', which .* it runs llama": whole.replace(b"llama", b"gpt2s"),
        "'mamba', which .*: its layers keep a recurrent state.*; use qwen3-8b": whole.replace(
            b"llama", b"mamba"
        ),
    }
    for number, (message, content) in enumerate(cases.items()):
        with case(message):
            file = tmp_path / f"{number}.gguf"
            file.write_bytes(content)
            with pytest.raises(ModelError, match=message):
                open_source(file)


@pytest.mark.parametrize("kind", ["IQ3_S", "IQ2_XXS", "TQ1_0"])
def test_a_type_that_is_not_read_is_named(tmp_path: Path, kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    columns, size = gguf.GGML_QUANT_SIZES[number]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    blocks = np.zeros((4, 256 // columns * size), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"'token_embd.weight' as {kind}, .* Q4_K_M, Q4_0 or"):
        open_source(tmp_path / "m.gguf")


def test_folders_and_names(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(model, folder / "a.gguf")
    assert open_source(folder).layers == 2
    assert fingerprint(folder) == fingerprint(model)
    shutil.copy(model, folder / "b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files; .*: a.gguf, b.gguf"):
        open_source(folder)
    with pytest.raises(ModelError, match=r"no file /nowhere/x.gguf; .*ORGANISATION/NAME/FILE"):
        require_model("/nowhere/x.gguf")
    require_model("org/name/x.gguf")
    blob = Path(shutil.copy(model, tmp_path / "sha256-0f5a"))  # as Ollama keeps it
    assert fingerprint(blob) == fingerprint(model)
    (tmp_path / "page.html").write_text("<html>")
    with pytest.raises(ModelError, match=r"page.html does not begin as a GGUF file does; give"):
        require_model(tmp_path / "page.html")


def test_split_files_are_one_model(model: Path, tmp_path: Path) -> None:
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=9)
    for key, field in reader.fields.items():
        if key.startswith(("GGUF.", "general.architecture")):
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    whole = open_source(model)
    for named in (parts[0], parts[2], tmp_path):
        source = open_source(named)
        assert source.names == whole.names
        for name in sorted(whole.names)[::5]:
            assert torch.equal(source.tensor(name), whole.tensor(name))
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"one of 3 parts of a model, and m-00002-of-00003.gguf"):
        open_source(parts[0])


def test_a_file_is_known_by_what_it_holds(model: Path, tmp_path: Path) -> None:
    here = fingerprint(model)
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    assert fingerprint(copy) == here
    assert model_files(copy).file("config.json") == model_files(model).file("config.json")
    content = bytearray(copy.read_bytes())
    stored = open_gguf(copy).tensors["blk.1.ffn_up.weight"]
    content[stored.start + stored.bytes // 2] ^= 1
    (tmp_path / "other.gguf").write_bytes(content)
    assert fingerprint(tmp_path / "other.gguf") != here


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As many tokens and merges as the largest models have."""
    file = tmp_path_factory.mktemp("large") / "m.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_token_list([f"token {number}" for number in range(262_144)])
    writer.add_token_merges([f"a {number}" for number in range(500_000)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    yield file
    file.unlink()


@pytest.mark.thorough
def test_a_large_vocabulary_is_passed_over_in_less_than_a_second(vocabulary: Path) -> None:
    began = time.process_time()
    open_gguf(vocabulary)
    assert time.process_time() - began < 1


def test_llama3_settings_are_found_again() -> None:
    """From the divisors alone: of the published models, and where only a step is to be seen."""
    for factor, low, high, length, theta, head in (
        (8.0, 1.0, 4.0, 8192, 5e5, 128),
        (32.0, 1.0, 4.0, 8192, 5e5, 64),
        (8.0, 1.0, 4.0, 64, 5e5, 8),
        (16.0, 1.0, 3.0, 4096, 1e4, 128),
    ):
        waves = [2 * np.pi * theta ** (2 * i / head) for i in range(head // 2)]
        divisors = [
            float(np.float32(Llama3(factor, low, high, length).divisor(wave))) for wave in waves
        ]
        found = llama3_settings(divisors, theta)
        assert found is not None
        assert [found.divisor(wave) for wave in waves] == pytest.approx(divisors, rel=1e-4)
    assert llama3_settings([1.0, 3.0, 2.0, 5.0], 1e4) is None
