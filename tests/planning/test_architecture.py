"""Architecture: sizes from config.json of every family, and what is refused by field."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.cases import case

from edgespec.config import QUANTISATIONS, Quantisation
from edgespec.errors import ConfigError
from edgespec.model import families
from edgespec.model.model_config import ModelConfig
from edgespec.model.quantised.linear import stored_parts
from edgespec.planning.architecture import (
    FAMILIES,
    Architecture,
    architecture_of,
    longest_context,
    matrix_bytes,
)
from edgespec.planning.cost_model import ARCHITECTURES
from edgespec.planning.text_part import GROUPED, SHARING, text_settings

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
# Published config.json files, the fields that count.
MIXTURE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
GEMMA = {
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
}
# The text part of a model that reads images.
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        **GEMMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
}
MINISTRAL3 = {
    "model_type": "mistral3",
    "text_config": {
        **LLAMA,
        "model_type": "ministral3",
        "num_hidden_layers": 34,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 131072,
    },
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131072,
}
LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "block_ff_dim": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
LFM2_MOE = {
    **LFM2,
    "model_type": "lfm2_moe",
    "num_hidden_layers": 24,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "full_attn_idxs": None,
    "layer_types": [("conv", "full_attention")[n in (2, 6, 10, 14, 18, 21)] for n in range(24)],
}


GRANITE_H = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "shared_intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 100352,
    "tie_word_embeddings": True,
    "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
    "num_local_experts": 0,
    "mamba_n_heads": 64,
    "mamba_d_state": 128,
}


NEMOTRON_MOE = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 131072,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}


def test_a_published_config_gives_the_architecture_in_the_list() -> None:
    of = architecture_of(LLAMA, "config.json")
    listed = ARCHITECTURES["llama-2-13b"]
    assert of.layer_weights == listed.layer_weights
    assert (of.kv_width, of.head_bytes, of.layers) == (5120, listed.head_bytes, 40)
    assert longest_context(LLAMA, "config.json") == 4096


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 13.016e9),
        (MIXTURE, 30.53e9),
        (GEMMA, 2.614e9),
        (GEMMA3, 3.88e9),
        (MINISTRAL3, 8.49e9),
        (GPT_OSS, 20.91e9),
        (LFM2, 1.1703e9),
        (GRANITE_H, 3.191e9),
        (LFM2_MOE, 8.34e9),
        (NEMOTRON_MOE, 31.578e9),
    ],
)
def test_the_weights_add_up_to_the_published_count(
    config: dict[str, object], parameters: float
) -> None:
    of = architecture_of(config, "config.json")
    weights = of.layers * of.layer_weights + (1 if of.tied else 2) * of.head_bytes // 2
    assert weights == pytest.approx(parameters, rel=1e-3)


def test_a_phi_with_angles_for_long_sequences_is_held_to_short_ones() -> None:
    angles = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    config = {"model_type": "phi3", "max_position_embeddings": 131072, "rope_scaling": angles}
    config |= {"original_max_position_embeddings": 4096}
    once = text_settings(config)
    assert longest_context(config, "config.json") == once["max_position_embeddings"] == 4096
    assert once["rope_scaling"]["factor"] == 32.0
    assert text_settings(once) == once


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    of = architecture_of(GEMMA, "config.json")
    assert (of.width, of.kv_width, of.tied) == (2048, 1024, True)
    assert of.attention_matrices == ((2048, 2304), (1024, 2304), (1024, 2304), (2304, 2048))


def test_what_can_be_planned_is_what_runs() -> None:
    assert set(FAMILIES) == set(families.FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_out_is_planned_as_it_runs(family: str) -> None:
    """Plans counted other sizes, or refused the model, for what a model's own layers take."""
    heads = 20 if family == "glm4_moe_lite" else 128
    least = {"model_type": family, "num_hidden_layers": 12, "hidden_size": 2560, "vocab_size": 512}
    least |= {"intermediate_size": 2048, "num_attention_heads": heads}
    least |= {"num_experts_per_tok": 4, "moe_intermediate_size": 128, "num_experts": 8}
    least |= {"max_position_embeddings": 512, "shared_intermediate_size": 1024}
    least |= {"n_routed_experts": 16, "moe_num_experts": 16, "moe_k": 2, "moe_topk": 2}
    of, config = architecture_of(least, "config.json"), ModelConfig(text_settings(least))
    assert of.tied == config.tie_word_embeddings
    if of.latent is None:
        assert (of.kv_heads, of.head_dim) == (config.num_key_value_heads, config.head_dim)
    else:
        assert of.latent.query_rank == config.q_lora_rank
        parts = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        assert (of.latent.straight, of.latent.turned, of.latent.value) == parts


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read(family: str) -> None:
    other: dict[str, object] = {"shared_intermediate_size": 512, "num_local_experts": 32}
    other |= {"block_auto_adjust_ff_dim": False, "n_routed_experts": 64, "n_shared_experts": 2}
    other |= {"moe_num_experts": 64, "moe_k": 6, "moe_topk": [4, 4]}
    of = architecture_of({**MIXTURE, **other, "model_type": family}, "config.json")
    narrow = ("qwen3_moe", "lfm2_moe", "ernie4_5_moe", *SHARING, *GROUPED)
    assert of.intermediate == (768 if family in narrow else 6144)
    experts = dict.fromkeys(("qwen3_moe", "olmoe", "lfm2_moe", *SHARING), 128)
    experts |= dict.fromkeys(("gpt_oss", "mixtral", "granitemoehybrid"), 32)
    experts |= dict.fromkeys((*GROUPED, "ernie4_5_moe"), 64) | {"hunyuan_v1_moe": 128}
    assert of.experts == experts.get(family, 0)
    shared = {"granitemoehybrid": 512, "qwen2_moe": 5632, "hunyuan_v1_moe": 6144}
    shared["ernie4_5_moe"] = 2 * 768
    shared |= dict.fromkeys(SHARING[1:], 512) | dict.fromkeys(GROUPED, 2 * 768)
    assert of.shared == shared.get(family, 0)
    assert of.layers == 48


