"""Architectures: which of llama.cpp's run, and which tensor of transformers' each of theirs is.

Their names are those of gguf-py's tensor_mapping.py, and what its converter does to tensors is that
of convert_hf_to_gguf.py (both ggml-org/llama.cpp): it is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace

from edgespec.errors import ModelError
from edgespec.model.gguf.reader import GgufFile, StoredTensor
from edgespec.planning.architecture import FAMILIES
from edgespec.planning.refused import refusal_of

_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # as LFM2's files call it
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED = _EXPERTS | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.gate_proj",
    "ffn_up_shexp": "mlp.up_proj",
    "ffn_down_shexp": "mlp.down_proj",
}
"""Of mixtures with an MLP beside the experts."""
_ERNIE = _SHARED | {"exp_probs_b": "mlp.expert_bias"}
_GPT_OSS = _EXPERTS | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks": "self_attn.sinks",
}
_NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GLM4 = _FOUR_NORMS | {"ffn_up": "mlp.gate_up_proj"}
_NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
"""Of a layer that guesses, behind the others."""
_GLM4_MOE = _ERNIE | _NEXTN | {"post_attention_norm": "post_attention_layernorm"}
_CONVOLUTIONS = {
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_MAMBA_MIXTURE = _ERNIE | _MAMBA
_FALCON_H1 = _MAMBA | {"ffn_norm": "post_attention_layernorm.weight"}
"""Whose files leave the ending of that name out."""
_LATENT = _ERNIE | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.k_b.{}",
    "attn_v_b": "self_attn.v_b.{}",
}
_KV_B = "attn_kv_b"
"""What older files have in the place of attn_k_b and attn_v_b: rows of both, head by head."""
_DELTA = _NEXTN | {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NEXT = (
    _SHARED | _DELTA | {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
)
"""Older files have `ssm_in`, as folders do, newer ones `attn_qkv` and `attn_gate`."""
_GEMMA4 = _FOUR_NORMS | {
    "ffn_gate_inp": "router.proj",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_SCALES = {"ffn_gate_inp.scale": "router.scale", "ffn_down_exps.scale": "router.per_expert_scale"}
"""What Gemma 4 has under the names of matrices."""
_GATE_UP = "ffn_gate_up_exps"
"""Its experts' matrices, for gate and up as one."""
_OF_ALL_LAYERS = {
    "per_layer_token_embd": "embed_tokens_per_layer",
    "per_layer_model_proj": "per_layer_model_projection",
    "per_layer_proj_norm": "per_layer_projection_norm",
}
"""What that has for all layers in one tensor: columns, rows, or the same for each."""
_UNREAD = ("attn_k", "attn_v", "attn_k_norm")
"""What files may hold of a layer that reads the keys of another."""
_CONVOLVING_MIXTURE = _EXPERTS | _CONVOLUTIONS | {"exp_probs_b": "mlp.expert_bias"}
_BARE = (
    *("layer_scalar", "self_attn.sinks", "mlp.expert_bias"),
    *("mamba.dt_bias", "mamba.A_log", "mamba.D", "post_attention_layernorm.weight"),
    *("linear_attn.dt_bias", "linear_attn.A_log"),
)
"""Tensors whose names in transformers' models end there."""
ROPE = "rope_freqs.weight"
SETTINGS = (ROPE, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that become settings."""

_FLAT = ("mamba.A_log", "mamba.D", "mamba.norm", "mlp.expert_bias")
"""Vectors that the converter gives a second axis, or may."""
_ONE_ROW = (_SHARED["ffn_gate_inp_shexp"],)
"""Matrices of one row, of which files may have that row."""
_TAPS = ("conv.conv.weight", "mamba.conv1d.weight", "linear_attn.conv1d.weight")
"""Kernels of channels that each have one input, an axis that the converter drops."""

_OF_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias|scale))?")


@dataclass(frozen=True)
class GgufArchitecture:
    """How one of llama.cpp's architectures differs from transformers' `model_type`, which its
    settings may know better.

    `layer`: names within a layer, where they are not those that most have. `paired`: rows of
    queries and keys that are rotated together are neighbours. `shifted_norms`: norms are stored
    with 1 added. `split`: gate and up are apart, which transformers' models have in one matrix.
    """

    model_type: str
    layer: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    shifted_norms: bool = False
    split: bool = False


ARCHITECTURES = {
    "llama": GgufArchitecture("llama", _EXPERTS, paired=True),
    "mistral3": GgufArchitecture("mistral", paired=True),
    "granite": GgufArchitecture("granite", paired=True),
    "granitehybrid": GgufArchitecture(
        "granitemoehybrid", _SHARED | _MAMBA, paired=True, split=True
    ),
    "falcon-h1": GgufArchitecture("falcon_h1", _FALCON_H1),
    "nemotron_h": GgufArchitecture("nemotron_h", _MAMBA, paired=True),
    "nemotron_h_moe": GgufArchitecture("nemotron_h", _MAMBA_MIXTURE, paired=True),
    "smollm3": GgufArchitecture("smollm3", paired=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen2moe": GgufArchitecture("qwen2_moe", _SHARED),
    "qwen3moe": GgufArchitecture("qwen3_moe", _EXPERTS),
    "qwen2vl": GgufArchitecture("qwen2"),
    "qwen3vl": GgufArchitecture("qwen3"),
    "qwen35": GgufArchitecture("qwen3_5_text", _DELTA, shifted_norms=True),
    "qwen35moe": GgufArchitecture("qwen3_5_moe_text", _SHARED | _DELTA, shifted_norms=True),
    "qwen3next": GgufArchitecture("qwen3_next", _NEXT, shifted_norms=True),
    "qwen3vlmoe": GgufArchitecture("qwen3_moe", _EXPERTS),
    "gpt-oss": GgufArchitecture("gpt_oss", _GPT_OSS),
    "olmo2": GgufArchitecture("olmo2", _NORMS_BEHIND),
    "olmoe": GgufArchitecture("olmoe", _EXPERTS),
    "ernie4_5": GgufArchitecture("ernie4_5"),
    "ernie4_5-moe": GgufArchitecture("ernie4_5_moe", _ERNIE),
    "hunyuan-moe": GgufArchitecture("hunyuan_v1_moe", _SHARED),
    "exaone4": GgufArchitecture("exaone4", _NORMS_BEHIND),
    "glm4": GgufArchitecture("glm4", _GLM4),
    "glm4moe": GgufArchitecture("glm4_moe", _GLM4_MOE),
    "cohere2": GgufArchitecture("cohere2"),
    "gemma": GgufArchitecture("gemma", shifted_norms=True),
    "lfm2": GgufArchitecture("lfm2", _CONVOLUTIONS),
    "lfm2moe": GgufArchitecture("lfm2_moe", _CONVOLVING_MIXTURE),
    "phi3": GgufArchitecture("phi3", _FUSED),
    "gemma2": GgufArchitecture("gemma2", _FOUR_NORMS, shifted_norms=True),
    "gemma3": GgufArchitecture("gemma3_text", _FOUR_NORMS, shifted_norms=True),
    "gemma4": GgufArchitecture("gemma4_text", _GEMMA4),
    "deepseek2": GgufArchitecture("deepseek_v2", _LATENT),
}
"""Every value of `general.architecture` that is accepted. Of models that read images a
file holds the text part alone. Older ones of Mistral call it llama,
and Mixtral's do, Olmo 3's olmo2, and those of a dense Granite 4 granite."""


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of transformers' in a file: some rows of a stored one, from `first`, in `shape`.

    `heads`: its rows lie in pairs within each of that many heads; 0 where they are in order.
    `less`: what is to be subtracted from it. `column`: the first one that is its own. `behind`:
    another stored tensor, of as many rows, that are its last. `flat`: it has one axis, for those
    in `shape`. `decay`: it is stored as -exp of what it is. `mirrored`: its columns are those rows.
    """

    stored: StoredTensor
    first: int
    shape: tuple[int, ...]
    heads: int = 0
    less: float = 0.0
    column: int = 0
    behind: StoredTensor | None = None
    flat: bool = False
    decay: bool = False
    mirrored: bool = False


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Raises ModelError for one that is not run."""
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        refusal = refusal_of({"model_type": name}, {*ARCHITECTURES, *FAMILIES})
        others = f"it runs {', '.join(ARCHITECTURES)}, and more families from their safetensors"
        why = f": {refusal}" if refusal else f"; {others} (docs/families.md)"
        raise ModelError(
            f"the model in {file.path} is of architecture {name!r}, which edgespec does not run "
            f"from a GGUF file{why}"
        )
    return ARCHITECTURES[name]


def places(
    file: GgufFile,
    heads: int,
    kv_heads: int,
    layers: int,
    without_keys: Container[int],
    straight: int = 0,
) -> dict[str, Place]:
    """Where each tensor is, by the name that transformers' checkpoints have for it.

    `heads`, `kv_heads`: of queries, and of keys; `layers` of the model, those `without_keys` read
    the keys of others. `straight`: numbers of a head's keys that are made of latents. Raises
    ModelError for a tensor that the architecture does not have: without it something else would be
    computed.
    """
    kind = architecture_of(file)
    found: dict[str, Place] = {}
    for stored in file.tensors.values():
        part = _OF_LAYER.fullmatch(stored.name)
        unread = part is not None and part[2] in _UNREAD and int(part[1]) in without_keys
        if stored.name in SETTINGS or unread:
            continue
        if part is not None and part[2] == _KV_B and kind.layer is _LATENT:
            named = _by_head(stored, f"model.layers.{part[1]}", heads, straight)
        else:
            of_heads = {"attn_q": heads, "attn_k": kv_heads}
            named = dict(_named(kind, stored, of_heads, layers))
        found |= named
        if not named:
            raise ModelError(
                f"{file.path} holds {stored.name!r}, which models of this architecture "
                f"({file.values['general.architecture']}) do not have as edgespec runs them; take "
                "another file of the model"
            )
    return _joined(found) if kind.split else found


def _by_head(stored: StoredTensor, prefix: str, heads: int, keys: int) -> dict[str, Place]:
    """Of each head the rows that make keys, which are the columns of a matrix into the space of
    latents, and those that make values. Raises ModelError if they do not fit."""
    each, found = stored.rows // heads, {}
    if stored.rows % heads or each <= keys:
        raise ModelError(
            f"{stored.name!r} in {stored.file} has {stored.rows} rows for {heads} heads of {keys} "
            "numbers and more; take another file of the model"
        )
    for head in range(heads):
        name, first = f"{prefix}.self_attn.{{}}.{head}.weight", head * each
        own = Place(stored, first, (keys, stored.columns), mirrored=True)
        found[name.format("k_b")] = own
        found[name.format("v_b")] = Place(stored, first + keys, (each - keys, stored.columns))
    return found


def _joined(found: Mapping[str, Place]) -> dict[str, Place]:
    """The same with gate and up as one."""
    joined = dict(found)
    for name, gate in found.items():
        up = found.get(name.replace("gate_proj", "up_proj"))
        if name.endswith("mlp.gate_proj.weight") and up is not None and up.shape == gate.shape:
            del joined[name], joined[name.replace("gate_proj", "up_proj")]
            rows, *columns = gate.shape
            both = replace(gate, shape=(2 * rows, *columns), behind=up.stored)
            joined[name.replace("gate_proj", "gate_up_proj")] = both
    return joined


def _named(
    kind: GgufArchitecture, stored: StoredTensor, heads: Mapping[str, int], layers: int
) -> Iterator[tuple[str, Place]]:
    """What a stored tensor is: one, or for stacked experts several."""
    end, _, leaf = stored.name.rpartition(".")
    shifted = kind.shifted_norms and end.endswith("norm") and not end.endswith("ssm_norm")
    less = 1.0 if shifted and leaf == "weight" else 0.0
    if end in _ENDS:
        yield f"{_ENDS[end]}.{leaf}", Place(stored, 0, stored.shape, less=less)
        return
    if end in _OF_ALL_LAYERS and kind.layer is _GEMMA4:
        yield from _of_all_layers(stored, _OF_ALL_LAYERS[end], layers)
        return
    part = _OF_LAYER.fullmatch(stored.name)
    name = part and (_LAYER | dict(kind.layer)).get(part[2])
    if part and part[2] == _GATE_UP and kind.layer is _GEMMA4:
        yield from _gate_and_up(stored, f"model.layers.{part[1]}.experts")
    if not part or not name or (part[3] is None and name not in _BARE):
        return
    prefix = f"model.layers.{part[1]}."
    if leaf == "scale" and kind.layer is _GEMMA4:
        yield prefix + _SCALES[f"{part[2]}.{leaf}"], Place(stored, 0, stored.shape)
        return
    if "{}" not in name:
        paired = heads.get(part[2], 0) if kind.paired else 0
        full = name if name in _BARE else f"{name}.{leaf}"
        shape = stored.shape
        if full in _TAPS:
            shape = (*shape[:-1], 1, shape[-1])
        if name in _ONE_ROW:
            shape = (1, shape[-1])
        flat, decay = name in _FLAT, name.endswith(".A_log")
        yield prefix + full, Place(stored, 0, shape, paired, less, flat=flat, decay=decay)
        return
    each = stored.rows // stored.shape[0]
    for expert in range(stored.shape[0]):
        place = Place(stored, expert * each, stored.shape[1:])
        yield f"{prefix}{name.format(expert)}.{leaf}", place


def _of_all_layers(stored: StoredTensor, name: str, layers: int) -> Iterator[tuple[str, Place]]:
    """What each layer has of a tensor for all."""
    width, rest = divmod(stored.columns, layers)
    if name == "embed_tokens_per_layer" and (rest or width % stored.type.columns):
        raise ModelError(
            f"{stored.name!r} in {stored.file} has {stored.columns} columns in blocks of "
            f"{stored.type.columns}, which {layers} layers cannot share; use another file"
        )
    for layer in range(layers):
        place = Place(stored, 0, stored.shape)
        if name == "embed_tokens_per_layer":
            place = Place(stored, 0, (stored.shape[0], width), column=layer * width)
        elif name == "per_layer_model_projection":
            rows = stored.rows // layers
            place = Place(stored, layer * rows, (rows, stored.columns))
        yield f"model.layers.{layer}.{name}.weight", place


def _gate_and_up(stored: StoredTensor, prefix: str) -> Iterator[tuple[str, Place]]:
    """Of each expert the first rows of a stacked matrix are the gate's, the others up's."""
    experts, both, columns = stored.shape
    for number in range(2 * experts):
        expert, up = divmod(number, 2)
        place = Place(stored, number * (both // 2), (both // 2, columns))
        yield f"{prefix}.{expert}.{'up' if up else 'gate'}_proj.weight", place
