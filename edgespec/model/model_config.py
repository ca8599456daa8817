"""Model config: what a config.json says, read by types and defaults of edgespec's own.

transformers' configuration classes import its modelling code, which takes seconds and 100 MiB. They
are asked by those alone who need its models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

from msgspec import Meta, Struct, convert, structs

from edgespec.planning.architecture import DEFAULTS, MOST_LAYERS
from edgespec.planning.text_part import DELTA, GROUPED, LATENT
from edgespec.types.boundaries import AHEAD

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FULL, SLIDING = "full_attention", "sliding_attention"
CONVOLUTION, RECURRENT = "conv", "linear_attention"
BOTH, MLP, MIXTURE = "hybrid", "mlp", "moe"
"""Of layers that attend and keep a state, and of those that have nothing but an MLP, or experts."""

_WITH_LENGTH = ("llama3", "yarn", "longrope")
_ROPE_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
}
"""By type of rotary embeddings, the numbers that they need beside their base."""
_ROPE_MAY = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "longrope": ("factor", "attention_factor"),
}
"""Numbers that those of a type may have."""

MOST_TAPS = 64
"""Of a short convolution; LFM2 has 3."""
MOST_FOLDED_TAPS = AHEAD + 1
"""Of one in front of a state: a row reads those rows alone that are not folded. Granite 4 has 4."""
MOST_STATE = 1 << 12
"""Numbers of a state's key, or of its value; Granite 4 has 128 and 64."""

MOST_WIDTH = 1 << 18
"""Numbers of a row at any place in a layer: kernels have some of them on a thread's stack. The
widest published MLPs have some 75,000."""

Count = Annotated[int, Meta(ge=1, lt=1 << 31)]
Width = Annotated[int, Meta(ge=1, le=MOST_WIDTH)]
Factor = Annotated[float, Meta(gt=0, lt=1e30)]


class _FullKeys(Struct, forbid_unknown_fields=True):
    """What a layer of a Gemma 4 has of its own."""

    head_dim: Count
    num_key_value_heads: Count | None = None


class _Fields(Struct, kw_only=True):
    """What edgespec reads of a config.json."""

    vocab_size: Count
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
    num_attention_heads: Count
    max_position_embeddings: Count
    rms_norm_eps: float
    num_key_value_heads: Count | None = None
    head_dim: Width | None = None
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    sliding_window_pattern: Count = 6
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: Count = 4
    query_pre_attn_scalar: int = 256
    final_logit_softcapping: float | None = None
    attn_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    original_max_position_embeddings: Count | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    rope_local_base_freq: float = 10_000.0
    partial_rotary_factor: float | None = None
    conv_L_cache: Annotated[int, Meta(ge=1, le=MOST_TAPS)] = 3
    conv_bias: bool = False
    num_local_experts: Annotated[int, Meta(ge=0)] | None = None
    shared_intermediate_size: Width = 1024
    position_embedding_type: str | None = None
    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Annotated[int, Meta(ge=1, le=MOST_STATE)] = 256
    mamba_d_head: Annotated[int, Meta(ge=1, le=MOST_STATE)] | str = "auto"
    mamba_d_conv: Annotated[int, Meta(ge=1, le=MOST_FOLDED_TAPS)] = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_d_ssm: Width | None = None
    mamba_rms_norm: bool = True
    mamba_norm_before_gate: bool = False
    mamba_hidden_act: str = "silu"
    time_step_limit: tuple[Any, Any] = (0.0, math.inf)
    projectors_bias: bool = False
    lm_head_multiplier: Factor = 1.0
    mlp_multipliers: tuple[Factor, Factor] | None = None
    key_multiplier: Factor = 1.0
    attention_in_multiplier: Factor = 1.0
    attention_out_multiplier: Factor = 1.0
    ssm_multipliers: tuple[Factor, Factor, Factor, Factor, Factor] | None = None
    ssm_in_multiplier: Factor = 1.0
    ssm_out_multiplier: Factor = 1.0
    full_attention_interval: Count = 4
    linear_conv_kernel_dim: Annotated[int, Meta(ge=1, le=MOST_FOLDED_TAPS)] = 4
    linear_key_head_dim: Annotated[int, Meta(ge=1, le=MOST_STATE)] = 128
    linear_value_head_dim: Annotated[int, Meta(ge=1, le=MOST_STATE)] = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    linear_value_heads_tiled: bool = False
    linear_qkvz_in_order: bool = False
    global_head_dim: Width = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, dict[str, Any]] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: Annotated[int, Meta(ge=0)] = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: Annotated[int, Meta(ge=0)] = 256
    vocab_size_per_layer_input: int = 262_144
    enable_moe_block: bool = False
    top_k_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: Width | None = None
    num_dense_layers: Annotated[int, Meta(ge=0)] = 2
    use_expert_bias: bool = True
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    shared_expert_intermediate_size: Width = 512
    moe_latent_size: int | None = None
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None
    qkv_bias: bool = True
    n_routed_experts: Count = 128
    n_shared_experts: Annotated[int, Meta(ge=0)] = 1
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 1
    n_group: Count | None = 1
    topk_group: Count | None = 1
    use_qk_norm: bool = False
    mlp_layer_types: list[str] | None = None
    topk_method: str | None = "greedy"
    kv_lora_rank: Width = 512
    q_lora_rank: Width | None = None
    qk_nope_head_dim: Width = 128
    qk_rope_head_dim: Width = 64
    v_head_dim: Width = 128
    rope_interleave: bool = True
    layer_norm_eps: float = 1e-5
    logit_scale: Factor = 0.0625
    use_bias: bool | None = False
    attention_out_bias: bool = False
    clip_qkv: float | None = None
    swiglu_alpha: Factor = 1.702
    swiglu_limit: Factor = 7.0
    moe_num_experts: Count = 64
    moe_k: Count = 6
    moe_num_shared_experts: Annotated[int, Meta(ge=0)] = 2
    moe_layer_start_index: Annotated[int, Meta(ge=0)] = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: Count = 1
    moe_norm_min: float | None = 1e-12
    moe_topk: int | list[int] = 1


