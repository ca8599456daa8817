"""Folders of GPTQ, AWQ, compressed-tensors and bitsandbytes: written from their documentation.

Codes, scales and zeros are random, so that what a matrix stands for is known without any rounding.
Words are put together here number by number with shifts; the product takes them apart as bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
PLAIN = ("mlp.gate.", "lm_head", "embed_tokens")
"""What is in the names of matrices that no method packs."""


@dataclass(frozen=True)
class Method:
    """One way to write a packed folder. `write` gives the tensors and values of a matrix."""

    name: str
    packing: dict[str, Any]
    write: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    plain: tuple[str, ...] = PLAIN
    ordered: bool = False


def words(codes: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """int32 [rows, words] of codes [rows, columns]: code `order[i]` of each word in place i."""
    count = 32 // bits
    padding = -codes.shape[1] % count
    codes = torch.nn.functional.pad(codes, (0, padding)).long().view(codes.shape[0], -1, count)
    places = [codes[:, :, (order or range(count))[i]] << (bits * i) for i in range(count)]
    total = sum(places, start=torch.zeros_like(places[0]))
    return torch.where(total < 1 << 31, total, total - (1 << 32)).to(torch.int32)


def _drawn(
    out: int, columns: int, group: int, bits: int, dtype: torch.dtype, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], scales and zeros [out, groups]; 0 and the greatest code among the zeros."""
    groups, most = columns // group, (1 << bits) - 1
    codes = torch.randint(most + 1, (out, columns))
    scales = ((0.5 + torch.rand(out, groups)) / (2 * most)).to(dtype)
    zeros = torch.randint(most + 1, (out, groups))
    zeros[0, 0], zeros[-1, -1] = 0, most
    if symmetric:
        zeros.fill_(1 << (bits - 1))
    return codes, scales, zeros


