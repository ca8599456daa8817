"""What --quant auto and --dtype auto come to, by the model's size and shapes, and what is said."""

from __future__ import annotations

import json
from pathlib import Path

from support.cases import case
from support.checkpoints import write_checkpoint
from support.ggufs import all_as, write_gguf

from edgespec.config import FILE, QUANTISATIONS
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.precision import dtype_for, four_bit_for, precision_text, quantisation_for
from edgespec.planning.cost_model import ARCHITECTURES, HEAD

AUTO = "auto"
SMALL = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
"""A model of 135 M parameters."""


def named(folder: Path, content: object) -> str:
    """What is chosen for a folder with this config.json."""
    (folder / "config.json").write_text(json.dumps(content))
    return quantisation_for(str(folder)).name


def test_a_model_is_packed_by_its_size_and_shapes(tmp_path: Path) -> None:
    assert quantisation_for(bundled("base")).name == "none"
    large = {**SMALL, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    for change, expected in (
        ({}, "int4-g32"),
        ({"num_hidden_layers": 5}, "none"),  # 97 MB in 16 bit
        ({**large, "intermediate_size": 11008}, "int4"),
        ({**large, "intermediate_size": 11040}, "int4-g32"),
        ({**large, "intermediate_size": 11000}, "int8"),
    ):
        with case(change):
            assert named(tmp_path, {**SMALL, **change}) == expected
    for change in ({"model_type": "mamba"}, {"hidden_size": 0}):
        with case(change):
            assert named(tmp_path, {**SMALL, **change}) == "none"  # nothing is there to be packed
    assert named(tmp_path, []) == "none"
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(10**9)  # of a family whose sizes are not known
    assert named(tmp_path, {**SMALL, "model_type": "mamba"}) == "int4"
    assert {four_bit_for(of).name for of in ARCHITECTURES.values() if of.hidden >= 2048} == {"int4"}


def test_what_is_packed_stays_as_its_files_have_it(tmp_path: Path) -> None:
    assert named(tmp_path, {**SMALL, "quantization_config": {"quant_method": "gptq"}}) == "file"
    assert named(tmp_path, {**SMALL, "quantization_config": None}) == "int4-g32"
    plain = write_checkpoint(tmp_path / "plain", num_hidden_layers=1, intermediate_size=64)
    for kind, expected in (("Q8_0", "file"), ("F16", "none")):
        write_gguf(plain, tmp_path / f"{kind}.gguf", all_as(kind))
        assert quantisation_for(str(tmp_path / f"{kind}.gguf")).name == expected
    assert precision_text(FILE, FILE, "bfloat16").startswith(
        "blocks as the model's files pack them (file), the output head as file, computed in "
    )
    assert "several times slower" in precision_text(FILE, FILE, "float32")


def test_packed_blocks_are_computed_in_16_bit_and_a_slow_choice_is_said() -> None:
    none, four = QUANTISATIONS["none"], QUANTISATIONS["int4-g32"]
    assert (dtype_for(none, AUTO), dtype_for(none, "bfloat16")) == ("float32", "bfloat16")
    assert dtype_for(four, AUTO) in ("bfloat16", "float16")
    assert dtype_for(four, "float32") == "float32"
    assert precision_text(none, none, "float32") == ""
    assert precision_text(four, HEAD, "bfloat16") == (
        "4-bit blocks (int4-g32), the output head as int8, computed in bfloat16; --quant, "
        "--head-quant and --dtype choose others"
    )
    assert "several times slower than in bfloat16" in precision_text(four, HEAD, "float32")
    assert "8-bit blocks (int8)" in precision_text(HEAD, HEAD, "float32")
