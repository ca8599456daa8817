"""Packed checkpoints: codes of other programs' folders are taken as they are, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import case
from support.checkpoints import plain_hidden, write_checkpoint, write_family
from support.packed_folders import (
    PLAIN,
    Method,
    awq,
    compressed,
    compressed_fp8,
    fp8,
    gptq,
    nf4,
    write_mxfp4,
    write_packed,
)
from support.pipelines import CUTS, TOLERANCE, Pipeline, difference, random_tokens

from edgespec.config import FILE
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.block_file import BlockFile, write_block
from edgespec.model.families import check_settings
from edgespec.model.quantised.linear import dequantised
from edgespec.model.sources import open_source

METHODS = [
    gptq(32),
    gptq(64, symmetric=False),
    gptq(128),
    gptq(64, act_order=True),
    gptq(-1, symmetric=False, layout="gptq_v2"),
    gptq(32, symmetric=False, act_order=True, layout="gptq_v2"),
    gptq(64, bits=8, symmetric=False, act_order=True),
    gptq(-1, bits=8),
    awq(32),
    replace(awq(128), name="awq-head", plain=("embed_tokens",)),
    compressed(128),
    compressed(32, symmetric=False, act_order=True),
    compressed(-1, symmetric=False, dtype=torch.float16),
    compressed(64, symmetric=False, loose_zeros=True, dtype=torch.float32),
    compressed(-1, bits=8),
    compressed(64, bits=8, symmetric=False, act_order=True),
    nf4(double=False),
    nf4(double=True),
    nf4(double=True, storage=torch.bfloat16),
    fp8(128),
    fp8(64, dtype=torch.bfloat16),
    fp8(None, dtype=torch.bfloat16),
    *map(compressed_fp8, ("tensor", "channel", "block")),
]
E4M3 = torch.float8_e4m3fn
QUERY = "model.layers.0.self_attn.q_proj."
NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns that every group divides, and rows that are no whole number of tiles."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("plain") / "m"
    return write_checkpoint(
        folder,
        hidden_size=128,
        intermediate_size=256,
        num_key_value_heads=1,
        num_hidden_layers=1,
        attention_bias=True,
    )


def test_codes_of_every_method_are_taken_as_they_are(plain: Path, tmp_path: Path) -> None:
    for method in METHODS:
        with case(method.name):
            folder = tmp_path / method.name
            exact = load_file(write_packed(plain, folder, method) / "model.safetensors")
            source = open_source(folder, FILE)
            assert source.names == exact.keys()
            packed = {name for name in exact if source.form(name).kind != "none"}
            assert len(packed) == 7 + ("lm_head" not in method.plain)
            for name, values in exact.items():
                form, plainly = source.form(name), source.tensor(name).double()
                # A product of a code and a float32 is not always one.
                bound = 2e-7 * values.abs().max() if form.scales == "float32" else 0
                assert (plainly - values).abs().max() <= bound, name
                if name in packed:
                    assert form.ordered == method.ordered
                    parts = source.packed(name, values.shape)
                    made = dequantised(parts, values.shape, form, torch.float64)
                    assert (made - values).abs().max() <= bound, name


def test_blocks_compute_what_transformers_computes_with_the_values(tmp_path: Path) -> None:
    """Biases, rows in an order of their own, experts one by one, matrices that stayed plain."""
    cases = {
        "llama-biases": gptq(16, act_order=True),
        "qwen3_moe": awq(8),
        "phi3": replace(compressed(16, symmetric=False), plain=(*PLAIN, "layers.1.mlp.down_proj")),
        "qwen3": fp8(16),
    }
    for family, method in cases.items():
        with case(family):
            plain = write_family(tmp_path / family, family)
            exact = write_packed(plain, tmp_path / f"{family}-packed", method)
            source = open_source(tmp_path / f"{family}-packed", FILE)
            pipeline = Pipeline(exact, CUTS[2], source=source)
            tokens = random_tokens(1, 9)
            flow = pipeline.prefill(tokens)
            assert difference(flow, plain_hidden(pipeline.model, tokens)) < 1e-9


def test_heads_of_latents_have_values_of_what_is_packed_for_all(tmp_path: Path) -> None:
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 32, "v_head_dim": 8, "moe_intermediate_size": 16}
    for method in (fp8(16), gptq(8, symmetric=False, act_order=True)):
        with case(method.name):
            plain = write_family(tmp_path / f"{method.name}-m", "glm4_moe_lite", **sizes)
            exact = write_packed(plain, tmp_path / method.name, method)
            source = open_source(tmp_path / method.name, FILE)
            layer = "model.layers.1.self_attn."
            assert source.form(f"{layer}o_proj.weight").kind != "none"
            assert source.form(f"{layer}k_b.0.weight").kind == "none"
            pipeline = Pipeline(exact, CUTS[2], source=source)
            tokens = random_tokens(1, 9)
            flow = pipeline.prefill(tokens)
            assert difference(flow, plain_hidden(pipeline.model, tokens)) < TOLERANCE


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Its experts' MXFP4, against transformers' own unpacking; and no number in an exponent."""
    plain = write_family(tmp_path / "m", "gpt_oss", intermediate_size=32)
    exact = write_mxfp4(plain, tmp_path / "packed")
    source = open_source(tmp_path / "packed", FILE)
    values = open_source(exact)
    assert source.names == values.names
    assert source.form("model.layers.0.mlp.experts.5.up_proj.weight").kind == "fp4"
    for name in sorted(source.names):
        assert torch.equal(source.tensor(name).float(), values.tensor(name).float()), name
    pipeline, tokens = Pipeline(exact, CUTS[2], source=source), random_tokens(1, 9)
    flow = pipeline.prefill(tokens)
    assert difference(flow, plain_hidden(pipeline.model, tokens)) < 1e-9
    scales = "model.layers.0.mlp.experts.down_proj_scales"
    damaged = load_file(tmp_path / "packed" / "model.safetensors")[scales]
    damaged[5, 31, 0] = 255
    change(tmp_path / "packed", scales, damaged)
    with pytest.raises(ModelError, match=r"experts.5.down_proj.weight.*what is no number"):
        open_source(tmp_path / "packed").tensor("model.layers.0.mlp.experts.5.down_proj.weight")


