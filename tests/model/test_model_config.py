"""A config.json read by types and defaults of edgespec's own: what transformers makes of it."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import case
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from edgespec.model.layer_form import layer_form
from edgespec.model.model_config import ModelConfig
from edgespec.model.rope import Angles
from edgespec.planning.operations import LAYER_OPERATIONS
from edgespec.planning.text_part import CONVOLVING, DELTA, GROUPED, LATENT, text_settings

SMALL = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LENGTH = "original_max_position_embeddings"
LLAMA3 = {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"type": "dynamic", "factor": 1.0}
WAYS: dict[str, dict[str, Any]] = {
    "nothing else": {},
    "key heads": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "null key heads": {"num_key_value_heads": None},
    "head_dim": {"head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "a window": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 3},
    "a window unused": {"sliding_window": 5, "use_sliding_window": False},
    "no window": {"sliding_window": None},
    "older fields": {"rope_theta": 5e5, "rope_scaling": None},
    "linear": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {"rope_theta": 5e5, "rope_scaling": LLAMA3, "max_position_embeddings": 512},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 4096},
    "newer fields": {"rope_parameters": {"rope_type": "default", "rope_theta": 3e4}},
    "part of a head": {"partial_rotary_factor": 0.5},
    "others": {"bos_token_id": 5, "torch_dtype": "bfloat16", "pretraining_tp": 1, "who": [1]},
}
"""What a config.json says beside SMALL."""
GEMMA3 = {
    "older": {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "sliding_window_pattern": 2},
    "scaled": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "newer": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "list": {"layer_types": ["full_attention"] * 7, "final_logit_softcapping": 20.0},
}
GEMMA4 = {
    "list": {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]},
    "shared": {
        "num_kv_shared_layers": 2,
        "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
    },
    "tables": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
    "newer": {
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 2e6, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        }
    },
}
OLMO3 = {
    "scaled": {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 2e6},
    "older": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "newer": GEMMA3["newer"],
    "list": {"layer_types": ["full_attention"] * 7},
}
OWN_WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma2": {"caps": {"final_logit_softcapping": None, "query_pre_attn_scalar": 144}},
    "gemma3_text": GEMMA3,
    "gemma4_text": GEMMA4,
    "granite": {"scales": {"embedding_multiplier": 12, "residual_multiplier": 0.22}},
    "smollm3": {
        "listed": {"no_rope_layers": [1, 0, 1, 0, 1, 1, 1]},
        "every": {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
    },
    "qwen2_moe": {
        "step": {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
        "listed": {"mlp_only_layers": [6], "shared_expert_intermediate_size": 24},
    },
    "qwen3_next": {"listed": {"mlp_only_layers": [6]}, "shares": {"norm_topk_prob": False}},
    "glm4_moe": {
        "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        "dense": {"first_k_dense_replace": 7},
        "others": {"n_shared_experts": 3, "use_qk_norm": True, "norm_topk_prob": False},
    },
    "qwen3_moe": {
        "step": {"decoder_sparse_step": 2, "norm_topk_prob": True},
        "listed": {"mlp_only_layers": [6], "num_experts": 12},
    },
    "ernie4_5_moe": {
        "some": {"moe_layer_start_index": 2, "moe_layer_end_index": 5, "moe_norm_min": 0.5},
        "step": {"moe_layer_interval": 2, "moe_num_shared_experts": 0, "use_bias": True},
        "others": {"moe_k": 3, "moe_num_experts": 12, "moe_intermediate_size": 24},
    },
    "hunyuan_v1_moe": {"experts": {"num_experts": 12, "moe_topk": 3}},
    "gpt_oss": {
        "listed": {"layer_types": ["full_attention"] * 7, "swiglu_limit": 5.0},
        "experts": {"num_local_experts": 12, "num_experts_per_tok": 3, "swiglu_alpha": 1.0},
    },
    "olmo3": OLMO3,
    "cohere2": {"pattern": {"sliding_window_pattern": 2, "layer_norm_eps": 1e-3}},
    "exaone4": {"pattern": {"sliding_window_pattern": 3}},
    "seed_oss": {"biases beside": {"attention_out_bias": True, "attention_bias": False}},
    "ministral3": {"newer": {"rope_parameters": None}},
    "phi3": {"lengths": {"rope_scaling": {"type": "su", "short_factor": [1.0] * 6}}},
}
STATES = {"mamba_n_heads": 8}
"""What a Granite 4 of these sizes has to say of its states."""
READ = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    "rope_parameters",
)
OPTIONAL = (
    *("hidden_act", "hidden_activation", "attention_bias", "mlp_bias", "sliding_window"),
    *("layer_types", "no_rope_layers", "query_pre_attn_scalar", "final_logit_softcapping"),
    *("attn_logit_softcapping", "embedding_multiplier", "logits_scaling", "residual_multiplier"),
    "attention_multiplier",
)


MIXED = (
    *("intermediate_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    *("num_dense_layers", "use_expert_bias", "norm_topk_prob", "routed_scaling_factor"),
)


def ways_of(kind: str) -> dict[str, dict[str, Any]]:
    ways = WAYS | OWN_WAYS.get(kind, {})
    none = ("mistral", "ministral", "gemma2", "gemma3_text", "gemma4_text", "qwen2_moe", "gemma")
    none += ("ernie4_5_moe", "exaone4", "glm4", "gpt_oss", "mixtral", "qwen3_moe", "ministral3")
    if kind in (*none, *DELTA, *GROUPED):
        del ways["null key heads"]  # transformers takes none there
    if kind in ("gemma4_text", "exaone4"):
        del ways["no window"]  # nor that
    if kind in LATENT:
        del ways["head_dim"]  # which is that of the part that is turned, whatever is said
    own = {"gemma3_text": GEMMA3, "gemma4_text": GEMMA4, "olmo3": OLMO3}.get(kind)
    if own is not None:  # rotary settings by layer type are their own matter
        return {n: w for n, w in ways.items() if n in own or "rope" not in str(w)}
    return ways


def theirs_of(settings: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(**copy.deepcopy(settings))  # it changes what it is given


def is_refused(settings: dict[str, Any]) -> bool:
    """Whether transformers does, and with it ModelConfig or check_config, by the type of rope."""
    try:
        theirs_of(settings)
    except Exception:
        try:
            ours = ModelConfig(settings)
        except ValueError:
            return True
        return bool(ours.rope_parameters["rope_type"] == "longrope")
    return False


@pytest.mark.parametrize("kind", sorted(set(LAYER_OPERATIONS) - {*CONVOLVING, "nemotron_h"}))
def test_every_field_that_is_read_is_as_in_transformers(kind: str) -> None:
    defaults = AutoConfig.for_model(kind)
    assert ModelConfig({"model_type": kind}).rope_parameters == defaults.rope_parameters
    compared = 0
    for name, way in ways_of(kind).items():
        settings = {"model_type": kind, **SMALL, **way}
        if kind == "granitemoehybrid":
            settings |= STATES
        with case(kind, name):
            if is_refused(settings):
                continue
            theirs, ours = theirs_of(settings), ModelConfig(settings)
            for field in (*READ, *OPTIONAL):
                if hasattr(theirs, field) or (field in READ and kind != "cohere2"):
                    assert getattr(ours, field) == getattr(theirs, field), field
            theirs.allow_global_per_layer_attribute_access = True
            # Which files of GGUF alone are.
            theirs.linear_value_heads_tiled = theirs.linear_qkvz_in_order = False
            head_dim = getattr(theirs, "head_dim", None)
            assert ours.head_dim == (head_dim or 48 // 4)
            if kind != "gemma4_text":  # which has forms of its own
                assert layer_form(ours, 6) == layer_form(theirs, 6)
            compared += 1
    assert compared >= (11 if kind != "gemma4_text" else 9)
    for field in (*READ, *OPTIONAL):  # of a file that says nothing at all
        if hasattr(defaults, field):
            assert getattr(ModelConfig({"model_type": kind}), field) == getattr(defaults, field)


def test_a_model_with_convolutions_is_read_as_transformers_reads_it() -> None:
    """The width of its MLP is that of the matrices, which no field of theirs has."""
    ways: dict[str, dict[str, Any]] = {
        "nothing else": {},
        "by number": {"full_attn_idxs": [0, 3], "norm_eps": 1e-3, "tie_embedding": False},
        "by name": {"layer_types": ["conv", "full_attention"] * 3 + ["conv"], "conv_L_cache": 4},
        "an older width": {"block_ff_dim": 96, "block_multiple_of": 7},
        "stretched": {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 16},
        "as it is": {"block_auto_adjust_ff_dim": False, "rope_theta": 2e4},
    }
    for name, way in ways.items():
        settings = {"model_type": "lfm2", **SMALL, "num_key_value_heads": 2, **way}
        theirs = theirs_of(settings)
        ours = ModelConfig(text_settings(settings))
        with case(name):
            assert ours.intermediate_size == Lfm2MLP(theirs).w1.out_features
            assert ours.rms_norm_eps == theirs.norm_eps
            for field in ("layer_types", "rope_parameters", "tie_word_embeddings", "conv_L_cache"):
                assert getattr(ours, field) == getattr(theirs, field), field
            assert text_settings(ours.settings) == ours.settings
    settings = {"model_type": "lfm2_moe", **SMALL, "num_dense_layers": 3, "norm_topk_prob": False}
    theirs, ours = theirs_of(settings), ModelConfig(text_settings(settings))
    for field in MIXED:
        assert getattr(ours, field) == getattr(theirs, field), field
    strange = {"block_ffn_dim_multiplier": 1e300, "intermediate_size": 1 << 40, "full_attn_idxs": 3}
    assert text_settings({"model_type": "lfm2", **strange})


def test_a_nemotron_h_is_read_as_transformers_reads_it() -> None:
    """Its fields have names of their own, which older files and newer ones do not share."""
    ways: dict[str, dict[str, Any]] = {
        "a pattern": {"hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5},
        "newer names": {"layers_block_type": ["linear_attention", "full_attention", "mlp"]},
        "older names": {"layers_block_type": ["mamba", "attention", "mlp"], "use_bias": True},
        "others' names too": {
            **{"layer_norm_epsilon": 1e-3, "rms_norm_eps": 1e-5},
            **{"use_bias": True, "mamba_proj_bias": False},
            "layers_block_type": ["mamba"],
        },
        "experts": {
            "hybrid_override_pattern": "ME*E",
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
        },
        "sizes": {
            "hybrid_override_pattern": "M*-",
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "n_groups": 3,
            "ssm_state_size": 20,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "layer_norm_epsilon": 1e-3,
            "head_dim": 24,
            "num_key_value_heads": 2,
        },
    }
    names = {
        "layer_types": "layers_block_type",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "mlp_hidden_act",
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_d_state": "ssm_state_size",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_proj_bias": "use_bias",
        "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    }
    same = (*READ[:7], "tie_word_embeddings", "head_dim", "time_step_limit", "n_routed_experts")
    same += ("num_experts_per_tok", "moe_intermediate_size", "routed_scaling_factor")
    same += ("norm_topk_prob", "n_group", "topk_group", "moe_latent_size")
    for name, way in ways.items():
        settings = {"model_type": "nemotron_h", **SMALL, **way}
        theirs, ours = theirs_of(settings), ModelConfig(text_settings(settings))
        with case(name):
            for field in same:
                assert getattr(ours, field) == getattr(theirs, field), field
            for field, other in names.items():
                assert getattr(ours, field) == getattr(theirs, other), field
            assert text_settings(ours.settings) == ours.settings


def test_a_mixture_of_qwen_35_shares_by_the_sum_whatever_a_config_says() -> None:
    """As transformers' router has no such setting."""
    settings = {"model_type": "qwen3_5_moe_text", **SMALL, "norm_topk_prob": False}
    form = layer_form(ModelConfig(settings), 0)
    assert form is not None
    assert form.mixture is not None
    assert form.mixture.normed


