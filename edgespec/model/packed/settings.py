"""Packing settings: what the `quantization_config` of a config.json says, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import ModelError

GPTQ, AWQ, COMPRESSED, BITSANDBYTES = "gptq", "awq", "compressed-tensors", "bitsandbytes"
MXFP4, FP8 = "mxfp4", "fp8"
FLOATS = "float-quantized"
"""The layout of compressed-tensors in FP8."""
READ = "GPTQ, AWQ, compressed-tensors (4 or 8 bit weights), bitsandbytes NF4, FP8 and MXFP4"
"""What is read, for messages and documentation."""

_ORIGINAL = "its original 16-bit release"
_FOUR_BIT = f"a GGUF, GPTQ or AWQ file of it, or {_ORIGINAL} with --quant int4"
_EIGHT_BIT = f"{_ORIGINAL} with --quant int8, or a GGUF file of it in Q8_0"
_INSTEAD = {
    "fbgemm_fp8": _EIGHT_BIT,
    "mxfp8": _EIGHT_BIT,
    "eetq": _EIGHT_BIT,
    "gguf": "the GGUF file itself: --model FILE.gguf",
    "auto-round": f"its GPTQ or AWQ release, or {_ORIGINAL} with --quant int4",
}
"""What to take for what is not read; for everything else a 4-bit form."""


@dataclass(frozen=True)
class Packing:
    """How matrices were packed: the method, and the rest of its settings as they are written."""

    method: str
    settings: dict[str, Any]


def packing_of(folder: Path, settings: Mapping[str, Any]) -> Packing | None:
    """How the matrices of a model are packed, by its config.json as read.

    None for a plain checkpoint. Raises ModelError for a method, or a variant of one, that would
    not be computed exactly, with what to take instead.
    """
    packing = settings.get("quantization_config")
    if not packing:
        return None
    if not isinstance(packing, dict):
        raise ModelError(
            f"the quantization_config of the model in {folder} is no object; download the model "
            "again"
        )
    # Writers of bitsandbytes' checkpoints left the method out at first.
    unnamed = BITSANDBYTES if "load_in_4bit" in packing else "an unknown method"
    method = str(packing.get("quant_method") or unnamed)
    known = _REFUSALS.get(method)
    for what, instead in known(packing) if known else [(method, _INSTEAD.get(method, _FOUR_BIT))]:
        raise ModelError(
            f"the model in {folder} is packed as {what}, which edgespec does not read; take "
            f"{instead} (edgespec reads {READ})"
        )
    return Packing(method, packing)


def float_weights(packing: dict[str, Any]) -> dict[str, Any] | None:
    """What compressed-tensors say of weights in FP8, with their `block_structure`, which is None
    where a row has one scale, or the matrix; None for all else."""
    groups = packing.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if (group.get("format") or packing.get("format")) == FLOATS:
            return {"block_structure": None, **(group.get("weights") or {})}
    return None


def gptq_layout(packing: dict[str, Any]) -> str:
    """What GPTQ's settings call the layout of its tensors."""
    if packing.get("is_marlin_format"):
        return "marlin"
    return str(packing.get("checkpoint_format") or packing.get("format") or "gptq").lower()


Refusals = Iterator[tuple[str, str]]
"""What is not read, and what to take instead; of several the first is told."""


def _of_gptq(packing: dict[str, Any]) -> Refusals:
    bits, layout = packing.get("bits"), gptq_layout(packing)
    if bits not in (4, 8):
        yield f"GPTQ of {bits} bits", f"its GPTQ release of 4 or 8 bits, or {_FOUR_BIT}"
    if layout not in ("gptq", "gptq_v2"):
        yield f"GPTQ in the layout {layout!r}", "its GPTQ release in the layout 'gptq'"
    if packing.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        yield f"GPTQ in words of {packing['pack_dtype']}", "its GPTQ release in words of int32"