def test_a_block_file_holds_the_same_codes(plain: Path, tmp_path: Path) -> None:
    write_packed(plain, tmp_path / "m", gptq(32, symmetric=False, act_order=True))
    source = open_source(tmp_path / "m", FILE)
    write_block(source, 0, 1, tmp_path / "block.safetensors")
    file = BlockFile(tmp_path / "block.safetensors", source.config, FILE)
    shape = torch.Size((128, 128))
    assert file.form(QUERY + "weight") == source.form(QUERY + "weight")
    for part, tensor in source.packed(QUERY + "weight", shape).items():
        assert torch.equal(file.packed(QUERY + "weight", shape)[part], tensor)
    assert torch.equal(file.tensor(QUERY + "bias"), source.tensor(QUERY + "bias"))


def test_asked_for_values_it_holds_nothing_packed(plain: Path, tmp_path: Path) -> None:
    exact = load_file(write_packed(plain, tmp_path / "m", awq(32)) / "model.safetensors")
    source = open_source(tmp_path / "m")
    assert {source.form(name).kind for name in exact} == {"none"}
    with pytest.raises(ModelError, match="is not packed"):
        source.packed("model.norm.weight", torch.Size((128,)))


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Give a folder another tensor of this name, or none."""
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


def test_biases_of_zeros_are_no_tensors_too_many(plain: Path, tmp_path: Path) -> None:
    """As AutoGPTQ wrote them for layers without a bias; any other bias would be left out."""
    write_packed(plain, tmp_path / "m", gptq(32))
    bias = "model.layers.0.mlp.up_proj.bias"
    change(tmp_path / "m", bias, torch.zeros(256))
    Block(open_source(tmp_path / "m", FILE), 0, 1)
    change(tmp_path / "m", bias, torch.full((256,), 0.5))
    with pytest.raises(ModelError, match=f"holds {bias!r}, which"):
        Block(open_source(tmp_path / "m", FILE), 0, 1)


def test_damaged_files_are_named(plain: Path, tmp_path: Path) -> None:
    """What is missing, has another shape, dtype or content, each in a folder of its method."""
    short = torch.zeros(3, dtype=torch.int32)
    damages: list[tuple[Method, str, torch.Tensor | None, str]] = [
        (gptq(32), "scales", None, "it has no 'scales'"),
        (gptq(32), "qzeros", None, "it has no 'qzeros'"),
        (gptq(32), "qzeros", short, r"its 'qzeros' has the shape \[3\]"),
        (gptq(32), "qzeros", torch.zeros(4, 12).int(), "its codes have 3 bits"),
        (gptq(32), "scales", torch.zeros(4, 96).half(), "its codes have 5 bits"),
        (gptq(32), "scales", torch.zeros(4, 128).double(), "'scales' is float64 of"),
        (gptq(32), "scales", torch.zeros(5, 128).half(), "'qzeros' is int32 of .* ask for"),
        (gptq(32), "qweight", torch.zeros(8, 128).int(), "'g_idx' is int32 .* of"),
        (gptq(32, act_order=True), "g_idx", None, "it has no 'g_idx'"),
        (gptq(32), "g_idx", short, "'g_idx' is int32 of"),
        (gptq(32), "g_idx", torch.zeros(128).int(), "does not give each of them 32 columns"),
        (awq(32), "scales", torch.zeros(3, 128).half(), "'qzeros' is int32 of"),
        (awq(32), "qweight", torch.zeros(128, 16), "'qweight' is float32"),
        (compressed(32), "weight_shape", None, "it has no 'weight_shape'"),
        (compressed(32), "weight_shape", torch.tensor([128, 96]), "'weight_packed' is int32"),
        (compressed(32), "weight_scale", torch.zeros(128, 3), "not divided by its 3 groups"),
        (
            compressed(32, symmetric=False, loose_zeros=True),
            "weight_zero_point",
            torch.full((128, 4), 9, dtype=torch.int8),
            "more than 4 bits",
        ),
        (nf4(double=True), NF4_STATE, short.to(torch.uint8), "cannot be read"),
        (nf4(double=True), "weight.absmax", torch.zeros(3), "'weight.absmax' is float32 of"),
        (nf4(double=True), "weight.nested_absmax", None, "no 'weight.nested_absmax'"),
        (nf4(double=True), "weight.quant_map", torch.zeros(16), "not the levels of NF4"),
        (nf4(double=False), "weight", torch.zeros(8, 1), "'weight' holds 64 codes"),
        (fp8(64), "weight_scale_inv", torch.zeros(2, 3), "'weight_scale_inv' is float32 of"),
        (fp8(None), "weight_scale_inv", torch.zeros(2), r"'weight_scale_inv' has the shape \[2\]"),
        (fp8(96), "weight", torch.zeros(128, 128).to(E4M3), "no whole number of blocks of 96"),
        (fp8(64), "weight", torch.full((128, 128), torch.nan).to(E4M3), "holds what is no number"),
    ]
    for number, (method, part, tensor, message) in enumerate(damages):
        with case(method.name, part, message):
            folder = tmp_path / str(number)
            write_packed(plain, folder, method)
            change(folder, QUERY + part, tensor)
            source = open_source(folder, FILE)
            with pytest.raises(ModelError, match=message) as caught:
                source.packed(QUERY + "weight", torch.Size((128, 128)))
            assert f"{QUERY}weight' of {folder}" in str(caught.value)
    with pytest.raises(ModelError, match=r"has shape \[128, 128\], config.json says \[128, 64\]"):
        source.packed("model.layers.0.self_attn.o_proj.weight", torch.Size((128, 64)))


FLOAT_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token"}
GROUP = compressed(32).packing["config_groups"]["group_0"]


REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "mxfp8"}, "packed as mxfp8, .* --quant int8, or a GGUF file of it in Q8_0"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "FP8 of the kind e5m2"),
    ({"quant_method": "fp8", "weight_block_size": [128, 24]}, r"FP8 in blocks of \[128, 24\]"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "FP8 in blocks of 128"),
    ({"quant_method": "hqq"}, "packed as hqq"),
    ({"quant_method": "eetq"}, "packed as eetq, .* --quant int8"),
    ({"quant_method": "quanto"}, "packed as quanto"),
    ({"quant_method": "bitnet"}, "packed as bitnet"),
    ({"quant_method": "gguf"}, "packed as gguf, .* --model FILE.gguf"),
    ({"quant_method": "auto-round"}, "packed as auto-round, .* its GPTQ or AWQ release"),
    ({"quant_method": ["gptq"]}, r"packed as \['gptq'\]"),
    ({"bits": 4}, "packed as an unknown method"),
    ([1], "is no object"),
    ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "layout 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "layout 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int16"}, "words of int16"),
    ({"quant_method": "awq", "bits": 8}, "AWQ of 8 bits"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "AWQ in the .* 'gemv_fast'"),
    ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "AWQ in the .* 'llm-awq'"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8, .*int8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes fp4, .* nf4"),
    ({"config_groups": {}}, "without config_groups"),
    ({"kv_cache_scheme": {"num_bits": 8}}, "with a kv_cache_scheme"),
    ({"transform_config": {"R1": {}}}, "with a transform_config"),
    ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "of sparse matrices"),
    ({"quantization_status": "frozen"}, "that are frozen"),
    ({"format": "nvfp4-pack-quantized"}, "in the layout 'nvfp4-pack-quantized'"),
    ({"format": "float-quantized"}, "of type int of 4 bits, .*int8"),
    (
        {"format": "float-quantized", "config_groups": {"g": {"weights": FLOAT_TOKENS}}},
        "one scale a token",
    ),
    ({"config_groups": {"g": GROUP | {"input_activations": {"num_bits": 8}}}}, "activations"),
    ({"config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}}, "type float"),
    (
        {"config_groups": {"g": {"weights": GROUP["weights"] | {"strategy": "block"}}}},
        "one scale a block",
    ),
]


def test_what_is_not_read_is_refused_by_name() -> None:
    for packing, message in REFUSED:
        with case(packing):
            if isinstance(packing, dict) and not packing.keys() & {"quant_method", "bits"}:
                packing = compressed(32).packing | packing
            with pytest.raises(ModelError, match=message):
                check_settings(Path("m"), {"model_type": "llama", "quantization_config": packing})
    for method in METHODS:
        check_settings(Path("m"), {"model_type": "llama", "quantization_config": method.packing})
