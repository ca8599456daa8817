"""Precision: how blocks are held and in what they compute, where the user leaves that open."""

from __future__ import annotations

import ctypes
from pathlib import Path

from edgespec.config import FILE, QUANTISATIONS, Quantisation
from edgespec.daemon.device import ROOT, system_text
from edgespec.daemon.model_names import known_name
from edgespec.drafting.choice import DraftChoice
from edgespec.errors import ConfigError
from edgespec.model.gguf.files import GgufFiles
from edgespec.model.hub import ModelFiles, NotHereYet, model_files
from edgespec.model.hub_cache import is_here
from edgespec.model.manifest import manifest_of
from edgespec.model.reading import read_object
from edgespec.planning.architecture import Architecture, architecture_of
from edgespec.planning.catalogue import MODELS
from edgespec.planning.cost_model import HEAD, PLAIN

AUTO = "auto"
"""The value of --quant, --head-quant, --draft-quant, --dtype and --cache-dtype that leaves it to
this module."""

SMALL_BYTES = 100_000_000
"""A model of fewer bytes in 16 bit stays as it is: no board is short of them."""

NARROW = 2048
"""Below this hidden size groups of 32 columns are taken: small models lose more by rounding."""

_QUANTISED = ("independent", "eagle", "eagle3", "dspark", "mtp")
"""Draft sources whose layers can be packed."""

_HELD = {
    "file": "blocks as the model's files pack them",
    "int8": "8-bit blocks",
    "int4": "4-bit blocks",
    "nf4": "4-bit blocks",
}


def quantisation_for(model: str, quant: str = AUTO) -> Quantisation:
    """The quantisation of this name, or for "auto" the one that suits the model.

    `model`: see hub.model_files; no weights are read. What is packed already stays as it is; of the
    others small ones stay, and large ones take 4 bits a weight. Raises ConfigError for an unknown
    name, ModelError for a model that the hub does not give or a GGUF file that cannot be used.
    """
    if quant != AUTO:
        return Quantisation.parse(quant)
    made = manifest_of(model)
    if made is not None:
        return made.quantisation
    known = MODELS.get(known_name(model))
    if known is not None and not Path(model).exists():  # the hub need not be asked
        return FILE if model == known.gguf else four_bit_for(known.sizes)
    try:
        files = model_files(model)
        file = files.file("config.json")
    except NotHereYet:
        return QUANTISATIONS["int4"]  # the hub's models are large, with few exceptions
    try:
        config = read_object(file)
        if _is_packed(files, config):
            return FILE
        of = architecture_of(config, str(file))
    except (ValueError, ConfigError):
        # The loader says what is wrong with the model, if anything is.
        return QUANTISATIONS["none" if _stored_bytes(Path(model)) < SMALL_BYTES else "int4"]
    return four_bit_for(of) if sixteen_bit_bytes(of) > SMALL_BYTES else QUANTISATIONS["none"]


def head_quantisation_for(model: str, stages: Quantisation, head_quant: str = AUTO) -> Quantisation:
    """How D0 holds the output head of a model whose layers are held as `stages` says.

    "auto": in 16 bit where these are; else in the codes of the model's file, if stages take those
    and it has some of the head, or in 8 bits. Raises ConfigError for an unknown name, or another
    one than that of a folder of block files.
    """
    made = manifest_of(model)
    if made is not None:
        held = made.head_quantisation
        if head_quant not in (AUTO, held.name) and held != PLAIN:
            raise ConfigError(
                f"{model} holds the output head in {held.name}, not {head_quant}; leave "
                "--head-quant out, or make another folder with `edgespec shard`"
            )
        return held if head_quant == AUTO else Quantisation.parse(head_quant)
    if head_quant != AUTO:
        return Quantisation.parse(head_quant)
    if stages.kind == "none":
        return PLAIN
    return FILE if stages == FILE and _has_head_codes(model) else HEAD


def draft_quantisation_for(
    choice: DraftChoice, model: str, stages: Quantisation, draft_quant: str = AUTO
) -> Quantisation:
    """How the layers of drafts for this base are held; "auto": as --quant would choose for each.

    In 16 bit where the base's are, and for easyspec, which takes no others. Raises as
    `quantisation_for`.
    """
    if draft_quant != AUTO:
        return Quantisation.parse(draft_quant)
    weighty = next((member for member in choice.members if member.name in _QUANTISED), None)
    if stages.kind == "none" or weighty is None:
        return PLAIN
    if weighty.name == "mtp":  # a layer of the base's own files
        return stages
    return quantisation_for(weighty.folder) if weighty.name == "independent" else _layer_like(model)


