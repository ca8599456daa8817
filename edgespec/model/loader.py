"""Checkpoints in Hugging Face's format, opened lazily: one tensor is read at a time, from where its
files have what the layers of the text model ask for."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from edgespec.config import Quantisation
from edgespec.errors import ModelError
from edgespec.model.families import check_config, check_settings, key_owners, layer_embedding
from edgespec.model.gguf.files import GgufFiles
from edgespec.model.gguf.reader import tensor_samples
from edgespec.model.hub import HubFiles, ModelFiles, model_files
from edgespec.model.model_config import ModelConfig
from edgespec.model.reading import read_object, reading
from edgespec.planning.architecture import EXPERTS
from edgespec.planning.text_part import (
    CONVOLVING,
    DELTA,
    GROUPED,
    LATENT,
    SHARING,
    text_settings,
)

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_SAMPLE = 256  # bytes of each tensor that enter the fingerprint
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Fields of config.json that name the writer of the file, not what the model computes.
_WRITERS_FIELDS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


class Checkpoint:
    """One model, a folder or a hub id: its configuration, and its tensors on request.

    Opening it reads config.json and the index or header, no weights. A hub's file of weights is
    downloaded when the first of its tensors is asked for. Raises ModelError for a model that
    cannot be used, saying where and what to do.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = model_files(path)
        self.config = open_config(self._files.file("config.json"))
        self.layers = int(self.config.num_hidden_layers)
        self.quantisation = Quantisation()
        self.mapped = False
        self._listed = _read_index(self._files)
        if not isinstance(self._files, HubFiles):
            _ = self._places  # damaged files of a folder are found at once

    @cached_property
    def _places(self) -> dict[str, TensorPlace]:
        listed = self._listed
        if listed is None:
            header = _read_header(self._files.file(_SINGLE_FILE))[1]
            listed = dict.fromkeys(header, _SINGLE_FILE)
        return places(listed, self.config)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    def form(self, name: str) -> Quantisation:
        return self.quantisation

    def tensor(self, name: str) -> torch.Tensor:
        """See TensorSource; it is a view of the mapped file: copy it to keep it."""
        tensor = self.stored([name])[name]
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{name!r} in {self.path} is stored as {tensor.dtype}, which is already quantised; "
                "use the model's original float16, bfloat16 or float32 release"
            )
        return tensor

    def stored(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors of any dtype, as `tensor` gives them; a file that has several is opened once."""
        opened: dict[str, Any] = {}
        tensors = {}
        for name in names:
            if name not in self._places:
                raise ModelError(
                    f"the model in {self.path} has no tensor {name!r}: its files and its "
                    "config.json do not belong together; download the model again"
                )
            place = self._places[name]
            file = self._files.file(place.file)
            with reading(f"{name!r} from {file}"):
                if place.file not in opened:
                    opened[place.file] = safe_open(str(file), framework="pt", device="cpu")
                tensors[name] = place.read(opened[place.file])
        return tensors

    def table(self, name: str) -> tuple[str, torch.Tensor]:
        return "", self.tensor(name)

    def packed(self, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        """Raises ModelError: all tensors of a checkpoint are plain."""
        raise ModelError(f"{name!r} in {self.path} is not packed")


def fingerprint(path: str | Path) -> str:
    """A hash (64 hex digits) that tells models apart, the same wherever the folder lies.

    Covers what the configuration computes, the names, dtypes and shapes of all tensors and a few
    bytes from the middle of each (two fine-tunes of one model differ in nothing else), but not how
    they are spread over files. Reads some hundred bytes a tensor, whatever the model's size.
    A hub id's covers the configuration and the hub's own hash of the revision, as its weights may
    not be here: it is another one than that of a folder with the same files.
    Raises ModelError like Checkpoint.
    """
    files = model_files(path)
    file = files.file("config.json")
    settings = _runnable(read_object(file), file, files.path)
    config = {k: v for k, v in settings.items() if k not in _WRITERS_FIELDS}
    if isinstance(files, HubFiles):
        return _hash([config, files.commit])
    if isinstance(files, GgufFiles):
        return _hash([config, tensor_samples(files.opened)])
    tensors: dict[str, list[Any]] = {}
    listed = _read_index(files)
    for file in map(files.file, [_SINGLE_FILE] if listed is None else sorted(set(listed.values()))):
        start, header = _read_header(file)
        with open(file, "rb") as weights:
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                weights.seek(start + begin + max(0, end - begin - _SAMPLE) // 2)
                sample = weights.read(min(_SAMPLE, end - begin))
                tensors[name] = [entry["dtype"], entry["shape"], sample.hex()]
    return _hash([config, tensors])


def open_config(file: Path, model: Path | None = None) -> ModelConfig:
    """The configuration in a config.json. `model`: what messages call it, if not by its folder.

    Raises ModelError if it is missing, damaged, or of a model that edgespec does not run.
    """
    model = model or file.parent
    written = read_object(file)
    settings = _runnable(written, file, model)
    if written["model_type"] == "mistral" and "layer_types" in written:
        settings["model_type"] = "ministral"  # as transformers takes it
    with reading(file):  # msgspec has an error of its own for values that cannot be used
        config = ModelConfig(settings)
        check_config(model, settings, config)
    return config


def _hash(content: list[Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _runnable(written: dict[str, Any], file: Path, model: Path) -> dict[str, Any]:
    """The settings in a config.json of a model that edgespec can run, or of its text part."""
    settings = text_settings(written)
    with reading(file):
        check_settings(model, settings)
    return settings


def _read_index(files: ModelFiles) -> dict[str, str] | None:
    """Tensor name → file name, or None where one file holds them all.

    Raises ModelError if there are no weights that can be read.
    """
    if files.present(_SINGLE_FILE):
        return None
    index = files.optional(_INDEX_FILE)
    if index is not None:
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(
            isinstance(file, str) and file == os.path.basename(file) for file in listed.values()
        ):
            raise ModelError(
                f"{index} has no weight_map of plain file names; download the model again"
            )
        return listed
    if files.offers(_SINGLE_FILE):
        return None
    if any(files.offers(name) for name in _PICKLED):
        raise ModelError(
            f"{files.path} holds pickled weights (*.bin, *.pt) alone, which edgespec never opens "
            "as they can run code; download the model's *.safetensors files, or choose a model "
            "that has them"
        )
    raise ModelError(
        f"{files.path} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; download the model again"
    )


def _read_header(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Byte at which a safetensors file's data starts; name → dtype, shape, data_offsets."""
    with reading(file):
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("its header is damaged")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        expected = (
            8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        )
        if size != expected:
            raise ValueError(f"it has {size} bytes, its header says {expected}")
        with safe_open(str(file), framework="pt", device="cpu"):
            pass  # it checks the types of all values, and that tensors lie one after the other
    return 8 + length, header


TEXT_PART = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""How names begin within a model that reads images too, and what a text model has for that."""
_MIXTRAL = {
    r"\.block_sparse_moe\.": ".mlp.",
    r"(\.experts\.\d+\.)w1\.": r"\1gate_proj.",
    r"(\.experts\.\d+\.)w2\.": r"\1down_proj.",
    r"(\.experts\.\d+\.)w3\.": r"\1up_proj.",
}
"""Parts of names in Mixtral's folders, and what they are in others."""
_LFM2 = {
    r"^model\.embedding_norm\.": "model.norm.",
    r"\.operator_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.self_attn\.([qk])_layernorm\.": r".self_attn.\1_norm.",
    r"\.feed_forward\.(.*)w1\.": r".mlp.\1gate_proj.",
    r"\.feed_forward\.(.*)w2\.": r".mlp.\1down_proj.",
    r"\.feed_forward\.(.*)w3\.": r".mlp.\1up_proj.",
    r"\.feed_forward\.": ".mlp.",
}
"""The same in LFM2's."""
_GRANITE = {
    r"\.shared_mlp\.input_linear\.": ".mlp.gate_up_proj.",
    r"\.shared_mlp\.output_linear\.": ".mlp.down_proj.",
    r"\.block_sparse_moe\.router\.(layer\.)?": ".mlp.gate.",
    r"\.block_sparse_moe\.input_linear\.weight$": ".mlp.experts.gate_up_proj",
    r"\.block_sparse_moe\.output_linear\.weight$": ".mlp.experts.down_proj",
    r"\.block_sparse_moe\.experts\.": ".mlp.experts.",
}
"""The same in Granite 4's."""
_FALCON = {
    r"^model\.final_layernorm\.": "model.norm.",
    r"\.pre_ff_layernorm\.": ".post_attention_layernorm.",
    r"\.feed_forward\.": ".mlp.",
}
"""The same in Falcon-H1's."""
_NEMOTRON = {
    r"^backbone\.": "model.",
    r"^model\.embeddings\.": "model.embed_tokens.",
    r"^model\.norm_f\.": "model.norm.",
    r"^(model\.layers\.\d+)\.norm\.": r"\1.input_layernorm.",
    r"\.mixer\.([qkvo]_proj)\.": r".self_attn.\1.",
    r"\.mixer\.(up_proj|down_proj)\.": r".mlp.\1.",
    r"\.mixer\.(gate|experts|shared_experts)\.": r".mlp.\1.",
    r"\.mixer\.": ".mamba.",
}
"""The same in Nemotron-H's, and see _SHARED."""
_MTP = {
    r"^mtp\.layers\.0\.": "",
    r"^mtp\.fc\.": "eh_proj.",
    r"^mtp\.pre_fc_norm_embedding\.": "enorm.",
    r"^mtp\.pre_fc_norm_hidden\.": "hnorm.",
    r"^mtp\.norm\.": "shared_head.norm.",
}
"""How names begin in the head of Qwen 3.5 that guesses, and what they are in a layer behind the
last one, where others have it."""
_SHARED = {
    r"\.mlp\.shared_(experts?|mlp)\.": ".mlp.",
    r"\.mlp\.(gate\.)?(moe_statics\.)?e_score_correction_bias$": ".mlp.expert_bias",
}
"""The same where an MLP is beside the experts."""
_HUNYUAN = _SHARED | {
    r"\.self_attn\.query_layernorm\.": ".self_attn.q_norm.",
    r"\.self_attn\.key_layernorm\.": ".self_attn.k_norm.",
    r"\.mlp\.gate\.wg\.": ".mlp.gate.",
}
"""The same in Hunyuan's."""
_GLM4 = {
    r"\.post_attention_layernorm\.": ".pre_feedforward_layernorm.",
    r"\.post_self_attn_layernorm\.": ".post_attention_layernorm.",
    r"\.post_mlp_layernorm\.": ".post_feedforward_layernorm.",
}
"""The same in GLM-4's."""
_NAMES = {
    **dict.fromkeys(CONVOLVING, _LFM2),
    "granitemoehybrid": _GRANITE,
    "falcon_h1": _FALCON,
    "nemotron_h": _NEMOTRON | _SHARED,
    "mixtral": _MIXTRAL,
    "glm4": _GLM4,
    "gpt_oss": {r"\.mlp\.router\.": ".mlp.gate."},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), _HUNYUAN),
    **dict.fromkeys(("ernie4_5_moe", *SHARING, *GROUPED), _SHARED),
}
_TURNED = ("gemma4_text", "granitemoehybrid", "qwen3_5_moe_text")
_WITH_FUSED = ("gpt_oss", "qwen3_moe", "lfm2_moe", *_TURNED)
"""Families of which some folders have one tensor for all experts of a layer, and those of them that
have it turned."""
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(bias|blocks|scales))?")
_OF_ALL_LAYERS = re.compile(
    r"model\.(embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm)\.weight"
)
"""What Gemma 4 has for all layers in one tensor: columns, rows, or the same for each."""
_BY_HEAD = re.compile(r"(model\.layers\.\d+\.self_attn\.)kv_b_proj\.weight")
"""What models with latents have for all heads in one matrix: of each the rows that make keys, then
those that make values."""
_UNREAD = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.\w+")
"""What is stored of a layer that reads the keys of another, and not read."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor: the file that has it, and its name there.

    Where a tensor there holds `experts` of them, [experts, in, out] or, of biases, [experts, out],
    this is number `expert`, and of its outputs those of `part`. Packed ones are `turned`: [experts,
    out, ...]. `cut`: of a tensor for all layers, or all heads, what this one has, a view of it;
    `mirrored`: its columns are rows.
    """

    file: str
    name: str
    experts: int = 0
    expert: int = 0
    part: slice | None = None
    turned: bool = False
    cut: tuple[slice | int, ...] = ()
    mirrored: bool = False

    def read(self, tensors: Any) -> torch.Tensor:
        """The tensor of the opened `file`, a view of what is mapped unless it is an expert's.

        Raises what safetensors does, and ValueError for another number of experts.
        """
        if not self.experts:
            return self.part_of(tensors.get_tensor(self.name))
        fused = tensors.get_slice(self.name)
        held = fused.get_shape()[0]
        if held != self.experts:
            raise ValueError(f"it holds {held} experts, config.json says {self.experts}")
        part = self.part or slice(None)
        if self.turned:
            rows: torch.Tensor = fused[self.expert][part]
            return rows.contiguous()
        one: torch.Tensor = fused[self.expert][..., part]
        return (one.mT if one.dim() > 1 else one).contiguous()

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """What is its own of a tensor for all layers, or all heads."""
        own = whole[self.cut] if self.cut else whole
        return own.T.contiguous() if self.mirrored else own


