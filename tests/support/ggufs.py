"""Small GGUF files, written by gguf's own package from a folder, and the folder that they equal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from safetensors.torch import load_file, save_file
from support.checkpoints import FAMILY_SETTINGS, write_family, write_tokenizer

from edgespec.model.loader import Checkpoint
from edgespec.planning.architecture import ACTIVE, EXPERTS
from edgespec.planning.text_part import LATENT, SHARING

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "granite": "granite",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
    "smollm3": "smollm3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "ministral3": "mistral3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "ernie4_5": "ernie4_5",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gemma": "gemma",
    "exaone4": "exaone4",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "cohere2": "cohere2",
    "lfm2": "lfm2",
    "gemma4_text": "gemma4",
    "lfm2_moe": "lfm2moe",
    **dict.fromkeys(LATENT, "deepseek2"),
}
"""What llama.cpp calls a model type."""

_DELTA = ("qwen35", "qwen35moe", "qwen3next")
_NEMOTRONS = ("nemotron_h", "nemotron_h_moe")

SCALES_AT = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
    **{"IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": ()},
}
"""Every packed type, and at which bytes of a block its float16 numbers are."""
_CANNOT_QUANTISE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""Types that gguf only reads: their blocks are random."""

TypeOf = Callable[[str, tuple[int, ...]], str]


def all_as(kind: str) -> TypeOf:
    """Matrices in one type, the rest in F32, as llama.cpp's own tool has it."""
    return lambda name, shape: kind if len(shape) == 2 else "F32"