_THETA = {
    "smollm3": 2_000_000.0,
    **dict.fromkeys(("gemma3_text", "lfm2", "lfm2_moe", "mixtral"), 1_000_000.0),
    **dict.fromkeys(("olmo3", "ernie4_5", "ernie4_5_moe"), 500_000.0),
    "gpt_oss": 150_000.0,
}
_WINDOW_ON_REQUEST = ("qwen2", "qwen3", "qwen3_moe")
_MAMBA = ("granitemoehybrid", "falcon_h1", "nemotron_h")
_BY_TYPE = ("gemma3_text", "gemma4_text", "olmo3")
"""Families with rotary settings by layer type."""


class ModelConfig:
    """The configuration of a text model, one attribute for each field.

    The fields of config.json as they are, those of _Fields checked and complete, with
    `rope_parameters` in the form that newer files have (with "rope_type" and "rope_theta"; by layer
    type where each has its own). Not to be changed: `changed` makes another one.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: config.json, of which `model_type` is a family that edgespec runs.

        Raises what is wrong with a value: msgspec's ValidationError, or ValueError.
        """
        self.settings: Mapping[str, Any] = MappingProxyType(dict(settings))
        self._values = {**settings, **_completed(str(settings["model_type"]), settings)}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "settings" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"config.json has no {name}") from None

    @property
    def head_dim(self) -> int:
        """Numbers of one attention head's keys."""
        return int(self._values["head_dim"])

    def changed(self, **fields: Any) -> ModelConfig:
        """The same with other values."""
        return ModelConfig({**self.settings, **fields})

    @cached_property
    def library(self) -> PretrainedConfig:
        """transformers' configuration of the same model."""
        from transformers import AutoConfig

        # A copy, as it changes what it is given.
        settings = json.loads(json.dumps(dict(self.settings)), object_hook=_infinite)
        made: PretrainedConfig = AutoConfig.for_model(settings.pop("model_type"), **settings)
        return made


def _infinite(found: Any) -> Any:
    """Numbers that JSON lacks, as transformers writes them."""
    lacks = isinstance(found, dict) and found.keys() == {"__float__"}
    return float(found["__float__"]) if lacks else found