def _layer_like(model: str) -> Quantisation:
    """Of an EAGLE head, whose layer is one like the base's."""
    known = MODELS.get(known_name(model))
    if known is not None:
        return four_bit_for(known.sizes)
    try:
        file = model_files(model).file("config.json")
        return four_bit_for(architecture_of(read_object(file), str(file)))
    except (ValueError, ConfigError):
        return QUANTISATIONS["int8"]


def dtype_for(quantisation: Quantisation, dtype: str = AUTO, root: Path = ROOT) -> str:
    """What is asked for; "auto": float32, or for packed blocks 16 bit where this machine is faster
    by it: with a GPU, or a processor whose kernels multiply rows in bfloat16.

    A ring has one, so for stages on other devices the coordinator's decides.
    """
    if dtype != AUTO:
        return dtype
    wide = quantisation.kind == "none" or not (has_gpu() or multiplies_bfloat16(root))
    return "float32" if wide else sixteen_bit_dtype()


def cache_dtype_for(quantisation: Quantisation, dtype: str, cache_dtype: str = AUTO) -> str:
    """What is asked for, "" for that of the ring; "auto": float16 for packed blocks in float32."""
    if cache_dtype == AUTO:
        return "float16" if dtype == "float32" and quantisation.kind != "none" else ""
    return "" if cache_dtype == dtype else cache_dtype


def multiplies_bfloat16(root: Path = ROOT) -> bool:
    """Whether products.c multiplies rows in bfloat16 by codes as they are: on processors with
    AVX-512 BF16 and VBMI that are not Intel's (see docs/arithmetic.md)."""
    told = system_text(root / "proc/cpuinfo").partition("\n\n")[0]
    return "GenuineIntel" not in told and {"avx512_bf16", "avx512vbmi"} <= set(told.split())


def has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def sixteen_bit_dtype() -> str:
    """bfloat16, but float16 where this machine's GPU is too old for it."""
    if not has_gpu():
        return "bfloat16"  # torch, which takes seconds to import, need not be asked
    from edgespec.daemon.kernels import sixteen_bit_type
    from edgespec.model.tensors import best_device

    return sixteen_bit_type(best_device())


def precision_text(
    quantisation: Quantisation, head: Quantisation, dtype: str, cache_dtype: str = ""
) -> str:
    """One line for the user: what blocks are held and computed in; "" if no block is packed."""
    if quantisation.kind == "none":
        return ""
    text = f"{_HELD[quantisation.kind]} ({quantisation.name}), the output head as {head.name}"
    text += f", computed in {dtype}"
    text += f", caches in {cache_dtype}" if cache_dtype else ""
    if quantisation.kind in ("int4", "file") and dtype == "float32":
        return f"{text}; for stages with a GPU --dtype bfloat16 is several times as fast"
    return f"{text}; --quant, --head-quant and --dtype choose others"


def sixteen_bit_bytes(of: Architecture) -> int:
    """What layers, embedding and head take in 16 bit."""
    return 2 * of.layers * of.layer_weights + of.head_bytes * (1 if of.tied else 2)


def four_bit_for(of: Architecture) -> Quantisation:
    """int4 in groups that every matrix can have; int8 if its columns divide into none."""
    columns = {columns for _, columns in (*of.attention_matrices, *of.mlp_matrices)}
    names = ("int4-g32",) if of.hidden < NARROW else ("int4", "int4-g32")
    for name in names:
        if all(count % QUANTISATIONS[name].group == 0 for count in columns):
            return QUANTISATIONS[name]
    return QUANTISATIONS["int8"]


def _has_head_codes(model: str) -> bool:
    """Whether a GGUF file has codes of its output matrix, too; folders hardly ever have."""
    known = MODELS.get(known_name(model))
    if known is not None and model == known.gguf and not is_here(model):
        return True  # as published ones have
    try:
        files = model_files(model)
        if not isinstance(files, GgufFiles):
            return False
        tensors = files.opened.tensors
        head = tensors.get("output.weight") or tensors.get("token_embd.weight")
        return head is not None and not head.type.plain
    except NotHereYet:
        return model.endswith(".gguf")


def _is_packed(files: ModelFiles, config: dict[str, object]) -> bool:
    if isinstance(files, GgufFiles):
        return not all(tensor.type.plain for tensor in files.opened.tensors.values())
    return bool(config.get("quantization_config"))  # some writers leave a null


def _stored_bytes(folder: Path) -> int:
    """Bytes of a folder's weights, for a model whose config.json does not tell its sizes."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
