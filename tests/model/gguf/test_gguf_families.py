"""GGUF files of every architecture and type against transformers' models of the same numbers."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.checkpoints import plain_hidden, plain_logits, reference, write_family
from support.ggufs import (
    SCALES_AT,
    TypeOf,
    all_as,
    in_qwen35,
    rewrite,
    write_gguf,
    write_gguf_family,
)
from support.mtp_heads import write_mtp
from support.own_cache import own_cache
from support.pipelines import CUTS, TOLERANCE, Pipeline, difference, random_tokens
from support.tiers import tiered

from edgespec.config import FILE, QUANTISATIONS
from edgespec.drafting.mtp import MtpGuesser, mtp_form
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.block_file import BlockFile, write_block
from edgespec.model.ends import InputEmbedding, OutputHead
from edgespec.model.families import embedding_scale
from edgespec.model.gguf.block_types import BLOCK_TYPES
from edgespec.model.gguf.checkpoint import form_of, stored_form
from edgespec.model.gguf.files import open_gguf
from edgespec.model.gguf.unpacking import numbers_of
from edgespec.model.inventory import block_inventory
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised
from edgespec.model.source import EMBEDDING, TensorSource
from edgespec.model.sources import open_source
from edgespec.model.tensors import compute_dtype, from_torch
from edgespec.model.tree_attention import tree_mask
from edgespec.types.features import Features
from edgespec.verify.sampling import Sampling

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4"]
FAMILIES = ["llama", "llama-rope", "llama-biases", "mistral", "qwen2", "qwen3", "qwen3_moe"]
FAMILIES += ["granite", "smollm3", "phi3", "gemma2", "gemma3_text"]
FAMILIES += ["gpt_oss", "ministral3", "olmo2", "olmo3", "olmoe", "mixtral", "ernie4_5", "gemma"]
FAMILIES += ["exaone4", "glm4", "cohere2", "phi3-long", "lfm2", "lfm2-biases"]
FAMILIES += ["gemma4_text", "gemma4_text-shared", "gemma4_text-experts"]
FAMILIES += ["lfm2_moe", "granitemoehybrid-mamba", "granitemoehybrid-experts", "qwen2_moe"]
FAMILIES += ["deepseek_v2", "deepseek_v2-groups", "deepseek_v3", "glm4_moe_lite"]
FAMILIES += ["ernie4_5_moe", "hunyuan_v1_moe", "glm4_moe"]
FAMILIES += ["qwen3_5_text", "qwen3_5_moe_text"]
FAMILIES += ["falcon_h1", "falcon_h1-normed", "nemotron_h", "nemotron_h-experts"]


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
        if ("norm" in name and "gemma4" not in file.name and "gemma" in file.name)
        or (name.endswith("norm.weight") and file.name.startswith(("qwen3_5", "qwen3_next")))
    } - {name for name in ours.names if "linear_attn" in name}
    for name in sorted(ours.names):
        with case(name):
            got, meant = ours.tensor(name).float(), theirs.tensor(name)
            if "linear_attn" in name:
                meant = torch.from_numpy(in_qwen35(name, meant.numpy(), theirs.config))
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


def test_a_file_that_has_matrices_of_all_heads_as_one(tmp_path: Path) -> None:
    """As DeepSeek's older ones: what makes keys is turned, so its values are taken."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 8, "intermediate_size": 64}
    folder = write_family(tmp_path / "m", "deepseek_v2", **sizes, moe_intermediate_size=32)
    file = tmp_path / "it.gguf"
    assert_same(file, write_gguf(folder, file, all_as("Q8_0"), heads_apart=False))
    source = open_source(file, FILE)
    forms = [source.form(f"model.layers.1.self_attn.{part}_b.3.weight").kind for part in "kv"]
    assert forms == ["none", "int8"]
    Block(source, 0, 4, "float32")


