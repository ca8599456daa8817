"""GGUF files of every architecture and type against transformers' models of the same numbers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.checkpoints import plain_hidden, plain_logits, reference, write_family
from support.ggufs import SCALES_AT, all_as, write_gguf, write_gguf_family
from support.own_cache import own_cache
from support.pipelines import CUTS, TOLERANCE, Pipeline, difference, random_tokens
from support.tiers import tiered

from edgespec.config import FILE
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.block_file import BlockFile, write_block
from edgespec.model.ends import OutputHead
from edgespec.model.gguf.block_types import BLOCK_TYPES
from edgespec.model.gguf.checkpoint import form_of, stored_form
from edgespec.model.gguf.unpacking import numbers_of
from edgespec.model.inventory import block_inventory
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised
from edgespec.model.source import EMBEDDING
from edgespec.model.sources import open_source
from edgespec.model.tree_attention import tree_mask

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
FAMILIES = ["llama", "llama-rope", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES += ["granite", "smollm3", "phi3", "gemma2", "gemma3_text"]
FAMILIES += ["gpt_oss", "ministral3", "olmo2", "olmo3", "olmoe", "mixtral", "ernie4_5", "gemma"]
FAMILIES += ["exaone4", "glm4", "cohere2", "phi3-long", "lfm2", "lfm2-biases"]
FAMILIES += ["gemma4_text", "gemma4_text-shared", "gemma4_text-experts"]
FAMILIES += ["lfm2_moe"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_cache(tmp_path / "cache", monkeypatch)


def assert_same(file: Path, twin: Path) -> None:
    """The same tensors bit by bit, and rows and logits as transformers computes them."""
    ours, theirs = open_source(file), Checkpoint(twin)
    assert ours.names == theirs.names
    shifted = {
        name
        for name in ours.names
        if "norm" in name and "gemma4" not in file.name and "gemma" in file.name
    }
    for name in sorted(ours.names):
        with case(name):
            got, meant = ours.tensor(name).float(), theirs.tensor(name)
            assert got.shape == meant.shape
            assert torch.equal(got, (meant + 1) - 1 if name in shifted else meant)
    model = reference(twin)
    pipeline = Pipeline(file, CUTS[2], model=model)
    tokens = random_tokens(3, 14)
    rows = pipeline.prefill(tokens)
    assert difference(rows, plain_hidden(model, tokens)) < TOLERANCE
    logits = OutputHead(ours, "float64").logits(rows[-1:])
    exact = plain_logits(model, tokens)
    assert difference(logits[0], exact) < 20 * TOLERANCE


@pytest.mark.parametrize("name", tiered(FAMILIES, ["gpt_oss", "ministral3", "gemma3_text"]))
def test_every_architecture(tmp_path: Path, name: str) -> None:
    assert_same(*write_gguf_family(tmp_path, name, all_as("Q8_0")))


def test_blocks_of_a_file_keep_its_tables_in_its_codes(tmp_path: Path) -> None:
    """What layers look up of tokens, on each stage: as the file has it, and to the same bits."""
    file, twin = write_gguf_family(tmp_path, "gemma4_text-shared", all_as("Q8_0"))
    halves, _ = write_gguf_family(tmp_path / "halves", "gemma4_text-shared", all_as("F16"))
    tokens, positions = torch.tensor([5, 90, 3]), torch.arange(3)
    mask = tree_mask(0, np.tri(3, dtype=np.bool_))
    for source in (open_source(file, FILE), Checkpoint(twin), open_source(halves)):
        flows = []
        for first, end in ((0, 1), (1, 5)):
            path = tmp_path / f"{first}.safetensors"
            write_block(source, first, end, path)
            cut = BlockFile(path, source.config, source.quantisation)
            table = f"model.layers.{first}.embed_tokens_per_layer.weight"
            expected = ("Q8_0", 34) if source.quantisation == FILE else ("", 32)
            assert (cut.table(table)[0], cut.table(table)[1].shape[1]) == expected
            assert cut.table(table)[0] == source.table(table)[0]
            inputs = tokens if first == 0 else flows[-1][0]
            blocks = [Block(one, first, end, "float32") for one in (cut, source)]
            flows.append(
                [b.forward(inputs, positions, b.new_cache(4), mask, tokens=tokens) for b in blocks]
            )
            assert torch.equal(*flows[-1])
            # These take no memory.
            tables = {one.name for one in block_inventory(cut, first, end) if one.looked_up}
            of_layers = {table.replace(f".{first}.", f".{n}.") for n in range(first, end)}
            assert tables == of_layers | ({EMBEDDING} if first else set())


def test_tables_whose_blocks_reach_over_layers_are_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "gemma4_text", hidden_size_per_layer_input=16)
    file = tmp_path / "it.gguf"
    write_gguf(folder, file, lambda name, _: "Q8_0" if "embed_tokens_per" in name else "F32")
    with pytest.raises(ModelError, match="64 columns in blocks of 32, which 4 layers cannot share"):
        Block(open_source(file), 0, 4)


def test_every_packed_type_to_the_bit() -> None:
    """Random blocks, all of whose codes and steps occur, as gguf's own package reads them; and
    the stored form of their codes, whose every scale is a product that float32 holds."""
    packed = {kind.name: kind for kind in BLOCK_TYPES.values() if not kind.plain}
    assert packed.keys() == SCALES_AT.keys()
    random = np.random.default_rng(0)
    for name, kind in packed.items():
        with case(name):
            blocks = random.integers(0, 256, (255, kind.bytes), dtype=np.uint8)
            for start in SCALES_AT[name]:
                scales = random.uniform(-1e-2, 1e-2, (255, 1)).astype(np.float16)
                blocks[:, start : start + 2] = scales.view(np.uint8)
            if name == "MXFP4":
                blocks[:, 0] = np.arange(255)  # every power of two, but the one that is no number
            with np.errstate(over="ignore"):
                number = gguf.GGMLQuantizationType[name]
                meant = torch.from_numpy(gguf.quants.dequantize(blocks, number))
            data = torch.from_numpy(blocks)
            assert torch.equal(numbers_of(kind, data), meant)
            halves = [(slice(0, 99), data[:99]), (slice(99, 255), data[99:])]
            parts = stored_form(kind, meant.shape, halves)
            assert torch.equal(dequantised(parts, meant.shape, form_of(kind), torch.float32), meant)


def test_a_dense_granite_4_is_a_granite(tmp_path: Path) -> None:
    """As llama.cpp's converter takes one without Mamba apart; one that turns no keys is refused."""
    original = write_family(tmp_path / "original", "granitemoehybrid")
    settings = json.loads((original / "config.json").read_text()) | {"model_type": "granite"}
    tensors = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        if "shared_mlp.input_linear" in name:
            gate, up = tensor.chunk(2)
            tensors[name.replace("shared_mlp.input_linear", "mlp.gate_proj")] = gate.contiguous()
            tensors[name.replace("shared_mlp.input_linear", "mlp.up_proj")] = up.contiguous()
        else:
            tensors[name.replace("shared_mlp.output_linear", "mlp.down_proj")] = tensor
    granite = tmp_path / "granite"
    granite.mkdir()
    (granite / "config.json").write_text(json.dumps(settings))
    save_file(tensors, granite / "model.safetensors")
    finetuned = "granite.rope.scaling.finetuned"
    write_gguf(granite, tmp_path / "m.gguf", all_as("F32"), {finetuned: True})
    pipeline, tokens = Pipeline(tmp_path / "m.gguf", CUTS[2], model=reference(original)), [5, 9, 3]
    assert difference(pipeline.prefill(tokens), plain_hidden(pipeline.model, tokens)) < TOLERANCE
    write_gguf(granite, tmp_path / "nope.gguf", all_as("F32"), {finetuned: False})
    with pytest.raises(ModelError, match="turns no keys"):
        open_source(tmp_path / "nope.gguf")


