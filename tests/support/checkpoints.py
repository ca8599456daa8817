"""Tiny random checkpoints and tokenizers on disk, and transformers' own answers to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog, then 12 more times.",
    "def add(one, two):\n    return one + two\n",
    "naïve café, Grüße aus Köln — 今日は世界, привет мир 👩‍👩‍👧",
] * 4


WINDOW = 5
"""Positions that a sliding window of FAMILY_SETTINGS reaches back, a row's own included."""

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e2, "alpha": 50.0, "factor": 1.0}
_GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 96,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e3,
        },
    },
}
_GRANITE = {
    "embedding_multiplier": 3.1,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.7,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.3,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "head_dim": 16,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "initializer_range": 0.05,  # as of granitemoehybrid-mamba
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-rope": {"rope_parameters": _LLAMA3_ROPE},
    "llama-biases": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen2-windows": {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 16},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 2.0},
    "gemma3_text": _GEMMA
    | {
        "sliding_window_pattern": 2,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma4_text": _GEMMA4,
    "gemma4_text-shared": _GEMMA4
    | {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 2
        + ["full_attention", "sliding_attention"]
        + ["full_attention"],
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "gemma4_text-experts": _GEMMA4
    | {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "use_bidirectional_attention": "vision",
    },
    "phi3": {"sliding_window": WINDOW, "partial_rotary_factor": 0.5},
    "phi3-long": {
        "sliding_window": None,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 128,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e2,
            "short_factor": [1.1, 1.7],
            "long_factor": [2.0, 40.0],
        },
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "swiglu_limit": 1.5,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "ministral": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 4,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.7,
        },
    },
    "granite": _GRANITE,
    "granitemoehybrid": _GRANITE
    | {
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "layer_types": ["full_attention"] * 4,
        "mamba_n_heads": 8,
    },
    "granitemoehybrid-nope": _GRANITE
    | {
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 4,
        "mamba_n_heads": 8,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid-mamba": _GRANITE
    | {
        "shared_intermediate_size": 48,
        "num_local_experts": 0,
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_expand": 2,
        "initializer_range": 0.1,  # a scan in float32 even in float64, which larger weights show
    },
    "falcon_h1": {
        "head_dim": 16,
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "initializer_range": 0.2,  # as of granitemoehybrid-mamba
        "embedding_multiplier": 3.1,
        "lm_head_multiplier": 0.6,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 1.7,
        "ssm_in_multiplier": 0.7,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.8, 1.3, 0.9, 0.6],
        "mlp_multipliers": [1.6, 0.4],
    },
    "falcon_h1-normed": {
        "mamba_d_ssm": None,
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
        "mamba_expand": 1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 20,
        "n_groups": 2,
        "ssm_state_size": 24,
        "time_step_floor": 0.1,  # transformers bounds steps by time_step_min, in prompts alone
        "initializer_range": 0.1,
    },
    "nemotron_h-experts": {
        "head_dim": 16,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 20,
        "n_groups": 2,
        "ssm_state_size": 24,
        "time_step_floor": 0.1,  # as of nemotron_h
        "initializer_range": 0.1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.3,
    },
    "qwen3_5_text": _DELTA,
    "granitemoehybrid-experts": _GRANITE
    | {
        "intermediate_size": 24,
        "shared_intermediate_size": 48,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "mamba_n_heads": 4,
        "mamba_d_state": 24,
        "initializer_range": 0.1,  # as of granitemoehybrid-mamba
    },
    "qwen2_moe": _MIXTURE
    | {
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "qwen3_5_moe_text": _DELTA | _MIXTURE | {"shared_expert_intermediate_size": 40},
    "qwen3_next": _DELTA
    | _MIXTURE
    | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [3]},
    "glm4_moe": {
        "head_dim": 16,
        "attention_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.3,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "initializer_range": 0.2,  # heads are turned in float32 even in float64
    },
    "hunyuan_v1_moe": {
        "head_dim": 16,
        "intermediate_size": 24,
        "num_experts": 6,
        "moe_topk": 2,
        "rope_parameters": _NTK_ALPHA,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "smollm3-windows": {
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_theta": 1e2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gemma": {"head_dim": 16, "tie_word_embeddings": True},
    "exaone4": {
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "seed_oss": {"head_dim": 16, "attention_bias": True, "attention_out_bias": True},
    "ernie4_5": {"head_dim": 16, "use_bias": True, "initializer_range": 0.2},  # as of its mixture
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_parameters": _NTK_ALPHA,
    },
    "glm4": {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-5},
    "cohere2": {
        "head_dim": 16,
        "initializer_range": 0.2,  # as of Ernie
        "logit_scale": 0.3,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "mixtral": {
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "lfm2": {
        "block_multiple_of": 16,
        "layer_types": ["conv", "full_attention", "conv", "conv"],
        "tie_word_embeddings": True,
    },
    "lfm2-biases": {
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 4,
        "conv_bias": True,
        "full_attn_idxs": [0, 2],
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "routed_scaling_factor": 1.3,
        "tie_word_embeddings": True,
    },
    "deepseek_v2": _LATENT
    | {
        "q_lora_rank": None,
        "topk_method": "greedy",
        "initializer_range": 0.2,  # heads are turned in float32 even in float64
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e3,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v2-groups": _LATENT
    | {
        "topk_method": "group_limited_greedy",
        "topk_group": 1,
        "initializer_range": 0.2,
        "attention_bias": True,
    },
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    "glm4_moe_lite-dense": _LATENT
    | {"mlp_layer_types": ["dense"] * 4, "rope_interleave": False, "attention_bias": True},
}
"""A small model of every family and variant that runs: settings by model type, then "-variant"."""

FOLDING = (
    *("granitemoehybrid-mamba", "granitemoehybrid-experts"),
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    *("falcon_h1", "falcon_h1-normed", "nemotron_h", "nemotron_h-experts"),
)
"""Those with layers that keep a state: no plan and no graph runs them, and rows are given back."""

LATER_TYPES = (
    *("gpt_oss", "ministral", "ministral3", "granite", "granitemoehybrid", "smollm3"),
    *("olmo2", "olmo3", "gemma", "exaone4", "seed_oss", "ernie4_5", "glm4", "cohere2", "olmoe"),
    *("mixtral", "hunyuan_v1_dense", "lfm2_moe", "qwen2_moe", "qwen3_5_moe_text"),
    *("qwen3_next", "glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe"),
    *("deepseek_v3", "glm4_moe_lite", "nemotron_h-experts"),
)
"""Families whose parts are those of earlier ones in new numbers: most of their cases are thorough,
but for the parts that are their own."""


def write_family(folder: Path, name: str, **settings: Any) -> Path:
    """Save a random model of FAMILY_SETTINGS, norms and biases random too; returns `folder`."""
    kind = name.partition("-")[0]
    chosen = FAMILY_SETTINGS[name] | settings
    return write_checkpoint(folder, kind=kind, random_vectors=True, **chosen)


def write_checkpoint(
    folder: Path,
    *,
    kind: str = "llama",
    seed: int = 0,
    shard_size: int | None = None,
    random_vectors: bool = False,
    **settings: Any,
) -> Path:
    """Save a random model of 4 small layers with grouped-query attention; returns `folder`.

    `settings` override the configuration; `shard_size` (bytes) splits the weights over files.
    Norms and biases do nothing to a new model: `random_vectors` gives them something to do.
    """
    chosen = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.4,  # random models need large weights to tell contexts apart
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": None,
    } | settings
    if kind == "mistral":
        chosen.setdefault("sliding_window", None)
    config = AutoConfig.for_model(kind, **chosen)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if random_vectors:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1 or name.endswith("bias"):
                    parameter += 0.3 * torch.randn_like(parameter)
            for name, buffer in model.named_buffers():
                if name.endswith(("layer_scalar", "expert_bias", "correction_bias")):
                    buffer += 0.3 * torch.randn_like(buffer)
    model.save_pretrained(folder, max_shard_size=shard_size or "5GB")
    return folder


def reference(folder: Path, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The whole model as transformers itself runs it."""
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        # No other form of it computes a soft cap, or sinks.
        attn_implementation="eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa",
        experts_implementation="eager",
        local_files_only=True,
    ).eval()


@torch.inference_mode()
def plain_hidden(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Hidden rows [n, H] behind the final norm, of `tokens` as one plain sequence."""
    return model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Logits [V] behind the last of `tokens`."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1].to(model.dtype)


def write_tokenizer(folder: Path, *, style: str = "bytes", vocab: int = 400, **names: Any) -> Path:
    """Save a small tokenizer: byte-level BPE ("bytes") or Llama 2's kind ("fallback")."""
    tokenizer = _byte_level(vocab) if style == "bytes" else _byte_fallback(vocab)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **({"bos_token": "<s>", "eos_token": "</s>"} | names)
    )
    wrapped.save_pretrained(folder)
    return folder


def write_texts(file: Path) -> Path:
    """Save two hundred documents to train on, as JSON lines."""
    lines = [{"text": f"{number} " + " ".join(CORPUS)} for number in range(200)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def _byte_level(vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=False)])
    return _with_bos(tokenizer)


def _byte_fallback(vocab: int) -> Tokenizer:
    """Spaces as ▁, and one token a byte for characters outside the vocabulary."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=vocab - 256, show_progress=False)
    trained.train_from_iterator(CORPUS[:2], trainer)
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    names += [name for name, _ in learned]
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            {name: index for index, name in enumerate(names)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _with_bos(tokenizer)
