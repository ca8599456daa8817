"""Configs: the config.json that transformers would have for the model in a GGUF file.

Keys are those of ggml's docs/gguf.md and gguf-py's constants.py. What a file does not state is what
llama.cpp takes for it (src/llama-model.cpp, ggml-org/llama.cpp).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from edgespec.errors import ModelError
from edgespec.model.gguf.architectures import ROPE, architecture_of
from edgespec.model.gguf.llama3_rope import llama3_settings
from edgespec.model.gguf.reader import GgufFile, LongArray
from edgespec.model.model_config import MOST_STATE, MOST_TAPS, MOST_WIDTH
from edgespec.model.reading import reading
from edgespec.planning.architecture import MOST_EXPERTS, MOST_LAYERS

Settings = dict[str, Any]

_MOST = 1 << 20  # of any size but the context's; the largest known vocabulary has 262,144 tokens
_MOST_CONTEXT = 1 << 31
_MOST_HEAD = 1024  # columns of one head of attention; models have up to 256
_MOST_REAL = 1e30
_SHARED = "attention.shared_kv_layers"
_SIGMOID = 2  # of expert_gating_func, which has the softmax as 1
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size of each whose attention is scaled by hidden_size / heads."""


def config_of(file: GgufFile) -> Settings:
    """config.json. Raises ModelError for settings that are missing, damaged or not run."""
    with reading(file.path, "take another file of the model"):
        kind = architecture_of(file)
        keys = _Keys(file)
        settings = {
            "model_type": kind.model_type,
            **_common(keys),
        }
        if keys.architecture in _FAMILY:
            settings |= _FAMILY[keys.architecture](keys)
        if scaling := _scaling(keys, settings):
            settings["rope_scaling"] = scaling
    return settings


