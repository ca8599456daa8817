"""What --quant auto and --dtype auto come to, by the model's size and shapes, and what is said."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from support.cases import case
from support.checkpoints import write_checkpoint
from support.ggufs import all_as, write_gguf

from edgespec.config import FILE, NAMED, QUANTISATIONS
from edgespec.daemon import precision
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.precision import (
    cache_dtype_for,
    draft_quantisation_for,
    dtype_for,
    four_bit_for,
    head_quantisation_for,
    precision_text,
    quantisation_for,
)
from edgespec.drafting.choice import parse_draft
from edgespec.errors import ConfigError
from edgespec.model.manifest import MANIFEST, Manifest
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


def test_caches_of_packed_blocks_in_float32_have_16_bits() -> None:
    for quant, dtype, asked, expected in (
        ("int4", "float32", AUTO, "float16"),
        ("file", "float32", AUTO, "float16"),
        ("none", "float32", AUTO, ""),
        ("int4", "bfloat16", AUTO, ""),
        ("int4", "float64", AUTO, ""),
        ("int4", "float32", "float32", ""),
        ("none", "float32", "bfloat16", "bfloat16"),
        ("none", "bfloat16", "int8", "int8"),
    ):
        with case(quant, dtype, asked):
            assert cache_dtype_for(NAMED[quant], dtype, asked) == expected


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
    assert "for stages with a GPU --dtype bfloat16 is" in precision_text(FILE, FILE, "float32")
    assert "in float32, caches in float16; for" in precision_text(FILE, FILE, "float32", "float16")


def test_packed_blocks_are_computed_in_16_bit_where_that_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = QUANTISATIONS["int4-g32"]
    monkeypatch.setattr(precision, "has_gpu", lambda: False)
    (tmp_path / "proc").mkdir()
    every = "avx512f avx512vbmi avx512_bf16"
    for vendor, flags, expected in (
        ("AuthenticAMD", every, "bfloat16"),
        ("AuthenticAMD", "avx2 avx512vbmi", "float32"),
        ("GenuineIntel", every, "float32"),  # there one column at a time is as fast
        ("", "fp asimd bf16", "float32"),
    ):
        processor = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\n"
        (tmp_path / "proc/cpuinfo").write_text(2 * processor)
        with case(vendor, flags):
            assert dtype_for(four, AUTO, tmp_path) == expected
            assert dtype_for(QUANTISATIONS["none"], AUTO, tmp_path) == "float32"
            assert dtype_for(four, "bfloat16", tmp_path) == "bfloat16"
    monkeypatch.setattr(precision, "has_gpu", lambda: True)
    assert dtype_for(four, AUTO, tmp_path) in ("bfloat16", "float16")
    assert dtype_for(QUANTISATIONS["none"], AUTO, tmp_path) == "float32"


def test_what_is_chosen_is_said() -> None:
    none, four = QUANTISATIONS["none"], QUANTISATIONS["int4-g32"]
    assert precision_text(none, none, "float32") == ""
    assert precision_text(four, HEAD, "bfloat16") == (
        "4-bit blocks (int4-g32), the output head as int8, computed in bfloat16; --quant, "
        "--head-quant and --dtype choose others"
    )
    assert "for stages with a GPU --dtype bfloat16 is" in precision_text(four, HEAD, "float32")
    assert "8-bit blocks (int8)" in precision_text(HEAD, HEAD, "float32")


# --- ends ---------------------------------------------------------------------------------------


def test_the_head_follows_the_stages(tmp_path: Path) -> None:
    """In 16 bit where these are, in 8 where they have fewer, in the file's codes if it has some."""
    plain = write_checkpoint(tmp_path / "plain", num_hidden_layers=1, intermediate_size=64)
    stages = {name: NAMED[name] for name in ("none", "int8", "int4", "nf4", "file")}
    found = {name: head_quantisation_for(str(plain), one).name for name, one in stages.items()}
    assert found == {"none": "none", "int8": "int8", "int4": "int8", "nf4": "int8", "file": "int8"}
    assert head_quantisation_for(str(plain), stages["none"], "int4").name == "int4"
    assert head_quantisation_for(str(plain), stages["int4"], "none").name == "none"
    with pytest.raises(ConfigError, match="unknown quantisation 'int3'"):
        head_quantisation_for(str(plain), stages["int4"], "int3")

    def types(name: str, shape: tuple[int, ...]) -> str:
        return "F16" if name == "lm_head.weight" or len(shape) < 2 else "Q8_0"

    for file, kinds, expected in (
        ("codes.gguf", all_as("Q8_0"), "file"),
        ("plain-head.gguf", types, "int8"),
    ):
        write_gguf(plain, tmp_path / file, kinds)
        model = str(tmp_path / file)
        assert head_quantisation_for(model, stages["file"]).name == expected
        assert head_quantisation_for(model, stages["int4"]).name == "int8"


def test_the_head_of_block_files_is_as_they_have_it(tmp_path: Path) -> None:
    """One in 16 bit, as all had once, can be rounded as it is read."""
    mark = "0" * 64
    made = Manifest("m", mark, NAMED["int4"], "bfloat16", 8, (), None, (), "1", NAMED["int4-g32"])
    (tmp_path / MANIFEST).write_text(json.dumps(made.to_dict()))
    assert head_quantisation_for(str(tmp_path), NAMED["int4"]).name == "int4-g32"
    with pytest.raises(ConfigError, match="holds the output head in int4-g32, not none; leave"):
        head_quantisation_for(str(tmp_path), NAMED["int4"], "none")
    old = made.to_dict()
    del old["head_quantisation"], old["seal"]
    canonical = json.dumps(old, sort_keys=True, separators=(",", ":"))
    old["seal"] = hashlib.sha256(canonical.encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(old))
    assert head_quantisation_for(str(tmp_path), NAMED["int4"]).name == "none"
    assert head_quantisation_for(str(tmp_path), NAMED["int4"], "int8").name == "int8"


@pytest.mark.parametrize(
    ("draft", "stages", "expected"),
    [
        ("independent", "int4", "int4-g32"),  # hidden size 512
        ("independent", "none", "none"),
        ("easyspec", "int4", "none"),
        ("eagle", "int4", "int4-g32"),
        ("eagle3", "file", "int4-g32"),
        ("dspark", "int4", "int4-g32"),
        ("hybrid:ngram+mtp", "file", "file"),  # a layer of the base's own
        ("ngram", "int4", "none"),
        ("ppd", "int4", "none"),
        ("hybrid:ngram+independent", "nf4", "int4-g32"),
        ("hybrid:ngram+easyspec", "int4", "none"),
    ],
)
def test_drafts_follow_the_stages(tmp_path: Path, draft: str, stages: str, expected: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    choice = parse_draft(draft, lambda _: str(tmp_path))
    found = draft_quantisation_for(choice, str(tmp_path), NAMED[stages])
    assert found.name == expected
    assert draft_quantisation_for(choice, str(tmp_path), NAMED[stages], "int8").name == "int8"


def test_a_head_for_a_base_that_is_not_here_is_held_in_8_bits(tmp_path: Path) -> None:
    choice = parse_draft(f"hybrid:ngram+eagle:{tmp_path / 'x'}")
    assert draft_quantisation_for(choice, str(tmp_path / "none"), NAMED["int4"]).name == "int8"