def _completed(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("layer_types") is not None or settings.get("sliding_window", 1) is None:
        # Says nothing then; EXAONE 4's files have 0, null or "LLLG".
        settings = {name: of for name, of in settings.items() if name != "sliding_window_pattern"}
    found = convert({**DEFAULTS[kind], **settings}, _Fields)
    heads = found.num_attention_heads
    if kind in LATENT:
        _complete_latents(kind, found)
    if found.head_dim is None and found.hidden_size % heads and kind not in GROUPED:
        raise ValueError(f"hidden_size {found.hidden_size} is no multiple of {heads} heads")
    found.head_dim = found.head_dim or found.hidden_size // heads
    found.num_key_value_heads = found.num_key_value_heads or heads
    every = heads + 2 * found.num_key_value_heads
    if (wide := every * found.head_dim) > MOST_WIDTH:
        raise ValueError(f"{every} heads have {wide} numbers of a row; {MOST_WIDTH} at most can")
    if kind in _WINDOW_ON_REQUEST and not found.use_sliding_window:
        found.sliding_window = None
    if kind == "qwen2_moe" and not found.use_sliding_window:
        found.sliding_window = 0  # as transformers says it
    if found.moe_layer_end_index == -1:
        found.moe_layer_end_index = found.num_hidden_layers - 1
    if kind == "smollm3" and found.no_rope_layers is None:
        every = found.no_rope_layer_interval
        found.no_rope_layers = [int(n % every != 0) for n in range(1, found.num_hidden_layers + 1)]
    own = _layer_types(kind, found)
    if own is not None:
        found.layer_types = found.layer_types or own
    for name in ("layer_types", "no_rope_layers"):
        listed = getattr(found, name)
        if own is not None and listed is not None and len(listed) != found.num_hidden_layers:
            raise ValueError(
                f"{name} names {len(listed)} layers, num_hidden_layers is {found.num_hidden_layers}"
            )
    if kind in _MAMBA:
        _complete_states(kind, found)
        key, value = found.mamba_d_state, found.mamba_d_head
        _check_convolved(2 * found.mamba_n_groups * key + found.mamba_n_heads * int(value))
    if kind in DELTA:
        key, value = found.linear_key_head_dim, found.linear_value_head_dim
        keys, values = found.linear_num_key_heads * key, found.linear_num_value_heads * value
        _check_convolved(2 * keys + values)
        if found.linear_num_value_heads % found.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {found.linear_num_value_heads} is no multiple of "
                f"linear_num_key_heads, {found.linear_num_key_heads}"
            )
    if kind in GROUPED or MIXTURE in (found.layer_types or ()):
        _check_groups(found)
    if kind == "ernie4_5_moe":
        _check_beside(found.moe_num_shared_experts, found.moe_intermediate_size)
    found.rope_parameters = _rope_parameters(kind, found)
    if kind == "gemma4_text":
        _complete_full_layers(found)
    return structs.asdict(found)


def _check_groups(found: _Fields) -> None:
    """Raises ValueError for groups of experts that do not fit."""
    groups, kept, active = found.n_group or 1, found.topk_group or 1, found.num_experts_per_tok or 0
    each, rest = divmod(found.n_routed_experts, groups)
    if rest or kept > groups or each < 2 or active > kept * each:
        raise ValueError(
            f"{found.n_routed_experts} experts in n_group {groups}, of which topk_group {kept} "
            f"are chosen from, do not fit num_experts_per_tok {active}"
        )
    _check_beside(found.n_shared_experts, found.moe_intermediate_size)


def _check_beside(shared: int, width: int | None) -> None:
    """Raises ValueError for an MLP beside experts that is too wide."""
    if shared * (width or 0) > MOST_WIDTH:
        what = f"n_shared_experts {shared} of {width} numbers"
        raise ValueError(f"{what} are wider than {MOST_WIDTH}")


def _check_convolved(numbers: int) -> None:
    """Raises ValueError for more numbers of a row than a layer with a state takes."""
    if numbers > MOST_WIDTH:
        raise ValueError(f"{numbers} numbers of a row are convolved; {MOST_WIDTH} at most can be")


def _complete_states(kind: str, found: _Fields) -> None:
    """Raises ValueError for heads of Mamba2 that do not fit."""
    inner, heads = found.mamba_expand * found.hidden_size, found.mamba_n_heads
    if kind == "falcon_h1":
        inner = found.mamba_d_ssm or inner
        found.mlp_multipliers = found.mlp_multipliers or (1.0, 1.0)
        found.ssm_multipliers = found.ssm_multipliers or (1.0, 1.0, 1.0, 1.0, 1.0)
        found.logits_scaling = 1 / found.lm_head_multiplier
    if found.mamba_d_head == "auto":
        found.mamba_d_head = inner // heads
    inner = heads * int(found.mamba_d_head) if kind == "nemotron_h" else inner
    if inner != heads * found.mamba_d_head or heads % found.mamba_n_groups:
        raise ValueError(
            f"mamba_n_heads {heads}, of {found.mamba_d_head} numbers and in mamba_n_groups "
            f"{found.mamba_n_groups}, are not mamba_expand {found.mamba_expand} times hidden_size"
        )
    low, high = (_infinite(one) for one in found.time_step_limit)
    if not isinstance(low, int | float) or not isinstance(high, int | float) or low > high:
        raise ValueError(f"time_step_limit is {found.time_step_limit}")
    found.time_step_limit = low, high


