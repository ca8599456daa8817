"""Checkpoint folders in Hugging Face's format, opened lazily: one tensor is read at a time."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

from edgespec.errors import ModelError

SUPPORTED = ("llama", "mistral", "qwen2")
"""Values of `model_type` that are accepted; Llama is the one whose behaviour is promised."""

_FULL_ROPE = ("default", "linear", "llama3", "yarn")
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_SAMPLE = 256  # bytes of each tensor that enter the fingerprint
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Fields of config.json that say who wrote the file, not what the model computes.
_WRITERS_FIELDS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


class Checkpoint:
    """One model folder: its configuration, and its tensors on request.

    Opening it reads config.json and the index or header, no weights. Raises ModelError for a
    folder that cannot be used, saying where and what to do.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        settings = _read_config(self.path)
        try:
            self.config: PretrainedConfig = AutoConfig.from_pretrained(
                str(self.path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # transformers raises many kinds for a value it cannot use
            raise ModelError(
                f"cannot use {self.path / 'config.json'} ({error}); download the model again"
            ) from error
        _check_config(self.path, settings, self.config)
        self._file_of = _find_tensors(self.path)

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors of the checkpoint."""
        return frozenset(self._file_of)

    @property
    def layers(self) -> int:
        """Decoder layers of the model."""
        return int(self.config.num_hidden_layers)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one float tensor, as stored, on the CPU.

        It is a view of the mapped file: whoever keeps it must copy it. Raises ModelError if the
        checkpoint has no such tensor, its file is missing or damaged, or it is not of floats.
        """
        if name not in self._file_of:
            raise ModelError(
                f"the model in {self.path} has no tensor {name!r}: its files and its config.json "
                "do not belong together; download the model again"
            )
        file = self.path / self._file_of[name]
        try:
            with safe_open(str(file), framework="pt", device="cpu") as tensors:
                tensor: torch.Tensor = tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"cannot read {name!r} from {file} ({error}); download the model again"
            ) from error
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{name!r} in {file} is stored as {tensor.dtype}, which is already quantised; "
                "use the model's original float16, bfloat16 or float32 release"
            )
        return tensor


def fingerprint(path: str | Path) -> str:
    """A hash (64 hex digits) that tells models apart, the same wherever the folder lies.

    Covers what the configuration computes, the names, dtypes and shapes of all tensors and a few
    bytes from the middle of each (two fine-tunes of one model differ in nothing else), but not how
    they are spread over files. Reads some hundred bytes a tensor, whatever the model's size.
    Raises ModelError like Checkpoint.
    """
    folder = Path(path)
    config = {k: v for k, v in _read_config(folder).items() if k not in _WRITERS_FIELDS}
    tensors: dict[str, list[Any]] = {}
    for file in sorted(set(_find_tensors(folder).values())):
        start, header = _read_header(folder / file)
        with open(folder / file, "rb") as weights:
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                weights.seek(start + begin + max(0, end - begin - _SAMPLE) // 2)
                sample = weights.read(min(_SAMPLE, end - begin))
                tensors[name] = [entry["dtype"], entry["shape"], sample.hex()]
    canonical = json.dumps([config, tensors], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model that edgespec can run."""
    if not folder.is_dir():
        raise ModelError(
            f"there is no model folder {folder}; give a folder with config.json, a tokenizer and "
            "*.safetensors files, such as `huggingface-cli download MODEL --local-dir DIR` makes"
        )
    config = _read_json(folder / "config.json")
    kind = config.get("model_type")
    if kind not in SUPPORTED:
        raise ModelError(
            f"the model in {folder} is of type {kind!r}, which edgespec does not run; it runs "
            f"{', '.join(SUPPORTED)}"
        )
    if config.get("quantization_config"):
        raise ModelError(
            f"the model in {folder} is already quantised (quantization_config in config.json); "
            "use its original float16, bfloat16 or float32 release"
        )
    return config


def _check_config(folder: Path, settings: dict[str, Any], config: PretrainedConfig) -> None:
    angles = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope = angles.get("rope_type", "default")
    if rope not in _FULL_ROPE:
        # Dynamic kinds turn keys by an angle that depends on the sequence's length so far, so a
        # cached key would not be what one machine computes.
        raise ModelError(
            f"the model in {folder} uses rotary embeddings of type {rope!r}, which edgespec does "
            f"not run; it runs {', '.join(_FULL_ROPE)}"
        )
    windowed = settings.get("sliding_window") and settings.get("use_sliding_window", True)
    if windowed or set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ModelError(
            f"the model in {folder} uses sliding-window attention, which edgespec does not "
            "compute; use a model with full attention in all layers"
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{file} is missing: {file.parent} is not a complete model folder; download it again"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {file} ({error}); download the model again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object; download the model again")
    return content


def _find_tensors(folder: Path) -> dict[str, str]:
    """Tensor name → file name in `folder`."""
    if (folder / _SINGLE_FILE).is_file():
        return dict.fromkeys(_read_header(folder / _SINGLE_FILE)[1], _SINGLE_FILE)
    if (folder / _INDEX_FILE).is_file():
        listed = _read_json(folder / _INDEX_FILE).get("weight_map")
        if not isinstance(listed, dict) or not all(
            isinstance(file, str) and file == os.path.basename(file) for file in listed.values()
        ):
            raise ModelError(
                f"{folder / _INDEX_FILE} has no weight_map of plain file names; "
                "download the model again"
            )
        return listed
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise ModelError(
            f"{folder} holds pickled weights (*.bin, *.pt) alone, which edgespec never opens as "
            "they can run code; download the model's *.safetensors files"
        )
    raise ModelError(
        f"{folder} holds neither {_SINGLE_FILE} nor {_INDEX_FILE}; download the model again"
    )


def _read_header(file: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Byte at which a safetensors file's data starts; name → dtype, shape, data_offsets."""
    try:
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
    except FileNotFoundError:
        raise ModelError(
            f"{file} is missing: {file.parent} is not a complete model folder; download it again"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read {file} ({error}); download the model again") from error
    return 8 + length, header