def _of_awq(packing: dict[str, Any]) -> Refusals:
    bits = packing.get("bits", packing.get("w_bit"))
    if bits != 4:
        yield f"AWQ of {bits} bits", f"its AWQ release of 4 bits, or {_FOUR_BIT}"
    layout = packing.get("version") or packing.get("checkpoint_format") or packing.get("format")
    if packing.get("backend") == "llm-awq":
        layout = "llm-awq"
    if str(layout or "gemm").lower() != "gemm":
        yield f"AWQ in the layout {layout!r}", "its AWQ release in the layout 'gemm'"


def _of_bitsandbytes(packing: dict[str, Any]) -> Refusals:
    if packing.get("load_in_8bit") or packing.get("_load_in_8bit"):
        yield "bitsandbytes int8", _EIGHT_BIT
    kind = packing.get("bnb_4bit_quant_type", "fp4")
    if kind != "nf4":
        yield f"bitsandbytes {kind}", f"its NF4 release, or {_ORIGINAL} with --quant nf4"


def _of_fp8(packing: dict[str, Any]) -> Refusals:
    block = packing.get("weight_block_size")
    if packing.get("fmt", "e4m3") != "e4m3":
        yield f"FP8 of the kind {packing['fmt']}", _EIGHT_BIT
    if block is not None and not (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(one, int) and one > 0 for one in block)
        and block[1] % 16 == 0
    ):
        yield f"FP8 in blocks of {block}", _EIGHT_BIT


def _of_compressed(packing: dict[str, Any]) -> Refusals:
    if packing.get("quantization_status", "compressed") != "compressed":
        yield f"compressed-tensors that are {packing['quantization_status']}", _FOUR_BIT
    for part in ("kv_cache_scheme", "transform_config"):
        if packing.get(part):
            yield f"compressed-tensors with a {part}", _FOUR_BIT
    if (packing.get("sparsity_config") or {}).get("format", "dense") != "dense":
        yield "compressed-tensors of sparse matrices", _FOUR_BIT
    groups = packing.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        yield "compressed-tensors without config_groups", _FOUR_BIT
        return
    for group in groups.values():
        yield from _of_compressed_group(packing, group if isinstance(group, dict) else {})


def _of_compressed_group(packing: dict[str, Any], group: dict[str, Any]) -> Refusals:
    """Of the matrices of one of compressed-tensors' config_groups."""
    layout = group.get("format") or packing.get("format")
    if layout == FLOATS:
        yield from _of_compressed_floats(packing, group)
        return
    if layout != "pack-quantized":
        instead = _EIGHT_BIT if layout == "int-quantized" else _FOUR_BIT
        yield f"compressed-tensors in the layout {layout!r}", instead
    if group.get("input_activations") or group.get("output_activations"):
        yield "compressed-tensors with quantised activations", _FOUR_BIT
    weights = group.get("weights") or {}
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    if bits not in (4, 8) or kind != "int":
        yield f"compressed-tensors of type {kind} of {bits} bits", _FOUR_BIT
    if strategy not in ("group", "channel"):
        yield f"compressed-tensors with one scale a {strategy}", _FOUR_BIT


def _of_compressed_floats(packing: dict[str, Any], group: dict[str, Any]) -> Refusals:
    weights = group.get("weights") or {}
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    groups = packing["config_groups"].values()
    if any((one.get("format") or packing.get("format")) != FLOATS for one in groups):
        yield "compressed-tensors in several layouts", _EIGHT_BIT
    if (bits, kind) != (8, "float"):
        yield f"compressed-tensors of type {kind} of {bits} bits", _EIGHT_BIT
    if strategy not in ("tensor", "channel", "block"):
        yield f"compressed-tensors with one scale a {strategy}", _EIGHT_BIT
    if strategy == "block":
        yield from _of_fp8({"weight_block_size": weights.get("block_structure") or []})


_REFUSALS = {
    GPTQ: _of_gptq,
    AWQ: _of_awq,
    COMPRESSED: _of_compressed,
    BITSANDBYTES: _of_bitsandbytes,
    MXFP4: lambda packing: iter(()),
    FP8: _of_fp8,
}