def _complete_latents(kind: str, found: _Fields) -> None:
    """Of MLA: the part of a head that is turned is its `head_dim`, as transformers has it.

    Raises ValueError for parts that do not fit, and for what transformers leaves out.
    """
    found.head_dim = found.qk_rope_head_dim
    heads, of_head = found.num_attention_heads, found.qk_nope_head_dim + found.qk_rope_head_dim
    widest = heads * max(of_head, found.v_head_dim, found.kv_lora_rank + found.qk_rope_head_dim)
    if widest > MOST_WIDTH:
        raise ValueError(f"{heads} heads have {widest} numbers of a row; {MOST_WIDTH} at most can")
    layers, dense = found.num_hidden_layers, found.first_k_dense_replace
    types = [("dense", "sparse")[n >= dense] for n in range(layers)]
    if kind == "glm4_moe_lite" and found.mlp_layer_types not in (None, types):
        raise ValueError(f"mlp_layer_types is not dense at first, then sparse, of {layers}")
    if kind == "deepseek_v2":
        if found.norm_topk_prob or found.topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(
                f"topk_method {found.topk_method!r} with norm_topk_prob {found.norm_topk_prob}, "
                f"which models of type {kind!r} do not have"
            )
        if found.topk_method == "greedy":
            found.n_group = found.topk_group = None
    found.n_group, found.topk_group = found.n_group or 1, found.topk_group or 1


def _complete_full_layers(found: _Fields) -> None:
    """Gemma 4: the shape of keys in layers without a window, which newer files have layer by layer
    and only where it differs; and which layers have keys of their own."""
    types = found.layer_types or []
    if types[-1] != FULL:  # transformers takes it for one all the same
        raise ValueError(f"the last of layer_types is {types[-1]!r}, it must be {FULL!r}")
    if not found.attention_k_eq_v or found.num_global_key_value_heads is None:
        found.num_global_key_value_heads = found.num_key_value_heads
    if found.per_layer_config is not None:
        full = [str(number) for number, one in enumerate(types) if one == FULL]
        own = found.per_layer_config.get(full[0], {})
        if found.per_layer_config != (dict.fromkeys(full, own) if own else {}):
            raise ValueError("per_layer_config differs among layers of one type")
        shape = convert({"head_dim": found.head_dim} | own, _FullKeys)
        found.global_head_dim = shape.head_dim
        found.num_global_key_value_heads = shape.num_key_value_heads or found.num_key_value_heads
    heads, of_keys = found.num_attention_heads, found.num_global_key_value_heads
    if not of_keys or heads % of_keys:
        raise ValueError(f"{heads} heads for {of_keys} of keys in layers without a window")
    if found.global_head_dim % 2:  # of which all is turned
        raise ValueError(f"heads of {found.global_head_dim} numbers in layers without a window")
    own_keys = types[: max(0, len(types) - found.num_kv_shared_layers)]
    if set(own_keys) != set(types):
        raise ValueError(
            f"num_kv_shared_layers is {found.num_kv_shared_layers}: a type of layers has no keys"
        )


def _layer_types(kind: str, found: _Fields) -> list[str] | None:
    """The type of each layer, unless config.json says it; None where the family has none."""
    numbers = range(found.num_hidden_layers)
    window = found.sliding_window is not None
    match kind:
        case "qwen2" | "qwen3":
            slides = [window and n >= found.max_window_layers for n in numbers]
        case "gemma2":
            slides = [n % 2 == 0 for n in numbers]
        case "gemma3_text" | "olmo3" | "cohere2" | "gpt_oss":
            slides = [(n + 1) % found.sliding_window_pattern != 0 for n in numbers]
        case "exaone4":
            slides = [window and (n + 1) % found.sliding_window_pattern != 0 for n in numbers]
        case "gemma4_text":
            slides = [(n + 1) % 6 != 0 and n + 1 < len(numbers) for n in numbers]
        case "ministral":
            slides = [window for _ in numbers]
        case "smollm3":
            turned = found.no_rope_layers or []
            slides = [found.use_sliding_window and window and not turns for turns in turned]
        case "lfm2" | "lfm2_moe":
            return [FULL for _ in numbers]
        case "granitemoehybrid" | "nemotron_h":
            return [RECURRENT for _ in numbers]
        case "falcon_h1":
            return [BOTH for _ in numbers]
        case "qwen2_moe":
            used, first = found.use_sliding_window, found.max_window_layers
            slides = [used and n % 2 == 0 and n < first for n in numbers]
        case _ if kind in DELTA:
            every = found.full_attention_interval
            return [RECURRENT if (n + 1) % every else FULL for n in numbers]
        case _:
            return None
    return [SLIDING if one else FULL for one in slides]