def _rounded(
    weight: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of a weight whose column c is of the group index[c], symmetric, in 4 bits."""
    groups = int(index.max()) + 1
    most = torch.stack([weight[:, index == one].abs().amax(1) for one in range(groups)], 1)
    scales = (most.float() / 7.5).clamp(min=1e-4).half()
    codes = (weight.float() / scales.float()[:, index] + 8).round().clamp(0, 15).long()
    return codes, scales, torch.full_like(most, 8, dtype=torch.int64)


def _values(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, index: torch.Tensor
) -> torch.Tensor:
    """float64 [out, in] of codes, when column c is of the group index[c]."""
    return (codes.double() - zeros.double()[:, index]) * scales.double()[:, index]


def _index(columns: int, group: int, act_order: bool) -> torch.Tensor:
    index = torch.arange(columns) // group
    return index[torch.randperm(columns)] if act_order else index


def gptq(
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    act_order: bool = False,
    layout: str = "gptq",
    dtype: torch.dtype = torch.float16,
    rounded: bool = False,
) -> Method:
    """AutoGPTQ's and GPTQModel's; `group` -1: one for the whole row; `rounded`: near the weights
    of the plain model."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, columns = weight.shape
        size = columns if group == -1 else group
        codes, scales, zeros = _drawn(out, columns, size, bits, dtype, symmetric)
        index = _index(columns, size, act_order)
        if rounded:
            codes, scales, zeros = _rounded(weight, index)
        stored = zeros if layout == "gptq_v2" else (zeros - 1) % (1 << bits)
        tensors = {
            "qweight": words(codes, bits).T.contiguous(),
            "qzeros": words(stored.T, bits),
            "scales": scales.T.contiguous(),
            "g_idx": index.to(torch.int32),
        }
        # Words of qweight go down the columns of the matrix [in, out].
        return tensors, _values(codes, scales, zeros, index)

    packing = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    packing |= {"sym": symmetric, "checkpoint_format": layout}
    return Method(
        f"gptq-{bits}-{group}-{symmetric}-{act_order}-{layout}", packing, write, ordered=act_order
    )


def awq(group: int) -> Method:
    """AutoAWQ's 'GEMM'."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, columns = weight.shape
        codes, scales, zeros = _drawn(out, columns, group, 4, torch.float16, False)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            "qweight": words(codes.T, 4, order),
            "qzeros": words(zeros.T, 4, order),
            "scales": scales.T.contiguous(),
        }
        return tensors, _values(codes, scales, zeros, _index(columns, group, False))

    packing = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"}
    return Method(f"awq-{group}", packing | {"zero_point": True}, write)


def compressed(
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = True,
    act_order: bool = False,
    loose_zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Method:
    """llm-compressor's; `group` -1: its strategy 'channel'; `loose_zeros`: as early files have."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, columns = weight.shape
        size = columns if group == -1 else group
        codes, scales, zeros = _drawn(out, columns, size, bits, dtype, symmetric)
        index = _index(columns, size, act_order)
        tensors = {
            "weight_packed": words(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([out, columns]),
        }
        if not symmetric:
            signed = (zeros - (1 << (bits - 1))).to(torch.int8)
            packed = words(zeros.T, bits).T.contiguous()
            tensors["weight_zero_point"] = signed if loose_zeros else packed
        if act_order:
            tensors["weight_g_idx"] = index.to(torch.int32)
        return tensors, _values(codes, scales, zeros, index)

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group}
    weights["strategy"] = "channel" if group == -1 else "group"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    packing: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    packing |= {"quantization_status": "compressed", "config_groups": groups, "ignore": ["lm_head"]}
    name = f"compressed-{bits}-{group}-{symmetric}-{act_order}-{loose_zeros}"
    return Method(name, packing, write, ordered=act_order)


def nf4(*, double: bool, storage: torch.dtype = torch.uint8) -> Method:
    """bitsandbytes' own, written and read by that library."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        from bitsandbytes import functional

        codes, state = functional.quantize_4bit(
            torch.randn(weight.shape) / 8,
            quant_type="nf4",
            compress_statistics=double,
            quant_storage=storage,
        )
        parts = {name: part.clone() for name, part in state.as_dict(packed=True).items()}
        tensors = {"weight": codes} | {f"weight.{name}": part for name, part in parts.items()}
        return tensors, functional.dequantize_4bit(codes, state).double()

    packing = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
    packing |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double}
    return Method(f"nf4-{double}-{storage}", packing, write)


def fp8(block: int | None, dtype: torch.dtype = torch.float32) -> Method:
    """DeepSeek's and Qwen's, a scale for each square; or Mistral's, with one for all."""

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = (block, block) if block else weight.shape
        size = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales = ((0.5 + torch.rand(size)) / 2000).to(dtype)
        codes = (weight.float() * 448).clamp(-448, 448).to(torch.float8_e4m3fn)
        wide = scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        values = codes.double() * wide[: weight.shape[0], : weight.shape[1]]
        tensors = {"weight": codes, "weight_scale_inv": scales if block else scales[0, 0]}
        return tensors | ({} if block else {"activation_scale": torch.ones(())}), values

    packing = {"quant_method": "fp8", "activation_scheme": "dynamic" if block else "static"}
    packing |= {"weight_block_size": [block, block] if block else None}
    return Method(f"fp8-{block}-{dtype}", packing, write)


def compressed_fp8(strategy: str) -> Method:
    """llm-compressor's FP8, whose activations are rounded too where it is served so."""
    block = {"block": 64, "tensor": None, "channel": None}[strategy]
    plain = fp8(block, torch.bfloat16)

    def write(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, values = plain.write(weight)
        scales = tensors.pop("weight_scale_inv")
        if strategy == "channel":
            scales = ((0.5 + torch.rand(weight.shape[0], 1)) / 2000).to(torch.bfloat16)
            values = tensors["weight"].double() * scales.double()
        tensors.pop("activation_scale", None)
        return tensors | {
            "weight_scale": scales.view(1) if strategy == "tensor" else scales
        }, values

    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    weights |= {"block_structure": [64, 64]} if block else {}
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    packing = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    packing |= {"quantization_status": "compressed", "config_groups": {"group_0": group}}
    return Method(f"compressed-fp8-{strategy}", packing, write)


def write_mxfp4(plain: Path, folder: Path) -> Path:
    """As `write_packed` for gpt-oss: its experts in random codes, unpacked by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    stored = load_file(plain / "model.safetensors")
    values = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, out = stored.pop(name).shape
        blocks = torch.randint(256, (experts, out, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, (experts, out, columns // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        made = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        values[name] = made.contiguous()
    config = json.loads((plain / "config.json").read_text())
    exact = folder.with_name(f"{folder.name}-values")
    for place, some, more in (
        (folder, stored, {"quantization_config": {"quant_method": "mxfp4"}}),
        (exact, values, {}),
    ):
        place.mkdir()
        save_file(some, place / "model.safetensors", {"format": "pt"})
        (place / "config.json").write_text(json.dumps(config | more))
    return exact


def write_packed(plain: Path, folder: Path, method: Method, seed: int = 0) -> Path:
    """Make `folder`, packed, of a plain model's, and `folder`-values, plain, with the same values.

    Matrices of decoder layers are packed, but those whose name has one of `method.plain` in it.
    Returns the second one.
    """
    torch.manual_seed(seed)
    tensors = load_file(plain / "model.safetensors")
    values = {}
    stored: Tensors = {}
    for name, tensor in tensors.items():
        module = name.removesuffix("weight")
        if tensor.dim() != 2 or any(part in name for part in method.plain):
            values[name] = stored[name] = tensor
            continue
        parts, values[name] = method.write(tensor)
        stored |= {module + part: one for part, one in parts.items()}
    config = json.loads((plain / "config.json").read_text())
    exact = folder.with_name(f"{folder.name}-values")
    others = ("model.safetensors", "config.json")
    for place, some, more in (
        (folder, stored, {"quantization_config": method.packing}),
        (exact, values, {}),
    ):
        shutil.copytree(plain, place, ignore=shutil.ignore_patterns(*others))
        save_file(
            {name: one.contiguous() for name, one in some.items()},
            place / "model.safetensors",
            {"format": "pt"},
        )
        (place / "config.json").write_text(json.dumps(config | more))
    return exact