def places(files: Mapping[str, str], config: ModelConfig) -> dict[str, TensorPlace]:
    """Where each tensor of a model is, by the name that a block asks for it by.

    `files`: names of all stored tensors, and the file of each.
    """
    found: dict[str, TensorPlace] = {}
    kind = config.model_type
    packed = {stored.rpartition(".")[0] for stored in files if not stored.endswith(".weight")}
    names = TEXT_PART | _NAMES.get(kind, {})
    if kind in DELTA:
        behind = f"model.layers.{config.num_hidden_layers}."
        names = {inside: behind + plain for inside, plain in _MTP.items()} | names
    for stored, file in files.items():
        name = stored
        for inside, plain in names.items():
            name = re.sub(inside, plain, name)
        fused = _FUSED.fullmatch(name) if kind in _WITH_FUSED else None
        shared = _OF_ALL_LAYERS.fullmatch(name)
        of_heads = _BY_HEAD.fullmatch(name) if kind in LATENT else None
        if of_heads is not None and stored.removesuffix(".weight") not in packed:
            found.update(_by_head(of_heads[1], TensorPlace(file, stored), config))
        elif shared is not None:
            found.update(_by_layer(shared[1], TensorPlace(file, stored), config))
        elif fused is None:
            flat = name.endswith(".expert_bias") and kind == "ernie4_5_moe"  # its only row
            found[name] = TensorPlace(file, stored, cut=(0,) if flat else ())
        else:
            found.update(_experts(fused, file, stored, config))
    owners = key_owners(config)
    unread = [n for n in found if (m := _UNREAD.fullmatch(n)) and int(m[1]) in owners]
    for name in unread:
        del found[name]
    return found