def test_a_share_of_a_head_that_is_null_is_the_one_beside_it() -> None:
    angles = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": None}
    settings = {"model_type": "glm4_moe", **SMALL, "head_dim": 16, "rope_parameters": angles}
    found = Angles(ModelConfig(settings), None, torch.float32, torch.device("cpu"))
    assert len(found.frequencies) == 4


@pytest.mark.parametrize("form", ["linear", "llama3", "yarn"])
def test_angles_are_those_of_transformers(form: str) -> None:
    ways: list[dict[str, Any]] = [{}, {"partial_rotary_factor": 0.5}, {"head_dim": 32}]
    if form == "yarn":  # DeepSeek's, gpt-oss', and waves of which none is stretched, or all are
        deepseek = {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 32}
        oss = {"truncate": False, "beta_fast": 16.0, "beta_slow": 2, "attention_factor": 1.2}
        for own in (deepseek, oss, {"factor": 1.0}, {"original_max_position_embeddings": 4}):
            ways.append({"rope_scaling": YARN | own})
    for more in ways:
        settings = {"model_type": "llama", **SMALL, "hidden_size": 64, **WAYS[form], **more}
        theirs = theirs_of(settings)
        frequencies, factor = ROPE_INIT_FUNCTIONS[form](theirs)
        positions = torch.arange(0, 4000, 37)
        angles = positions.float()[:, None] * torch.cat((frequencies, frequencies))
        made = Angles(ModelConfig(settings), None, torch.float32, torch.device("cpu"))
        with case(form, more):
            assert torch.equal(made(positions)[0][:, 0], angles.cos() * factor)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 5}, "48 is no multiple of 5"),
        ({"rope_theta": "high"}, "rope_theta"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor .*is -1"),
        *(
            ({"rope_scaling": DYNAMIC | {"alpha": one}}, "alpha of rotary embeddings")
            for one in ("x", -5.0, 1e300)
        ),
        ({"rope_scaling": DYNAMIC | {"alpha": 9}, "head_dim": 2}, "heads of 2 numbers"),
        ({"rope_scaling": YARN | {"beta_fast": [32]}}, r"beta_fast .*is \[32\]"),
        ({"rope_scaling": YARN | {"mscale": -1.0}}, "mscale .*is -1.0"),
        *(
            ({"rope_scaling": LLAMA3 | {LENGTH: one}}, f"{LENGTH} of rotary embeddings")
            for one in ("x", -3)
        ),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta .*is 1"),
        ({"rope_parameters": {"full_attention": {}}}, "by layer type"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(Exception, match=says):
        ModelConfig({"model_type": "llama", **SMALL, **wrong})


def test_a_phi_with_an_older_name_for_long_angles_has_the_same() -> None:
    """Without their length among them there were none."""
    angles = {"short_factor": [1.5] * 6, "factor": 4.0}
    made = []
    for name in ("longrope", "su"):
        settings = {"model_type": "phi3", **SMALL, "rope_scaling": {"type": name, **angles}}
        config = ModelConfig(settings)
        made.append(Angles(config, None, torch.float32, torch.device("cpu"))(torch.arange(5)))
    assert torch.equal(made[0][0], made[1][0])
    for wrong in (None, 1):
        settings["original_max_position_embeddings"] = wrong
        with case(wrong), pytest.raises(ValueError, match=f"{LENGTH} is {wrong}"):
            ModelConfig(settings)
    for name, value in (("attention_factor", "x"), ("factor", [3])):
        settings = {"model_type": "phi3", **SMALL}
        settings["rope_scaling"] = {"type": "longrope", **angles, name: value}
        with case(name), pytest.raises(ValueError, match=f"{name} of rotary"):
            ModelConfig(settings)


def test_layers_that_are_listed_are_as_many_as_there_are() -> None:
    wrong = {"qwen3": {"layer_types": ["full_attention"]}, "smollm3": {"no_rope_layers": [1] * 9}}
    for kind, listed in wrong.items():
        with case(kind), pytest.raises(ValueError, match="layers, num_hidden_layers is 7"):
            ModelConfig({"model_type": kind, **SMALL, **listed})


@pytest.mark.parametrize("pattern", [0, None, "LLLG"])
def test_a_pattern_of_windows_says_nothing_where_layers_are_listed(pattern: object) -> None:
    """As EXAONE 4's files have it."""
    listed = ["full_attention"] * 7
    settings = {"model_type": "exaone4", **SMALL, "sliding_window_pattern": pattern}
    assert ModelConfig({**settings, "layer_types": listed}).layer_types == listed
    assert set(ModelConfig({**settings, "sliding_window": None}).layer_types) == {listed[0]}


def test_reading_a_model_that_edgespec_computes_imports_no_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scaling": null}')
    code = (
        "import sys; from pathlib import Path\n"
        "import edgespec.backends.torch_backend, edgespec.daemon.block_fetch\n"
        "from edgespec.model.loader import open_config\n"
        f"open_config(Path({str(tmp_path / 'config.json')!r}))\n"
        "print([name for name in sys.modules if name.startswith('transformers')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