def test_layers_without_experts_are_counted() -> None:
    usual = architecture_of(MIXTURE, "config.json")
    for change in (
        {"mlp_only_layers": [3, 40]},
        {"mlp_only_layers": [3], "decoder_sparse_step": 1},
    ):
        of = architecture_of({**MIXTURE, **change}, "config.json")
        assert (of.dense, of.dense_width) == (len(change["mlp_only_layers"]), 6144)
        more = of.dense * (3 * 6144 * 2048 - usual.mlp_weights)
        assert of.layers * of.mlp_weights == pytest.approx(48 * usual.mlp_weights + more, abs=48)
    half = architecture_of({**MIXTURE, "decoder_sparse_step": 2}, "config.json")
    assert half.dense == 24
    ernie = {**MIXTURE, "model_type": "ernie4_5_moe", "moe_num_experts": 64, "moe_k": 6}
    assert architecture_of(ernie, "config.json").dense == 1
    ernie |= {"moe_layer_interval": 2, "moe_layer_start_index": 4, "moe_layer_end_index": 40}
    assert architecture_of(ernie, "config.json").dense == 48 - 18


def test_a_layer_that_convolves_holds_its_inputs_and_reads_few_of_them() -> None:
    of = architecture_of(LFM2, "config.json")
    assert (of.layers, of.convolutions, of.intermediate, of.tied) == (16, 10, 8192, True)
    assert of.kv_bytes * 16 == 10 * 2 * 2048 + 6 * 2 * 2 * 512
    assert of.kv_bytes * of.seen_share == pytest.approx(6 * 2 * 2 * 512 / 16)
    assert of.largest_matrix == 8192 * 2048
    all_attend = {**LFM2, "full_attn_idxs": None}
    assert architecture_of(all_attend, "config.json").convolutions == 0
    with pytest.raises(ConfigError, match="layer_types is no list of num_hidden_layers"):
        architecture_of({**LFM2, "layer_types": ["conv"]}, "config.json")


def test_a_layer_with_a_state_holds_as_much_however_long_the_text_is() -> None:
    of = architecture_of(GRANITE_H, "config.json")
    assert (of.layers, of.states, of.state_value) == (40, 36, 64)
    assert of.kv_bytes == 4 * 2 * 2 * 512 // 40, "of the layers that attend"
    row = 4 * (128 + 4096 + 64) + 4 * (2 * 128 + 4096)
    state = 4 * 4096 * 128
    assert of.request_bytes == 36 * (3 * state + 256 * row) // 40
    assert replace(ARCHITECTURES["granite-4-h-micro"], head_dim=64) == of