def test_a_newer_file_of_mistral_small_is_a_mistral(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "mistral", "mistral", sliding_window=None)
    file = tmp_path / "m.gguf"
    assert_same(file, write_gguf(folder, file, all_as("F16"), architecture="mistral3"))


@pytest.mark.thorough
def test_an_exaone_without_windows(tmp_path: Path) -> None:
    settings = {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    assert_same(*write_gguf_family(tmp_path, "exaone4", all_as("F32"), **settings))


def test_angles_of_olmo_3_are_stretched_in_its_full_layers_alone(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    more = {"attention_factor": 1.3, "beta_fast": 32.0, "beta_slow": 1.0}
    assert_same(*write_gguf_family(tmp_path, "olmo3", all_as("F32"), rope_scaling=yarn | more))


@pytest.mark.parametrize("kind", tiered([*TYPES, "mixed"], ["mixed"]))
def test_every_type(tmp_path: Path, kind: str) -> None:
    def mixed(name: str, shape: tuple[int, ...]) -> str:
        return TYPES[len(name) * 7 % len(TYPES)] if len(shape) > 1 else "F32"

    assert_same(*write_gguf_family(tmp_path, "llama", mixed if kind == "mixed" else all_as(kind)))


def test_codes_are_copied(tmp_path: Path) -> None:
    """A file of all packed types: dequantised as gguf does it, and the same values by its codes."""
    chosen = itertools.cycle(SCALES_AT)
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    file, twin = write_gguf_family(
        tmp_path, "llama", lambda name, shape: next(chosen) if len(shape) > 1 else "F32", **sizes
    )
    assert_same(file, twin)
    source, values = open_source(file, FILE), Checkpoint(twin)
    matrices = sorted(name for name in source.names if "proj" in name)
    seen = set()
    for name in matrices:
        with case(name):
            form, exact = source.form(name), values.tensor(name)
            seen.add(form)
            got = dequantised(source.packed(name, exact.shape), exact.shape, form, torch.float64)
            # gguf itself rounds to float32 at every step.
            assert torch.allclose(got, exact.double(), rtol=1e-6, atol=1e-8)
    assert len(seen) == len(SCALES_AT) - 1  # Q8_0 and Q5_0 are of one form
    pipeline = Pipeline(file, CUTS[2], model=reference(twin), source=source)
    rows = pipeline.prefill(random_tokens(1, 9))
    theirs = plain_hidden(pipeline.model, random_tokens(1, 9))
    assert difference(rows, theirs) < TOLERANCE