def write_gguf(
    folder: Path,
    file: Path,
    type_of: TypeOf,
    values: Mapping[str, Any] | None = None,
    architecture: str = "",
    heads_apart: bool = True,
    gates_apart: bool = True,
) -> Path:
    """Write the model in `folder` as a GGUF file, with `values` beside its settings. As newer files
    have it, `heads_apart`: of latents, each head has two matrices; `gates_apart`: of a Qwen3-Next,
    what makes gates is a matrix of its own.

    Returns a folder of what the file stands for: its numbers dequantised by gguf, in float32.
    """
    source = Checkpoint(folder)
    settings = json.loads((folder / "config.json").read_text())
    architecture = architecture or ARCHITECTURES[settings["model_type"]]
    if architecture == "nemotron_h" and "moe" in source.config.layer_types:
        architecture = "nemotron_h_moe"
    writer = GGUFWriter(file, architecture)
    _add_settings(writer, source.config, settings, heads_apart)
    for key, value in (values or {}).items():
        _add_value(writer, key, value)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    meant: dict[str, torch.Tensor] = {}
    # What a Gemma 4 has for all layers or experts together is so in both; as are heads' matrices.
    as_stored = architecture in ("gemma4", "deepseek2")
    whole = load_file(folder / "model.safetensors") if as_stored else {}
    for name in sorted(whole or source.names):
        numbers = (whole[name] if whole else source.tensor(name)).float().numpy()
        name = _renamed(name, _PUBLISHED.get(settings["model_type"], {}))
        shape = numbers.shape[-2:] if whole else numbers.shape
        form = "F32" if name.endswith("correction_bias") else type_of(name, shape)
        kind = GGMLQuantizationType[form]
        stored = _stored(numbers, kind, seed=len(meant))
        plain = stored if kind == GGMLQuantizationType.F32 else quants.dequantize(stored, kind)
        meant[name] = torch.from_numpy(np.ascontiguousarray(plain, dtype=np.float32))
        if name.endswith("kv_b_proj.weight") and heads_apart:
            meant[name] = _add_heads(writer, name, numbers, kind, source.config)
            continue
        if name.endswith("A_log"):
            stored = -np.exp(stored)
            meant[name] = torch.from_numpy(np.log(-stored.astype(np.float64)).astype(np.float32))
        if architecture == "granitehybrid" and "gate_up_proj" in name:
            for part, half in zip(("gate", "up"), np.split(stored, 2), strict=True):
                one = name.replace("gate_up", part)
                theirs, _ = _their_name(architecture, one, source.layers, source.names)
                writer.add_tensor(theirs, half, raw_dtype=kind)
            continue
        if "linear_attn" in name:
            stored = in_qwen35(name, stored, source.config)
            if name.endswith("in_proj_qkvz.weight") and gates_apart:
                _add_apart(writer, name, stored, kind, source.config)
                continue
        theirs, expert = _their_name(architecture, name, source.layers, source.names)
        if expert is not None:
            stack = stacks.setdefault(theirs, {})
            stack[expert] = stored
            if len(stack) < _experts(source.config):
                continue
            stored = np.stack([stack[number] for number in sorted(stack)])
        writer.add_tensor(
            theirs, _as_converted(architecture, theirs, stored, source.config), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    twin = file.with_suffix("")
    twin.mkdir()
    shutil.copy(folder / "config.json", twin)
    if settings["model_type"] == "gpt_oss":
        meant = fused_experts(meant, source.config.num_local_experts)
    if settings["model_type"] == "ernie4_5_moe":
        bias = "correction_bias"
        meant = {name: one[None] if bias in name else one for name, one in meant.items()}
    if settings["model_type"] == "mixtral":
        meant = {_in_mixtral(name): one for name, one in meant.items()}
    if architecture in ("lfm2", "lfm2moe"):
        meant = {_in_lfm2(name): one for name, one in meant.items()}
    if architecture == "granitehybrid":
        meant = _in_granite(meant, _experts(source.config))
    if architecture in ("qwen2moe", *_SHARED, *_DELTA):
        shared = _SHARED.get(architecture, "shared_expert")
        meant = {_beside(name, meant, shared): one for name, one in meant.items()}
        bias = "mlp.gate.e_score_correction_bias"
        meant = {name.replace("mlp.expert_bias", bias): one for name, one in meant.items()}
    if architecture in ("falcon-h1", *_NEMOTRONS):
        own = _FALCON if architecture == "falcon-h1" else _NEMOTRON
        meant = {_renamed(name, own): one for name, one in meant.items()}
    save_file(meant, twin / "model.safetensors", {"format": "pt"})
    return twin


def _add_heads(
    writer: GGUFWriter, name: str, numbers: np.ndarray, kind: GGMLQuantizationType, config: Any
) -> torch.Tensor:
    """Write what makes keys, turned, and values of each head; returns what both stand for."""
    layer, keys = name.split(".")[2], config.qk_nope_head_dim
    heads = numbers.reshape(config.num_attention_heads, -1, numbers.shape[1])
    plain = []
    for part, own in (("k", heads[:, :keys].swapaxes(1, 2)), ("v", heads[:, keys:])):
        stored = quants.quantize(np.ascontiguousarray(own), kind)
        writer.add_tensor(f"blk.{layer}.attn_{part}_b.weight", stored, raw_dtype=kind)
        plain.append(torch.from_numpy(quants.dequantize(stored, kind)))
    return torch.cat((plain[0].mT, plain[1]), 1).reshape(numbers.shape).contiguous()


def _experts(config: Any) -> int:
    return int(getattr(config, EXPERTS.get(config.model_type, "num_experts")))


def _in_granite(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Those of a Granite 4 as its folders have them."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace("mlp.gate_up_proj", "shared_mlp.input_linear")
        name = name.replace("mlp.down_proj", "shared_mlp.output_linear")
        found[name.replace("mlp.gate.", "block_sparse_moe.router.layer.")] = tensor
    for owner in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        each = [f"{owner}.experts.{number}." for number in range(experts)]
        gate, up, down = (
            torch.stack([found.pop(f"{one}{part}_proj.weight") for one in each])
            for part in ("gate", "up", "down")
        )
        sparse = owner.replace("mlp", "block_sparse_moe")
        found[f"{sparse}.input_linear.weight"] = torch.cat((gate, up), 1)
        found[f"{sparse}.output_linear.weight"] = down
    return found


def _beside(name: str, names: Container[str], shared: str) -> str:
    """The name of an MLP beside experts, which ours does not tell from one in their place."""
    owner, _, rest = name.partition(".mlp.")
    router = (f"{owner}.mlp.gate.weight", f"{owner}.mlp.gate.wg.weight")
    if any(one in names for one in router) and rest.startswith(("gate_", "up_", "down_")):
        return f"{owner}.mlp.{shared}.{rest}"
    return name


_SHARED = {
    "glm4moe": "shared_experts",
    "ernie4_5-moe": "shared_experts",
    "hunyuan-moe": "shared_mlp",
    "nemotron_h_moe": "shared_experts",
}
_PUBLISHED = {
    "glm4": {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    "gpt_oss": {".mlp.gate.": ".mlp.router."},
    "hunyuan_v1_moe": {
        "q_norm": "query_layernorm",
        "k_norm": "key_layernorm",
        "mlp.gate.weight": "mlp.gate.wg.weight",
    },
    "ernie4_5_moe": {"mlp.expert_bias": "mlp.gate.moe_statics.e_score_correction_bias"},
}
"""What folders call parts of names."""
_FALCON = {
    "model.norm": "model.final_layernorm",
    "post_attention_layernorm": "pre_ff_layernorm",
    "mlp": "feed_forward",
}
_NEMOTRON = {
    "model.norm": "model.norm_f",
    "model.": "backbone.",
    "embed_tokens": "embeddings",
    "input_layernorm": "norm",
    "self_attn": "mixer",
    "mlp": "mixer",
    "mamba": "mixer",
}


def _renamed(name: str, own: Mapping[str, str]) -> str:
    for ours, theirs in own.items():
        name = name.replace(ours, theirs)
    return name


def _in_mixtral(name: str) -> str:
    for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
        name = name.replace(ours, theirs)
    return name.replace(".mlp.", ".block_sparse_moe.")


_LFM2 = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "o_proj": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def _in_lfm2(name: str) -> str:
    return _renamed(name, _LFM2)


def fused_experts(tensors: Mapping[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Those of gpt-oss as its folders have them: columns of gate and up take turns."""
    fused = {name: one for name, one in tensors.items() if ".experts." not in name}
    owners = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for owner in owners:
        for leaf, end in (("weight", ""), ("bias", "_bias")):

            def stack(part: str, owner: str = owner, leaf: str = leaf) -> torch.Tensor:
                each = [tensors[f"{owner}.experts.{n}.{part}.{leaf}"] for n in range(experts)]
                return torch.stack([one.mT if one.dim() > 1 else one for one in each])

            both = torch.stack((stack("gate_proj"), stack("up_proj")), -1).flatten(-2)
            fused[f"{owner}.experts.gate_up_proj{end}"] = both
            fused[f"{owner}.experts.down_proj{end}"] = stack("down_proj").contiguous()
    return fused


def write_gguf_family(root: Path, name: str, type_of: TypeOf, **settings: Any) -> tuple[Path, Path]:
    """A GGUF file of a small model of a family that GGUF can express, and the folder it equals."""
    folder = write_family(root / f"{name}-original", name, **in_blocks(name) | settings)
    file = root / f"{name}.gguf"
    return file, write_gguf(folder, file, type_of)


def in_blocks(name: str) -> dict[str, Any]:
    """Settings of a family for which all matrices have columns in blocks of 32, and which GGUF can
    express."""
    chosen: dict[str, Any]
    chosen = {"intermediate_size": 64, "moe_intermediate_size": 32, "query_pre_attn_scalar": 16}
    if name.startswith("gemma4_text"):
        chosen |= {"hidden_size_per_layer_input": 32 * ("experts" not in name)}
    if name.startswith("granitemoehybrid"):
        chosen |= {"shared_intermediate_size": 64}
    if name.startswith("falcon_h1"):  # the converter multiplies the matrices by these
        chosen |= {one: None for one in FAMILY_SETTINGS[name] if one.endswith("multipliers")}
        chosen |= {one: 1.0 for one in FAMILY_SETTINGS[name] if one.endswith("multiplier")}
        chosen |= {"mamba_norm_before_gate": False, "mamba_d_ssm": 64, "mamba_n_heads": 8}
        chosen |= {"head_dim": 16, "mamba_n_groups": 2}
    if name.startswith("nemotron_h"):
        chosen |= {"moe_shared_expert_intermediate_size": 64}
        chosen |= {"mamba_head_dim": 24}
    if name == "hunyuan_v1_moe":
        rope = {"rope_type": "default", "rope_theta": 1e3}
        chosen |= {"intermediate_size": 32, "rope_parameters": rope}
    if name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        chosen |= {"linear_value_head_dim": 32, "shared_expert_intermediate_size": 64}
    if name == "qwen3_next":
        chosen |= {"mlp_only_layers": []}
    if name == "lfm2":
        chosen |= {"block_multiple_of": 32}
    if name == "lfm2_moe":
        chosen |= {"routed_scaling_factor": 1.0}
    if name.partition("-")[0] in LATENT:
        chosen |= {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 8}
        chosen |= {"q_lora_rank": FAMILY_SETTINGS[name]["q_lora_rank"] and 32}
    if name == "qwen3_moe":
        chosen |= {"mlp_only_layers": []}
    if name == "qwen2_moe":
        chosen |= {"mlp_only_layers": [], "shared_expert_intermediate_size": 64}
    if name in ("mistral", "mixtral", "qwen3_moe", "qwen2_moe"):
        chosen |= {"sliding_window": None, "use_sliding_window": False}
    if name == "gpt_oss":
        chosen |= {"swiglu_limit": 7.0, "intermediate_size": 32}
    if name == "smollm3":
        chosen |= {"no_rope_layers": None, "use_sliding_window": False, "sliding_window": None}
        chosen |= {"layer_types": None}
    return chosen


def _add_apart(writer: GGUFWriter, name: str, stored: np.ndarray, kind: Any, config: Any) -> None:
    """Adds what makes queries, keys and values of all groups of a Qwen3-Next, and gates."""
    key, share = config.linear_key_head_dim, config.linear_num_value_heads
    value = share // config.linear_num_key_heads * config.linear_value_head_dim
    groups = stored.reshape(config.linear_num_key_heads, -1, stored.shape[-1])
    parts = np.split(groups, [key, 2 * key, 2 * key + value], axis=1)
    query, keys, values, gate = (one.reshape(-1, stored.shape[-1]) for one in parts)
    layer = name.split(".")[2]
    both = np.concatenate((query, keys, values))
    writer.add_tensor(f"blk.{layer}.attn_qkv.weight", both, raw_dtype=kind)
    writer.add_tensor(f"blk.{layer}.attn_gate.weight", gate, raw_dtype=kind)


def in_qwen35(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """A tensor of a layer with a state as llama.cpp's converter has it: heads of values round by
    round, of each group of keys one, where transformers' have them group by group."""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    part = name.rpartition("linear_attn.")[2].removesuffix(".weight")
    if part == "norm" or config.model_type == "qwen3_next":
        return values
    axis = int(part == "out_proj")
    first = 2 * groups * config.linear_key_head_dim if part in ("in_proj_qkv", "conv1d") else 0
    kept, moved = np.split(np.moveaxis(values, axis, 0), [first])
    each = moved.reshape(groups, heads // groups, len(moved) // heads, *moved.shape[1:])
    both = np.concatenate((kept, each.swapaxes(0, 1).reshape(moved.shape)))
    return np.ascontiguousarray(np.moveaxis(both, 0, axis))


def _stored(numbers: np.ndarray, kind: GGMLQuantizationType, seed: int) -> np.ndarray:
    if kind.name not in _CANNOT_QUANTISE:
        return quants.quantize(numbers, kind)
    random = np.random.default_rng(seed)
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (numbers.size // columns, size), dtype=np.uint8)
    # Scales as a model has them: of random bytes many are infinite.
    for start in SCALES_AT[kind.name]:
        scales = random.uniform(1e-4, 2e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)


def _their_name(
    architecture: str, name: str, layers: int, names: Container[str]
) -> tuple[str, int | None]:
    """llama.cpp's name, and which expert of a stack it is. `names`: of all tensors."""
    kind = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    if architecture in ("lfm2", "lfm2moe"):
        name = name.replace("model.norm", "model.embedding_norm")
        name = name.replace("mlp.expert_bias", "feed_forward.expert_bias")
    if architecture in ("granitehybrid", "falcon-h1", *_NEMOTRONS, *_DELTA):
        name = name.replace("dt_bias", "dt_proj.bias")
    if architecture == "falcon-h1":
        name = _renamed(name, _FALCON)
    if architecture == "nemotron_h_moe":
        name = _beside(name, names, "shared_experts")
        name = name.replace("mlp.expert_bias", "mlp.gate.e_score_correction_bias")
    if architecture in _NEMOTRONS and ".experts." not in name:
        name = _renamed(name, _NEMOTRON).replace("dt_proj", "dt")
    if (inner := name.removeprefix(f"model.layers.{layers}.")) in _NEXTN:
        return f"blk.{layers}.nextn.{_NEXTN[inner]}.weight", None
    layers += 1
    if architecture in ("granitehybrid", "qwen2moe", *_SHARED, *_DELTA):
        name = _beside(name, names, _SHARED.get(architecture, "shared_expert"))
    name = name.replace("gate.moe_statics.e_score_correction_", "moe_statics.e_score_correction.")
    parts, expert = name.replace("correction_bias", "correction").split("."), None
    if architecture == "gemma4" and parts[-2] == "router" and "scale" in parts[-1]:
        of = "ffn_gate_inp" if parts[-1] == "scale" else "ffn_down_exps"
        return f"blk.{parts[2]}.{of}.scale", None
    if "experts" in parts and architecture != "gemma4":
        expert = int(parts.pop(parts.index("experts") + 1))
    found = gguf.get_tensor_name_map(kind, layers).get_name(".".join(parts), (".weight", ".bias"))
    assert found is not None, name
    if architecture == "gemma4" and not found.endswith((".weight", ".bias")):
        found += ".weight"  # of a tensor without an ending
    bare = {"attn_sinks": ".weight", "exp_probs_b": ".bias"}
    return found + bare.get(found.rpartition(".")[2], ""), expert


_NEXTN = {
    f"{name}.weight": name.replace(".", "_")
    for name in (
        "eh_proj",
        "enorm",
        "hnorm",
        "shared_head.norm",
        "shared_head.head",
        "embed_tokens",
    )
}
"""Of a head that guesses, which gguf's own table does not know in this architecture."""


def _as_converted(architecture: str, name: str, stored: np.ndarray, config: Any) -> np.ndarray:
    """What llama.cpp's converter does to a tensor."""
    paired = ("llama", "mistral3", "granite", "granitehybrid", "smollm3", *_NEMOTRONS)
    if architecture in paired and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if "_q." in name else config.num_key_value_heads
        halves = stored.reshape(heads, 2, stored.shape[0] // heads // 2, *stored.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(stored.shape))
    if name.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")):
        return stored[:, 0]
    if architecture in _DELTA:
        return stored + 1 if "norm" in name and "ssm_norm" not in name else stored
    if name.endswith((".ssm_a", ".ssm_d")):
        return stored[:, None]
    if name.endswith("ssm_norm.weight"):
        return stored.reshape(config.mamba_n_groups, -1)
    if (
        architecture.startswith("gemma")
        and architecture != "gemma4"
        and name.endswith("norm.weight")
    ):
        return stored + 1
    return stored


def rewrite(
    file: Path,
    target: Path,
    keep: Callable[[str], bool] = lambda name: True,
    kinds: Callable[[str], str] = lambda name: "F32",
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write a file of F32 tensors again: those to `keep`, as other types, with other settings."""
    reader, changed = gguf.GGUFReader(file), values or {}
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key in changed:
            _add_value(writer, key, changed[key])
        elif not key.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub)
    for tensor in reader.tensors:
        if keep(tensor.name):
            raw = GGMLQuantizationType[kinds(tensor.name)]
            stored = quants.quantize(tensor.data, raw)
            writer.add_tensor(tensor.name, stored, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _add_settings(
    writer: GGUFWriter, config: Any, settings: Mapping[str, Any], heads_apart: bool
) -> None:
    writer.add_block_count(config.num_hidden_layers + settings.get("mtp_num_hidden_layers", 0))
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(config.hidden_size)
    inner: int | list[int] = config.intermediate_size
    if getattr(config, "use_double_wide_mlp", False):
        shared = config.num_kv_shared_layers
        each = [inner] * (config.num_hidden_layers - shared)
        inner = each + [2 * config.intermediate_size] * shared
    if config.model_type == "nemotron_h":
        widths = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        inner = [widths.get(kind, 0) for kind in config.layer_types]
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    kv_heads: int | list[int] = config.num_key_value_heads
    if "conv" in (getattr(config, "layer_types", None) or ()):
        kv_heads = [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type in ("granitemoehybrid", "nemotron_h"):
        full = [kind == "full_attention" for kind in config.layer_types]
        kv_heads = [config.num_key_value_heads * one for one in full]
    if config.model_type == "gemma4_text":
        of_full = config.num_global_key_value_heads
        types = config.layer_types
        kv_heads = [of_full if "full" in kind else config.num_key_value_heads for kind in types]
        writer.add_shared_kv_layers(config.num_kv_shared_layers)
        writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
        writer.add_key_length_swa(config.head_dim)
    if config.model_type in LATENT:
        kv_heads = 1 if heads_apart else config.num_attention_heads
    writer.add_head_count_kv(kv_heads)
    if config.model_type == "cohere2":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if config.model_type in LATENT:
        _add_latents(writer, config, heads_apart)
    else:
        gemma4 = config.model_type == "gemma4_text"
        writer.add_key_length(config.global_head_dim if gemma4 else head)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    for key, value in _of_family(config):
        _add_value(writer, f"{writer.arch}.{key}", value)
    _add_rope(writer, config, head)


def _add_latents(writer: GGUFWriter, config: Any, heads_apart: bool) -> None:
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    if heads_apart:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(config.v_head_dim)
    else:
        writer.add_key_length(key)
        writer.add_value_length(config.v_head_dim)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _of_family(config: Any) -> Iterator[tuple[str, Any]]:
    if config.model_type in ("gemma2", "gemma3_text", "gemma4_text"):
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, cap, None):
                yield cap, float(getattr(config, cap))
    if config.model_type in ("granitemoehybrid", "falcon_h1", "nemotron_h"):
        yield "ssm.conv_kernel", config.mamba_d_conv
        yield "ssm.state_size", config.mamba_d_state
        yield "ssm.group_count", config.mamba_n_groups
        yield "ssm.inner_size", config.mamba_n_heads * int(config.mamba_d_head)
        yield "ssm.time_step_rank", config.mamba_n_heads
    if config.model_type == "granitemoehybrid":
        yield "rope.scaling.finetuned", config.position_embedding_type == "rope"
        yield "expert_count", config.num_local_experts
        yield "expert_used_count", config.num_experts_per_tok
        yield "expert_shared_feed_forward_length", config.shared_intermediate_size
    if ARCHITECTURES[config.model_type] in _DELTA:
        yield "ssm.conv_kernel", config.linear_conv_kernel_dim
        yield "ssm.state_size", config.linear_key_head_dim
        yield "ssm.group_count", config.linear_num_key_heads
        yield "ssm.inner_size", config.linear_num_value_heads * config.linear_value_head_dim
        yield "ssm.time_step_rank", config.linear_num_value_heads
        yield "nextn_predict_layers", config.settings.get("mtp_num_hidden_layers", 0)
    if config.model_type in ("granite", "granitemoehybrid"):
        yield "attention.scale", config.attention_multiplier
        yield "embedding_scale", config.embedding_multiplier
        yield "residual_scale", config.residual_multiplier
        yield "logit_scale", config.logits_scaling
    if config.model_type in ("gemma3_text", "gemma4_text", "olmo3", "exaone4", "cohere2"):
        windows = [kind == "sliding_attention" for kind in config.layer_types]
        yield "attention.sliding_window_pattern", windows
    if config.model_type in SHARING:
        yield "expert_shared_feed_forward_length", config.shared_expert_intermediate_size
    if config.model_type in ("qwen3_moe", *SHARING):
        yield "expert_count", config.num_experts
        yield "expert_used_count", config.num_experts_per_tok
        yield "expert_feed_forward_length", config.moe_intermediate_size
    if config.model_type == "gemma4_text" and config.enable_moe_block:
        yield "expert_count", config.num_experts
        yield "expert_used_count", config.top_k_experts
        yield "expert_feed_forward_length", config.moe_intermediate_size
    if config.model_type == "lfm2_moe":
        yield "expert_count", config.num_experts
        yield "expert_used_count", config.num_experts_per_tok
        yield "expert_feed_forward_length", config.moe_intermediate_size
        yield "leading_dense_block_count", config.num_dense_layers
        yield "expert_gating_func", gguf.ExpertGatingFuncType.SIGMOID.value
    experts = config.model_type == "nemotron_h" and "moe" in config.layer_types
    if experts:
        yield "expert_shared_feed_forward_length", config.shared_expert_intermediate_size
    if config.model_type == "glm4_moe":
        yield "leading_dense_block_count", config.first_k_dense_replace
        yield "expert_gating_func", gguf.ExpertGatingFuncType.SIGMOID.value
    if config.model_type == "glm4_moe" or experts:
        yield "expert_count", config.n_routed_experts
        yield "expert_used_count", config.num_experts_per_tok
        yield "expert_feed_forward_length", config.moe_intermediate_size
        yield "expert_shared_count", config.n_shared_experts
        yield "expert_weights_scale", config.routed_scaling_factor
        yield "expert_weights_norm", config.norm_topk_prob
        yield "expert_group_count", config.n_group
        yield "expert_group_used_count", config.topk_group
    if config.model_type == "ernie4_5_moe":
        yield "expert_count", config.moe_num_experts
        yield "expert_used_count", config.moe_k
        yield "expert_feed_forward_length", config.moe_intermediate_size
        yield "expert_shared_count", config.moe_num_shared_experts
        yield "interleave_moe_layer_step", config.moe_layer_interval
        yield "leading_dense_block_count", config.moe_layer_start_index
    if config.model_type in ("gpt_oss", "olmoe", "mixtral", "hunyuan_v1_moe"):
        yield "expert_count", _experts(config)
        field = ACTIVE.get(config.model_type, "num_experts_per_tok")
        yield "expert_used_count", getattr(config, field)
        yield "expert_feed_forward_length", config.intermediate_size
    if config.model_type == "ministral3":
        yield "attention.temperature_scale", config.rope_parameters["llama_4_scaling_beta"]


def _add_rope(writer: GGUFWriter, config: Any, head: int) -> None:
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    if config.model_type == "gemma4_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        pairs = config.global_head_dim // 2
        turned = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        divisors = np.array([1.0] * turned + [1e30] * (pairs - turned), dtype=np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)
        return
    if config.model_type == "olmo3":
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
            if "mscale_all_dim" in rope:
                share = 0.1 if config.model_type in LATENT else 1.0
                writer.add_rope_scaling_yarn_log_mul(share * rope["mscale_all_dim"])
            if "attention_factor" in rope:
                writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for one in ("short", "long"):
            factors = np.array(rope[f"{one}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{one}.weight", factors)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head))


def llama3_divisors(rope: Mapping[str, Any], head: int) -> np.ndarray:
    """float32 [head / 2]: plain frequencies by those that transformers makes."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=head, num_attention_heads=1, head_dim=head, rope_parameters=dict(rope)
    )
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, head, 2, dtype=torch.float32) / head)
    divisors: np.ndarray = (plain / frequencies).numpy()
    return divisors


def tokenizer_values(root: Path, style: str = "bytes", **more: Any) -> dict[str, Any]:
    """The keys that llama.cpp's converter writes for one of `write_tokenizer`'s tokenizers."""
    folder = write_tokenizer(root / f"tokenizer-{style}", style=style)
    inner = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = inner["model"]["vocab"] | {one["content"]: one["id"] for one in inner["added_tokens"]}
    special = {one["id"] for one in inner["added_tokens"] if one["special"]}
    added = {one["id"] for one in inner["added_tokens"]} - special
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [3 if id_ in special else 4 if id_ in added else 1 for id_ in range(len(tokens))]
    values: dict[str, Any] = {
        "tokens": tokens,
        "token_type": kinds,
        "bos_token_id": vocab["<s>"],
        "eos_token_id": vocab["</s>"],
        "add_bos_token": True,
    }
    if style == "bytes":
        merges = [" ".join(pair) for pair in inner["model"]["merges"]]
        values |= {"model": "gpt2", "pre": "gpt-2", "merges": merges}
    else:
        scores = [-float(index) for index in range(len(tokens))]
        values |= {"model": "llama", "scores": scores, "unknown_token_id": vocab["<unk>"]}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | more).items()}