def _rope_parameters(kind: str, found: _Fields) -> dict[str, Any]:
    """Rotary settings in one form: older files have them in several fields."""
    theta = _THETA.get(kind, 10_000.0) if found.rope_theta is None else found.rope_theta
    if kind == "gemma4_text":
        return {
            name: _one_rope(kind, found, dict((found.rope_parameters or {}).get(name) or {}), theta)
            for name in dict.fromkeys(found.layer_types or ())
        }
    if kind in ("gemma3_text", "olmo3"):
        given = found.rope_parameters or {}
        full = {**(given.get(FULL) or {}), **(found.rope_scaling or {})}
        if kind == "olmo3":  # whose older name for a type transformers does not read
            full.setdefault("rope_type", "default")
        sliding = dict(given.get(SLIDING) or {})
        local = found.rope_local_base_freq if kind == "gemma3_text" else _THETA[kind]
        return {
            SLIDING: _one_rope(kind, found, sliding, local),
            FULL: _one_rope(kind, found, full, theta),
        }
    usual = DEFAULTS[kind].get("rope_parameters", {})
    return _one_rope(kind, found, dict(found.rope_scaling or found.rope_parameters or usual), theta)


def _is_real(value: object) -> TypeGuard[float]:
    """Whether it is a number that torch takes."""
    most = 1 << 62
    return isinstance(value, int | float) and not isinstance(value, bool) and -most < value < most


def _one_rope(kind: str, found: _Fields, rope: dict[str, Any], theta: float) -> dict[str, Any]:
    if FULL in rope or SLIDING in rope:
        raise ValueError(f"rope_parameters by layer type, which {kind} models do not have")
    if rope.get("partial_rotary_factor") is None:
        rope.pop("partial_rotary_factor", None)
    form = rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", theta)
    if found.partial_rotary_factor is not None and kind not in _BY_TYPE:
        rope.setdefault("partial_rotary_factor", found.partial_rotary_factor)
    if form in _WITH_LENGTH:
        if kind == "phi3":  # beside them, which counts more
            rope["original_max_position_embeddings"] = found.original_max_position_embeddings
        rope.setdefault("original_max_position_embeddings", found.max_position_embeddings)
    if kind == "phi3" and form not in ("default", "longrope", "su", "yarn"):
        raise ValueError(f"rope_type {form!r}, which phi3 models do not have")
    if kind == "phi3" and form in ("su", "yarn"):  # older names of the same
        form = rope["rope_type"] = "longrope"
    for name in _ROPE_MAY.get(form, ()):
        value = rope.get(name)
        if value is not None and (not _is_real(value) or value < 0):
            raise ValueError(f"{name} of rotary embeddings of type {form!r} is {value!r}")
    if form == "yarn" and rope["rope_theta"] == 1:
        raise ValueError(f"rope_theta of rotary embeddings of type {form!r} is 1")
    if form == "longrope":  # an older file has it beside them alone
        trained = rope.get(
            "original_max_position_embeddings", found.original_max_position_embeddings
        )
        if not _is_real(trained) or trained <= 1:
            raise ValueError(f"original_max_position_embeddings is {trained!r}")
    fixed = form == "dynamic" and bool(rope.get("alpha"))  # see families
    if fixed and found.head_dim == 2:
        raise ValueError(f"heads of 2 numbers with rotary embeddings of type {form!r}")
    for name in ("rope_theta", *_ROPE_NEEDS.get(form, ()), *("alpha",) * fixed):
        value = rope.get(name)
        if not _is_real(value) or value <= 0:
            raise ValueError(f"{name} of rotary embeddings of type {form!r} is {value!r}")
    return rope