def _by_head(
    prefix: str, whole: TensorPlace, config: ModelConfig
) -> Iterator[tuple[str, TensorPlace]]:
    """The places of the two matrices that each head has (see model.latent)."""
    keys, values = int(config.qk_nope_head_dim), int(config.v_head_dim)
    for head in range(int(config.num_attention_heads)):
        first = head * (keys + values)
        cut = (slice(first, first + keys),)
        yield f"{prefix}k_b.{head}.weight", replace(whole, cut=cut, mirrored=True)
        cut = (slice(first + keys, first + keys + values),)
        yield f"{prefix}v_b.{head}.weight", replace(whole, cut=cut)


def _by_layer(
    kind: str, whole: TensorPlace, config: ModelConfig
) -> Iterator[tuple[str, TensorPlace]]:
    """The places of what each layer has of a tensor for all."""
    width = layer_embedding(config)
    for layer in range(int(config.num_hidden_layers)):
        own, every = slice(layer * width, (layer + 1) * width), slice(None)
        cut = {"embed_tokens_per_layer": (every, own), "per_layer_model_projection": (own,)}
        name = f"model.layers.{layer}.{kind}.weight"
        yield name, replace(whole, cut=cut.get(kind, ()))


def _experts(
    fused: re.Match[str], file: str, stored: str, config: ModelConfig
) -> Iterator[tuple[str, TensorPlace]]:
    """The places of single experts. Outputs of gate and up take turns in gpt-oss."""
    owner, matrix, leaf = fused.groups()
    turned = leaf in ("blocks", "scales") or config.model_type in _TURNED
    parts: dict[str, slice | None] = {matrix: None}
    if matrix == "gate_up_proj" and config.model_type == "gpt_oss":
        parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    elif matrix == "gate_up_proj":
        granite = config.model_type == "granitemoehybrid"
        half = int(config.intermediate_size if granite else config.moe_intermediate_size)
        parts = {"gate_proj": slice(0, half), "up_proj": slice(half, None)}
    experts = int(getattr(config, EXPERTS.get(config.model_type, "num_experts")))
    for name, part in parts.items():
        for expert in range(experts):
            place = TensorPlace(file, stored, experts, expert, part, turned)
            yield f"{owner}.{expert}.{name}.{leaf or 'weight'}", place