def test_the_text_part_of_a_model_that_reads_images_counts() -> None:
    of = architecture_of(GEMMA3, "config.json")
    assert (of.layers, of.hidden, of.tied) == (34, 2560, True)
    assert not architecture_of({**GEMMA3, "tie_word_embeddings": False}, "config.json").tied
    assert longest_context(GEMMA3, "config.json") == 131072
    with pytest.raises(ConfigError, match="'gemma3', whose sizes are not known"):
        architecture_of({"model_type": "gemma3"}, "config.json")


@pytest.mark.parametrize(
    "field",
    sorted(set(MIXTURE) - {"model_type", "intermediate_size"}),  # that one is not read
)
def test_a_wrong_field_is_named(field: str) -> None:
    read = longest_context if field == "max_position_embeddings" else architecture_of
    usual = field in ("head_dim", "num_key_value_heads")  # by the heads, as models take it
    for value in (0, -3, 1.5, "8", True, 10**30, *(() if usual else (None,))):
        with case(value), pytest.raises(ConfigError, match=f"config.json: {field} is "):
            read({**MIXTURE, field: value}, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', whose sizes are not known; known ones: "),
        ({"model_type": "jamba"}, "'jamba', which does not run: .*use qwen3-8b$"),
        ({"layer_types": ["mamba", "attention"]}, "does not run: .*recurrent state"),
        ({"model_type": None}, "model_type is None"),
        ({"num_key_value_heads": 7}, "num_key_value_heads is 7, which does not divide"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok is 200, more than"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3, it must be a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ],
)
def test_what_does_not_add_up_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        architecture_of({**MIXTURE, **change}, "config.json")


def test_a_nemotron_h_has_experts_in_the_layers_that_say_so() -> None:
    of = architecture_of(NEMOTRON_MOE, "config.json")
    assert of == ARCHITECTURES["nemotron-3-nano-30b-a3b"]
    assert (of.alone, of.states, of.attending, of.dense) == (23, 23, 6, 0)
    assert of.layers * of.mlp_weights == pytest.approx(23 * 128 * 2 * 1856 * 2688, abs=52)
    mixed = {**NEMOTRON_MOE, "hybrid_override_pattern": "M*E-", "intermediate_size": 4096}
    one = architecture_of(mixed, "config.json")
    assert (one.alone, one.dense, one.dense_width) == (2, 1, 4096)
    both = 128 * 2 * 1856 * 2688 + 2 * 4096 * 2688
    assert one.layers * one.mlp_weights == pytest.approx(both, abs=4)
    states, attention = 10304 * 2688 + 4096 * 2688, (2 * 4096 + 2 * 256) * 2688
    every = states + attention + both + 2 * 3712 * 2688
    assert one.layers * one.layer_weights == pytest.approx(every, abs=12)
    dense = architecture_of({**mixed, "hybrid_override_pattern": "M*--"}, "config.json")
    assert (dense.experts, dense.shared, dense.intermediate) == (0, 0, 4096)


@pytest.mark.parametrize("name", [name for name in QUANTISATIONS if name != "none"])
@pytest.mark.parametrize("shape", [(256, 512), (5120, 1024)])
def test_a_matrix_has_the_bytes_that_blocks_store(name: str, shape: tuple[int, int]) -> None:
    quantisation = QUANTISATIONS[name]
    parts = stored_parts(quantisation, torch.Size(shape))
    stored = sum(math.prod(part) * dtype.itemsize for part, dtype in parts.values())
    # nf4 keeps the 16 values of its code with each matrix; nothing else may differ.
    assert matrix_bytes(*shape, quantisation) == pytest.approx(stored, abs=2048)


def test_bits_a_weight() -> None:
    bits = {
        name: matrix_bytes(4096, 4096, one) * 8 / 4096**2 for name, one in QUANTISATIONS.items()
    }
    assert bits["none"] == 16
    assert bits["int8"] == 8 + 16 / 4096
    assert (bits["int4-g32"], bits["int4"], bits["int4-g128"]) == (5.0, 4.5, 4.25)
    assert bits["nf4"] == 4.5
    assert bits["nf4-dq"] == pytest.approx(4 + 8 / 64 + 32 / 64 / 256, rel=1e-5)


def test_a_mixture_holds_all_experts() -> None:
    of = Architecture(1, 64, 32, 4, 2, 100, experts=6, active=2)
    plain = Quantisation()
    assert of.mlp_bytes(plain) == 6 * 3 * 64 * 32 * 2
    assert of.layer_bytes(plain) == 2 * of.layer_weights