class _Keys:
    """The settings of a file, by their names without the architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.values["general.architecture"])

    def refusal(self, what: str) -> ModelError:
        return ModelError(f"{self.file.path} {what}; take another file of the model")

    def whole(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.refusal(f"says that {self.architecture}.{name} is {value!r}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, str | LongArray) or not 0 < value < _MOST_REAL:
            raise self.refusal(f"says that {self.architecture}.{name} is {value!r}")
        return shortest(float(value))

    def maybe(self, name: str) -> float | None:
        """The number, if there is one that is not 0."""
        return self.real(name) if self.get(name) else None

    @property
    def expert(self) -> int | None:
        """The width of an expert, where the file says it."""
        name = "expert_feed_forward_length"
        return self.whole(name) if self.get(name) else None

    @property
    def layers(self) -> int:
        """Those of the model; in a file such that guess may be behind them."""
        count, name = self.whole("block_count", most=MOST_LAYERS), "nextn_predict_layers"
        return count - (self.whole(name, most=count - 1) if self.get(name) else 0)

    @property
    def head(self) -> int:
        """Numbers of one head."""
        usual = self.whole("embedding_length") // self.whole("attention.head_count")
        return self.whole("attention.key_length", max(1, usual), most=_MOST_HEAD)

    @property
    def window(self) -> int | None:
        name = "attention.sliding_window"
        return self.whole(name) if self.get(name) else None

    def text(self, name: str) -> str:
        return str(self.get(name) or "")

    def get(self, name: str) -> object:
        return self.file.values.get(f"{self.architecture}.{name}")

    def array(self, name: str) -> list[Any] | None:
        return self.file.array(f"{self.architecture}.{name}")

    def token(self, name: str) -> int | None:
        value = self.file.values.get(f"tokenizer.ggml.{name}")
        return value if isinstance(value, int) else None

    def shape(self, tensor: str) -> tuple[int, ...]:
        stored = self.file.tensors.get(tensor)
        if stored is None:
            raise self.refusal(f"has no tensor {tensor!r}")
        return stored.shape

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None and default is None:
            raise self.refusal(f"does not say what {self.architecture}.{name} is")
        return default if value is None else value


def shortest(value: float) -> float:
    """The shortest number that is the same in float32, as which files have it: 1e-05 again."""
    kept = struct.pack("<f", value)
    forms = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((one for one in forms if struct.pack("<f", one) == kept), value)


def _common(keys: _Keys) -> Settings:
    tensors = keys.file.tensors
    embedding = keys.shape("token_embd.weight")
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    layers = keys.whole("block_count", most=MOST_LAYERS)
    numbers = {name.split(".")[1] for name in tensors if name.startswith("blk.")}
    if numbers == {str(layers - 1)} and keys.get("nextn_predict_layers"):
        raise keys.refusal("holds the head of a model that guesses (MTP), and is to lie beside it")
    if embedding[1:] != (hidden,) or numbers != {str(number) for number in range(layers)}:
        raise keys.refusal(
            f"says that it has {layers} layers of {hidden} columns, and holds {len(numbers)}, with "
            f"an embedding of {list(embedding)}"
        )
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _each(keys, "feed_forward_length", keys.expert)[0],
        "num_attention_heads": heads,
        "num_key_value_heads": max(_each(keys, "attention.head_count_kv", heads)),
        "head_dim": keys.head,
        # A model with layer norms has no other.
        "rms_norm_eps": keys.real(
            "attention.layer_norm_rms_epsilon", keys.maybe("attention.layer_norm_epsilon")
        ),
        "max_position_embeddings": keys.whole("context_length", most=_MOST_CONTEXT),
        "rope_theta": keys.real("rope.freq_base", 10000.0),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        **{name: keys.token(name) for name in ("bos_token_id", "eos_token_id")},
        "pad_token_id": None,
    }


def _each(keys: _Keys, name: str, usual: int | None = None) -> list[int]:
    """A number of each layer where the file tells of each, all alike or 0 but in a Gemma 4, else of
    all."""
    if not isinstance(keys.get(name), LongArray):
        return [keys.whole(name, usual)]
    each = keys.array(name) or [0]
    alike = len({*each, 0}) == 2 or keys.architecture == "gemma4"
    if not alike or not all(isinstance(one, int) and 0 <= one <= _MOST for one in each):
        raise keys.refusal(f"says that {keys.architecture}.{name} is {sorted(set(each))}")
    return each


def _attending(keys: _Keys, other: str) -> list[str]:
    """The type of each layer: full where it has heads of keys, else `other`."""
    heads = _each(keys, "attention.head_count_kv", 0)
    layers = keys.whole("block_count", most=MOST_LAYERS)
    if len(heads) != layers:
        raise keys.refusal(f"tells {len(heads)} layers' heads of keys, of {layers}")
    return ["full_attention" if one else other for one in heads]


def _lfm2(keys: _Keys) -> Settings:
    bias = any(name.endswith("shortconv.in_proj.bias") for name in keys.file.tensors)
    return {
        "layer_types": _attending(keys, "conv"),
        "conv_L_cache": keys.whole("shortconv.l_cache"),
        "conv_bias": bias,
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(keys: _Keys) -> Settings:
    # Shares are normed by their sum, which no key says.
    experts, dense = _behind_dense(keys)
    more = _lfm2(keys) | _chosen(keys, experts)
    return more | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "num_dense_layers": dense,
        "use_expert_bias": any("exp_probs_b" in name for name in keys.file.tensors),
    }


def _deepseek2(keys: _Keys) -> Settings:
    of = "_mla" if keys.get("attention.key_length_mla") else ""  # which older files lack
    most = MOST_WIDTH // keys.whole("attention.head_count")
    key = keys.whole(f"attention.key_length{of}", most=most)
    turned = keys.whole("rope.dimension_count", most=most)
    if key <= turned:
        raise keys.refusal(f"says that {turned} of a head's {key} numbers are turned")
    tensors, of_queries = keys.file.tensors, "attention.q_lora_rank"
    mixture = _grouped(keys)
    # Without a word about it experts are chosen by a softmax, but for those with a bias.
    biased = any("exp_probs_b" in name for name in tensors)
    sigmoid = keys.whole("expert_gating_func", 1 + biased) == _SIGMOID
    return mixture | {
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "num_key_value_heads": keys.whole("attention.head_count"),
        "kv_lora_rank": keys.whole("attention.kv_lora_rank", most=most - turned),
        "q_lora_rank": keys.whole(of_queries) if keys.get(of_queries) else None,
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": keys.whole(f"attention.value_length{of}", most=most),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors,
        "topk_method": "group_limited_greedy" if mixture["n_group"] > 1 else "greedy",
    }


def _llama(keys: _Keys) -> Settings:
    tensors = keys.file.tensors
    biases = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if not keys.get("expert_count"):
        return biases
    if keys.architecture != "llama" or any(biases.values()):
        raise keys.refusal("is a mixture of experts, which edgespec does not run")
    return _mixture(keys) | {"model_type": "mixtral", "sliding_window": None}


def _mixture(keys: _Keys) -> Settings:
    """Of a model whose layers all have experts; which width they have, others say."""
    experts, with_experts = _experts(keys)
    if not with_experts >= set(range(keys.layers)):
        raise keys.refusal("has layers without experts, which edgespec does not run")
    return _chosen(keys, experts)


def _chosen(keys: _Keys, experts: int) -> Settings:
    """How many experts there are, and how many a row goes through."""
    return {
        "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": keys.whole("expert_used_count", most=experts),
    }


def _olmoe(keys: _Keys) -> Settings:
    clip = keys.maybe("attention.clamp_kqv")
    return _mixture(keys) | {"norm_topk_prob": False, "clip_qkv": clip}


def _ernie(keys: _Keys) -> Settings:
    return {"use_bias": "blk.0.attn_q.bias" in keys.file.tensors}


def _ernie_moe(keys: _Keys) -> Settings:
    # Those with experts are the last ones, or each so many of them.
    experts, with_experts = _experts(keys)
    inner, first = keys.whole("expert_feed_forward_length"), min(with_experts)
    step = keys.whole("interleave_moe_layer_step", 1)
    layers = keys.whole("block_count", most=MOST_LAYERS)
    if with_experts != {n for n in range(first, layers) if (n + 1) % step == 0}:
        raise keys.refusal("has experts in other layers than it says")
    return _ernie(keys) | {
        "moe_num_experts": experts,
        "moe_k": keys.whole("expert_used_count", most=experts),
        "moe_intermediate_size": inner,
        "moe_num_shared_experts": _shared_width(keys) // inner,
        "moe_layer_start_index": first,
        "moe_layer_interval": step,
    }


def _shared_width(keys: _Keys) -> int:
    """The width of the MLP beside the experts, as its matrices have it; 0 where there is none."""
    named = (t for t in keys.file.tensors.values() if t.name.endswith("ffn_up_shexp.weight"))
    found = next(named, None)
    return 0 if found is None else found.rows


def _hunyuan_moe(keys: _Keys) -> Settings:
    mixture = _mixture(keys)
    if _shared_width(keys) != keys.whole("feed_forward_length"):
        raise keys.refusal("has an MLP beside the experts that is not as wide as one of them")
    return {
        "num_experts": mixture["num_experts"],
        "moe_topk": mixture["num_experts_per_tok"],
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
    }


def _exaone4(keys: _Keys) -> Settings:
    # Without windows all layers are full, each first of one.
    return {
        "sliding_window": keys.window,
        "layer_types": _layer_types(keys, 4 if keys.window else 1),
    }


def _glm4(keys: _Keys) -> Settings:
    return {
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "partial_rotary_factor": keys.whole("rope.dimension_count", keys.head) / keys.head,
    }


def _glm4_moe(keys: _Keys) -> Settings:
    named = "blk.0.attn_q_norm.weight" in keys.file.tensors
    return _glm4(keys) | _grouped(keys) | {"use_qk_norm": named}


def _grouped(keys: _Keys) -> Settings:
    """Of experts in groups, as DeepSeek V3 has them, in all layers behind the first ones."""
    experts, dense = _behind_dense(keys)
    more = {"num_hidden_layers": keys.layers, "first_k_dense_replace": dense}
    return _groups(keys, experts) | more


def _groups(keys: _Keys, experts: int) -> Settings:
    """How some of so many experts are chosen, in groups."""
    groups = keys.whole("expert_group_count", 1, most=experts)
    inner = keys.whole("expert_feed_forward_length")
    return {
        "n_routed_experts": experts,
        "n_shared_experts": keys.whole("expert_shared_count", most=MOST_WIDTH // inner),
        "num_experts_per_tok": keys.whole("expert_used_count", most=experts),
        "moe_intermediate_size": inner,
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
        "routed_scaling_factor": keys.maybe("expert_weights_scale") or 1.0,
        "n_group": groups,
        "topk_group": keys.whole("expert_group_used_count", 1, most=groups),
    }


def _behind_dense(keys: _Keys) -> tuple[int, int]:
    """How many experts all layers have behind so many first ones."""
    experts, with_experts = _experts(keys)
    dense = min(with_experts, default=0)
    if with_experts & set(range(keys.layers)) != set(range(dense, keys.layers)):
        raise keys.refusal("has layers without experts behind such that have them")
    return experts, dense


def _cohere2(keys: _Keys) -> Settings:
    return {
        "layer_norm_eps": keys.real("attention.layer_norm_epsilon"),
        "logit_scale": keys.real("logit_scale"),
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": _layer_types(keys, 4),
    }


def _mistral3(keys: _Keys) -> Settings:
    # Ministral 3, or a Mistral Small whose file is as new.
    kind = "ministral3" if keys.get("attention.temperature_scale") else "mistral"
    return _llama(keys) | {"model_type": kind, "sliding_window": None}


def _granite(keys: _Keys) -> Settings:
    if keys.get("rope.scaling.finetuned") is False:  # by which llama.cpp knows it
        raise keys.refusal("turns no keys, which Granite's layers do as edgespec runs them")
    return _llama(keys) | _multipliers(keys)


def _multipliers(keys: _Keys) -> Settings:
    return {
        "attention_multiplier": keys.real("attention.scale"),
        "embedding_multiplier": keys.real("embedding_scale"),
        "residual_multiplier": keys.real("residual_scale"),
        "logits_scaling": keys.real("logit_scale"),
    }


def _granite_hybrid(keys: _Keys) -> Settings:
    turns = keys.get("rope.scaling.finetuned") is not False  # by which llama.cpp knows it
    if turns and keys.whole("rope.dimension_count", keys.head) != keys.head:
        raise keys.refusal("turns a part of each head, which Granite's layers do not")
    ends = {name.split(".", 2)[-1] for name in keys.file.tensors}
    mixture: Settings = {"num_local_experts": 0}
    shared = keys.whole("feed_forward_length")
    if keys.get("expert_count"):
        mixture, shared = _mixture(keys), keys.whole("expert_shared_feed_forward_length")
    return (
        _mamba2(keys, keys.whole("embedding_length"))
        | _multipliers(keys)
        | mixture
        | {
            "layer_types": _attending(keys, "linear_attention"),
            "position_embedding_type": "rope" if turns else "nope",
            "attention_bias": "attn_q.bias" in ends,
            "shared_intermediate_size": shared,
        }
    )


def _mamba2(keys: _Keys, step: int) -> Settings:
    """Of states whose numbers are a multiple of `step`."""
    inner, heads = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    groups, hidden = keys.whole("ssm.group_count"), keys.whole("embedding_length")
    if inner % step or inner % heads or heads % groups or inner // heads > MOST_STATE:
        raise keys.refusal(
            f"says that states have {inner} numbers, in {heads} heads of {groups} groups, for "
            f"{hidden} columns, which do not fit"
        )
    ends = {name.split(".", 2)[-1] for name in keys.file.tensors}
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": keys.whole("ssm.state_size", most=MOST_STATE),
        "mamba_d_conv": keys.whole("ssm.conv_kernel", most=MOST_TAPS),
        "mamba_expand": max(1, inner // hidden),
        "mamba_d_ssm": inner,
        "mamba_conv_bias": "ssm_conv1d.bias" in ends,
        "mamba_proj_bias": "ssm_in.bias" in ends,
        "mamba_rms_norm": "ssm_norm.weight" in ends,
        "mamba_norm_before_gate": False,
    }


def _falcon_h1(keys: _Keys) -> Settings:
    # What its parts are multiplied by is in the file's matrices.
    return _llama(keys) | _mamba2(keys, 1)


def _nemotron_h(keys: _Keys) -> Settings:
    inner, types = _each(keys, "feed_forward_length"), _attending(keys, "linear_attention")
    if len(inner) != len(types):
        raise keys.refusal(f"tells {len(inner)} layers' widths, of {len(types)}")
    return _mamba2(keys, 1) | {
        "intermediate_size": max(inner),
        "layer_types": ["mlp" if n else one for n, one in zip(inner, types, strict=True)],
    }


def _nemotron_h_moe(keys: _Keys) -> Settings:
    experts, with_experts = _experts(keys)
    settings = _nemotron_h(keys)
    types = settings["layer_types"]
    if {number for number, one in enumerate(types) if one == "mlp"} != with_experts:
        raise keys.refusal("has experts in other layers than it says")
    shared = keys.whole("expert_shared_feed_forward_length")
    return (
        settings
        | _groups(keys, experts)
        | {
            "layer_types": ["moe" if one == "mlp" else one for one in types],
            "shared_expert_intermediate_size": shared,
        }
    )


def _qwen35(keys: _Keys) -> Settings:
    # Heads of values lie round by round, so that llama.cpp finds the keys of each by a remainder.
    return _delta(keys) | {"linear_value_heads_tiled": True}


def _qwen35_moe(keys: _Keys) -> Settings:
    return _qwen35(keys) | _beside(keys)


def _qwen3_next(keys: _Keys) -> Settings:
    apart = not any(name.endswith(".ssm_in.weight") for name in keys.file.tensors)
    return _delta(keys) | _beside(keys) | {"linear_qkvz_in_order": apart}


def _delta(keys: _Keys) -> Settings:
    # What keeps a state shows in the tensors.
    layers = keys.layers
    inner, heads = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    if inner % heads or inner // heads > MOST_STATE:
        raise keys.refusal(f"says that states have {inner} numbers in {heads} heads")
    states = [f"blk.{layer}.ssm_out.weight" in keys.file.tensors for layer in range(layers)]
    return {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if one else "full_attention" for one in states],
        "partial_rotary_factor": keys.whole("rope.dimension_count", keys.head) / keys.head,
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": keys.whole("ssm.state_size", most=MOST_STATE),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel", most=MOST_TAPS),
    }


def _beside(keys: _Keys) -> Settings:
    """Of experts beside an MLP that rows take shares of, in all layers."""
    return _mixture(keys) | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }


def _smollm3(keys: _Keys) -> Settings:
    # Every fourth layer has no rotary embeddings, which no key says.
    return _llama(keys) | {"no_rope_layer_interval": 4, "use_sliding_window": False}


def _experts(keys: _Keys) -> tuple[int, set[int]]:
    """How many experts a mixture has, and the layers that have them."""
    experts = keys.whole("expert_count", most=MOST_EXPERTS)
    stacks = [t for t in keys.file.tensors.values() if "_exps." in t.name]
    if any(stack.shape[0] != experts for stack in stacks):
        raise keys.refusal(f"says that it has {experts} experts, and holds another number")
    return experts, {int(stack.name.split(".")[1]) for stack in stacks}


def _qwen3_moe(keys: _Keys) -> Settings:
    experts, with_experts = _experts(keys)
    return _chosen(keys, experts) | {
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": sorted(set(range(keys.whole("block_count"))) - with_experts),
    }


def _qwen2_moe(keys: _Keys) -> Settings:
    inner = keys.whole("feed_forward_length")
    return _qwen3_moe(keys) | {
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length", inner),
        "norm_topk_prob": False,
        "qkv_bias": "blk.0.attn_q.bias" in keys.file.tensors,
    }


def _gpt_oss(keys: _Keys) -> Settings:
    return _mixture(keys) | {
        "intermediate_size": keys.whole("expert_feed_forward_length"),
        "sliding_window": keys.whole("attention.sliding_window"),
        "layer_types": _layer_types(keys, 2),
    }


def _olmo2(keys: _Keys) -> Settings:
    biases = {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}
    if keys.window is None:
        return biases
    windows = {"sliding_window": keys.window, "layer_types": _layer_types(keys, 4)}
    return biases | windows | {"model_type": "olmo3"}


def _phi3(keys: _Keys) -> Settings:
    hidden, heads = keys.whole("embedding_length"), keys.whole("attention.head_count")
    turned = keys.whole("rope.dimension_count", max(1, hidden // heads))
    return {
        "sliding_window": keys.window,
        "partial_rotary_factor": turned * heads / hidden,
        "original_max_position_embeddings": keys.whole(
            "rope.scaling.original_context_length", keys.whole("context_length", most=_MOST_CONTEXT)
        ),
    }


def _gemma(keys: _Keys) -> Settings:
    usual = keys.whole("embedding_length") // keys.whole("attention.head_count")
    largest = keys.whole("block_count") == _GEMMA_27B[keys.architecture]
    return {
        "query_pre_attn_scalar": usual if largest else keys.head,
        "sliding_window": keys.whole("attention.sliding_window", 4096),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma2(keys: _Keys) -> Settings:
    return _gemma(keys) | {
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
    }


def _layer_types(keys: _Keys, every: int) -> list[str]:
    """All layers slide but each `every`th, unless the file says which do."""
    layers = keys.whole("block_count", most=MOST_LAYERS)
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, LongArray):
        windows = keys.array("attention.sliding_window_pattern") or []
    else:
        every = keys.whole("attention.sliding_window_pattern", every)
        windows = [bool((layer + 1) % every) for layer in range(layers)]
    if len(windows) != layers:
        raise keys.refusal(f"has a window pattern of {len(windows)} for {layers} layers")
    return ["sliding_attention" if one else "full_attention" for one in windows]


def _gemma3(keys: _Keys) -> Settings:
    return _gemma(keys) | {
        "layer_types": _layer_types(keys, 6),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": keys.maybe("final_logit_softcapping"),
    }


def _gemma4(keys: _Keys) -> Settings:
    types = _layer_types(keys, 6)
    layers, full = len(types), types.index("full_attention")
    shared = keys.whole(_SHARED) if keys.get(_SHARED) else 0
    inner = _each(keys, "feed_forward_length")
    heads = _each(keys, "attention.head_count_kv", keys.whole("attention.head_count"))
    wider = [inner[0]] * (layers - shared) + [2 * inner[0]] * shared
    if inner not in ([inner[0]], [inner[0]] * layers, wider) or len(heads) not in (1, layers):
        raise keys.refusal("has layers of sizes that no Gemma 4 has")
    mixture, told = {}, keys.file.tensors.get("per_layer_token_embd.weight")
    if keys.get("expert_count"):
        experts, _ = _experts(keys)
        mixture = {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": keys.whole("expert_used_count", most=experts),
            "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        }
    return mixture | {
        "layer_types": types,
        "sliding_window": keys.whole("attention.sliding_window"),
        "head_dim": keys.whole("attention.key_length_swa", most=_MOST_HEAD),
        "global_head_dim": keys.head,
        "num_key_value_heads": heads[types.index("sliding_attention") if len(heads) > 1 else 0],
        "num_global_key_value_heads": heads[full if len(heads) > 1 else 0],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in keys.file.tensors,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len(inner) > 1 and inner == wider,
        "hidden_size_per_layer_input": 0 if told is None else told.columns // layers,
        "vocab_size_per_layer_input": 0 if told is None else told.rows,
        "final_logit_softcapping": keys.maybe("final_logit_softcapping"),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.real("rope.freq_base_swa", 10000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": keys.real("rope.freq_base", 10000.0),
                "partial_rotary_factor": _turned(keys),
            },
        },
    }


def _turned(keys: _Keys) -> float:
    """Which share of a head is turned in Gemma 4's full layers: elsewhere waves are endless."""
    if ROPE not in keys.file.tensors:
        return 1.0
    divisors = _factors(keys, ROPE, keys.head // 2)
    turned = divisors.count(1.0)
    if divisors[:turned] != (1.0,) * turned or any(one < 1e29 for one in divisors[turned:]):
        raise keys.refusal("holds 'rope_freqs.weight' that are not those of Gemma 4")
    return turned / len(divisors)


_FAMILY: Mapping[str, Callable[[_Keys], Settings]] = {
    "llama": _llama,
    "mistral3": _mistral3,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "falcon-h1": _falcon_h1,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h_moe,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "smollm3": _smollm3,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35_moe,
    "qwen3next": _qwen3_next,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "qwen3vlmoe": _qwen3_moe,
    "gpt-oss": _gpt_oss,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "ernie4_5": _ernie,
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-moe": _hunyuan_moe,
    "exaone4": _exaone4,
    "glm4": _glm4,
    "glm4moe": _glm4_moe,
    "cohere2": _cohere2,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "deepseek2": _deepseek2,
}


_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.attn_factor": "attention_factor",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
"""What a file says of `yarn` beside its factor, and what config.json calls it."""


def _scaling(keys: _Keys, settings: Settings) -> Settings | None:
    """rope_scaling of config.json."""
    if "rope_factors_long.weight" in keys.file.tensors:
        share = float(settings.get("partial_rotary_factor", 1.0))
        count = int(int(settings["head_dim"]) * share) // 2
        names = {one: f"rope_factors_{one}.weight" for one in ("short", "long")}
        factors = {f"{one}_factor": list(_factors(keys, names[one], count)) for one in names}
        return {"rope_type": "longrope", **factors}
    if keys.architecture == "gemma4":
        return None
    if ROPE in keys.file.tensors:
        divisors = _factors(keys, ROPE, int(settings["head_dim"]) // 2)
        if all(one == 1.0 for one in divisors):
            return None
        found = None
        if all(0 < one < math.inf for one in divisors):
            found = llama3_settings(divisors, float(settings["rope_theta"]))
        if found is None:
            raise keys.refusal("holds 'rope_freqs.weight' that are not those of Llama 3")
        return {"rope_type": "llama3", **found._asdict()}
    kind = keys.text("rope.scaling.type")
    if kind in ("", "none"):
        return None
    scaling: Settings = {"rope_type": kind, "factor": keys.real("rope.scaling.factor")}
    if kind == "yarn":
        length = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = keys.whole(length, most=_MOST_CONTEXT)
        for theirs, ours in _YARN.items():
            if keys.get(theirs):
                scaling[ours] = keys.real(theirs)
        if "mscale_all_dim" in scaling:
            scaling["mscale"] = 1.0
            if keys.architecture == "deepseek2":  # it has a tenth of it
                tenfold = shortest(10 * scaling["mscale_all_dim"])
                scaling |= {"mscale": tenfold, "mscale_all_dim": tenfold}
        if keys.architecture == "gpt-oss":
            scaling["truncate"] = False
    elif kind != "linear":
        raise keys.refusal(f"has rotary embeddings of type {kind!r}, which edgespec does not run")
    return scaling


def _factors(keys: _Keys, name: str, count: int) -> tuple[float, ...]:
    """The numbers of a tensor that is a setting."""
    if keys.shape(name) != (count,) or keys.file.tensors[name].type.name != "F32":
        raise keys.refusal(f"holds {name!r} in a form that is not known")
    return struct.unpack(f"<{count}f", keys.file.tensors[name].read(0, 1))