def test_a_qwen_35_is_cut_to_the_bit_and_brings_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages know how the file orders heads, which torch's states follow as the compiled ones do;
    the head behind its layers guesses what that of its folder does."""
    write_mtp(tmp_path / "m", intermediate_size=64, linear_value_head_dim=32)
    file = tmp_path / "qwen3_5.gguf"
    twin = write_gguf(tmp_path / "m", file, all_as("Q8_0"))
    source, positions, mask = open_source(file, FILE), torch.arange(60), np.tri(60, dtype=np.bool_)
    inputs = torch.randn((60, 32), generator=torch.Generator().manual_seed(2))
    write_block(source, 1, 4, tmp_path / "cut.safetensors")
    cut = BlockFile(tmp_path / "cut.safetensors", source.config, FILE)

    def rows(of: TensorSource) -> torch.Tensor:
        block = Block(of, 1, 4, "float32")
        out = block.forward(inputs, positions, block.new_cache(64), tree_mask(0, mask))
        assert out is not None
        return out

    whole = rows(source)
    assert torch.equal(rows(cut), whole)
    monkeypatch.setattr("edgespec.model.state_mixer.compiled_states", lambda: None)
    torch.testing.assert_close(rows(source), whole, rtol=0, atol=1e-5)
    context, found = [5, 9, 90, 33, 7], []
    given = Features(from_torch(torch.randn((4, 32), dtype=torch.float64)))
    for of in (open_source(file), Checkpoint(twin)):
        draft = MtpGuesser(of, of, OutputHead(of, "float64"), "float64")
        draft.open(1, Sampling())
        assert draft.read(1, context, given)
        found.append(draft.guess(1, [[], [4], [4, 77]], 96))
    assert np.array_equal(found[0].tokens, found[1].tokens)
    np.testing.assert_allclose(found[0].scores, found[1].scores, rtol=0, atol=1e-6)


def test_a_head_in_a_file_beside_the_bases_is_its_own(tmp_path: Path) -> None:
    """As llama.cpp's converter writes both with --no-mtp and --mtp: the same bits as from one file.
    One of another size, or a damaged one, is passed by."""
    write_mtp(tmp_path / "m")
    whole, apart = tmp_path / "whole.gguf", tmp_path / "apart" / "base.gguf"
    write_gguf(tmp_path / "m", whole, all_as("F32"))
    apart.parent.mkdir()
    count, behind = "qwen35.block_count", "qwen35.nextn_predict_layers"
    rewrite(whole, apart, lambda name: "blk.4." not in name, values={count: 4, behind: 0})
    with pytest.raises(ModelError, match=r"has no MTP head.*mtp-\*.gguf beside it"):
        mtp_form(open_source(apart))
    for name, width in (("a", 64), ("b", 32)):
        head = apart.parent / f"mtp-{name}.gguf"
        sizes = {"qwen35.embedding_length": width}
        rewrite(whole, head, lambda name: "blk.4." in name or "blk" not in name, values=sizes)
    (apart.parent / "mtp-0.gguf").write_bytes(b"GGUF")
    found, meant = open_source(apart), open_source(whole)
    assert mtp_form(found) == mtp_form(meant)
    assert found.names == meant.names
    assert all(torch.equal(found.tensor(name), meant.tensor(name)) for name in meant.names)
    with pytest.raises(ModelError, match="holds the head of a model that guesses"):
        open_source(head)


def test_what_guesses_behind_the_layers_of_a_glm_is_left_out(tmp_path: Path) -> None:
    """As published ones have it: a layer more, and what joins its input."""
    sizes = {"intermediate_size": 64, "moe_intermediate_size": 32}
    folder = write_family(tmp_path / "m", "glm4_moe", **sizes)
    tensors = load_file(folder / "model.safetensors")
    last = {n.replace("layers.3", "layers.4"): t.clone() for n, t in tensors.items() if ".3." in n}
    shapes = {"eh_proj": (32, 64), "embed_tokens": (96, 32), "shared_head.head": (96, 32)}
    shapes |= dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (32,))
    last |= {f"model.layers.4.{name}.weight": torch.rand(size) for name, size in shapes.items()}
    save_file(tensors | last, folder / "model.safetensors", {"format": "pt"})
    behind = {"glm4moe.block_count": 5, "glm4moe.nextn_predict_layers": 1}
    assert_same(
        tmp_path / "it.gguf", write_gguf(folder, tmp_path / "it.gguf", all_as("F32"), behind)
    )


def test_a_qwen3_next_has_its_matrices_apart(tmp_path: Path) -> None:
    """What makes gates, and queries, keys and values, of which a folder has those of each group of
    heads together, so that names differ."""
    file, twin = write_gguf_family(tmp_path, "qwen3_next", all_as("Q8_0"))
    model, tokens = reference(twin), random_tokens(3, 14)
    rows = Pipeline(file, CUTS[2], model=model).prefill(tokens)
    assert difference(rows, plain_hidden(model, tokens)) < TOLERANCE
    original, older = tmp_path / "qwen3_next-original", tmp_path / "qwen3_next-older.gguf"
    alike = write_gguf(original, older, all_as("Q8_0"), gates_apart=False)
    assert_same(older, alike)


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
            embeds = first > 0 or source.quantisation == FILE
            assert tables == of_layers | ({EMBEDDING} if embeds else set())


def test_an_embedding_is_kept_and_looked_up_in_its_codes(tmp_path: Path) -> None:
    """By the block that embeds, from its file too, and beside the base's ends: a quarter of its
    numbers' bytes, and their values to the bit, whatever the layers are held as."""
    file, _ = write_gguf_family(tmp_path, "gemma2", all_as("Q8_0"))
    tokens = torch.tensor([5, 90, 3, 5])
    for quantisation in (FILE, QUANTISATIONS["none"], QUANTISATIONS["int8"]):
        source = open_source(file, quantisation)
        write_block(source, 0, 1, tmp_path / "0.safetensors")
        cut = BlockFile(tmp_path / "0.safetensors", source.config, source.quantisation)
        kind, rows = cut.table(EMBEDDING)
        assert (kind, rows.nbytes) == ("Q8_0", source.tensor(EMBEDDING).numel() * 34 // 32)
        assert [one.name for one in block_inventory(cut, 0, 1) if one.looked_up] == [EMBEDDING]
        for dtype in ("float32", "bfloat16", "float64"):
            with case(f"{quantisation.name} {dtype}"):
                meant = source.tensor(EMBEDDING).to(compute_dtype(dtype))[tokens]
                meant *= embedding_scale(source.config, meant.dtype) or 1.0
                for found in (
                    Block(cut, 0, 1, dtype).embedded(tokens),
                    Block(source, 0, 1, dtype).embedded(tokens),
                    InputEmbedding(source, dtype).rows(tokens),
                ):
                    assert torch.equal(found, meant)


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


def hybrid(root: Path, type_of: TypeOf) -> Path:
    """A file of a Granite 4-h."""
    sizes = {"shared_intermediate_size": 64, "intermediate_size": 64}
    original = write_family(root / "original", "granitemoehybrid-mamba", **sizes)
    write_gguf(original, root / "m.gguf", type_of)
    return root / "m.gguf"


def test_a_granite_4_h_is_cut_to_the_bit(tmp_path: Path) -> None:
    """By its codes, of gate and up too where they are of one type, each stage computes what it does
    from the whole file."""
    file = hybrid(tmp_path, all_as("Q8_0"))
    source, values = open_source(file, FILE), open_source(file)
    gate_up = "model.layers.0.mlp.gate_up_proj.weight"
    assert source.form(gate_up).kind == "int8"
    exact = values.tensor(gate_up)
    packed = source.packed(gate_up, exact.shape)
    form = source.form(gate_up)
    assert torch.equal(dequantised(packed, exact.shape, form, torch.float32), exact)
    positions, mask = torch.arange(3), tree_mask(0, np.tri(3, dtype=np.bool_))
    rows = [torch.tensor([5, 90, 3])]
    for first, end in ((0, 2), (2, 4)):
        path = tmp_path / f"{first}.safetensors"
        write_block(source, first, end, path)
        cut = BlockFile(path, source.config, source.quantisation)
        inputs = rows[0]
        blocks = [Block(one, first, end, "float32") for one in (cut, source)]
        rows = [one.forward(inputs, positions, one.new_cache(4), mask) for one in blocks]
        assert torch.equal(*rows)


def test_gate_and_up_of_two_types_are_values(tmp_path: Path) -> None:
    file = hybrid(tmp_path, all_as("F32"))
    mixed = tmp_path / "mixed.gguf"
    rewrite(file, mixed, kinds=lambda name: "Q8_0" if "ffn_up" in name else "F32")
    name = "model.layers.1.mlp.gate_up_proj.weight"
    source, values = open_source(mixed, FILE), open_source(file)
    assert source.form(name).kind == "none"
    got, meant = source.tensor(name), values.tensor(name)
    assert torch.equal(got[:64], meant[:64])
    assert 0 < difference(got[64:], meant[64:]) < 1e-2


def refuses_other_sizes(file: Path, sizes: dict[str, int]) -> None:
    """Each of these settings in one error that names the file: sizes that are none, or others than
    the tensors'."""
    plain = file.read_bytes()
    for name, size in sizes.items():
        told = name.encode() + struct.pack("<II", gguf.GGUFValueType.UINT32, size)
        assert plain.count(told) == 1
        for strange in (0, 1, 3, 2 * size, 1 << 20, (1 << 32) - 1):
            with case(f"{name} {strange}"):
                value = struct.pack("<II", gguf.GGUFValueType.UINT32, strange)
                file.write_bytes(plain.replace(told, name.encode() + value))
                with pytest.raises(ModelError, match=r"m\.gguf"):
                    Block(open_source(file), 0, 4, "float32")


@pytest.mark.parametrize("heads_apart", [True, False])
def test_strange_settings_of_latents_are_refused(tmp_path: Path, heads_apart: bool) -> None:
    folder, file = write_family(tmp_path / "original", "deepseek_v3"), tmp_path / "m.gguf"
    write_gguf(folder, file, all_as("F32"), heads_apart=heads_apart)
    own = "_mla" if heads_apart else ""
    sizes = {f"key_length{own}": 14, f"value_length{own}": 10, "kv_lora_rank": 24}
    sizes = {f"attention.{name}": size for name, size in sizes.items()}
    sizes |= {"rope.dimension_count": 8, "expert_shared_count": 2, "expert_count": 6}
    refuses_other_sizes(file, {f"deepseek2.{name}": size for name, size in sizes.items()})


def test_strange_settings_of_states_are_refused(tmp_path: Path) -> None:
    file = hybrid(tmp_path, all_as("F32"))
    sizes = {"conv_kernel": 4, "state_size": 24, "group_count": 2, "inner_size": 64}
    sizes |= {"time_step_rank": 4}
    refuses_other_sizes(file, {f"granitehybrid.ssm.{name}": size for name, size in sizes.items()})
    others: list[tuple[str, dict[str, Any]]] = [
        ("head_count_kv is", {"attention.head_count_kv": [0] * 4}),
        ("tells 2 layers' heads", {"attention.head_count_kv": [0, 2]}),
        ("does not provide for", {"attention.head_count_kv": [2] * 4}),
        ("layers without experts", {"expert_count": 8}),
        ("a part of each head", {"rope.scaling.finetuned": True, "rope.dimension_count": 4}),
    ]
    for number, (message, values) in enumerate(others):
        with case(message):
            strange_file = tmp_path / f"{number}.gguf"
            named = {f"granitehybrid.{key}": value for key, value in values.items()}
            write_gguf(tmp_path / "original", strange_file, all_as("F32"), named)
            with pytest.raises(ModelError, match=message):
                Block(open_source(strange_file), 0, 4, "float32")


def test_a_state_that_grows_is_refused(tmp_path: Path) -> None:
    file = hybrid(tmp_path, all_as("F32"))
    stored = open_gguf(file).tensors["blk.0.ssm_a"]
    content = bytearray(file.read_bytes())
    for strange in (0.5, 0.0, np.nan, -np.inf):
        content[stored.start : stored.start + 4] = np.float32(strange).tobytes()
        file.write_bytes(content)
        with pytest.raises(ModelError, match="states that grow"):
            open_source(file).tensor("model.layers.0.mamba.A_log")


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
