"""Stored names: where a checkpoint has the tensors that the layers of its text model ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from edgespec.model.model_config import ModelConfig

TEXT_PART = {
    r"^(model\.language_model|language_model\.model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""How names begin within a model that reads images too, and what a text model has for that."""
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?")


@dataclass(frozen=True)
class TensorPlace:
    """One tensor: the file that has it, and its name there.

    Where a tensor there holds `experts` of them, [experts, in, out] or, of biases, [experts, out],
    this is number `expert`, and of its columns from `first` on one in `every`.
    """

    file: str
    name: str
    experts: int = 0
    expert: int = 0
    first: int = 0
    every: int = 1

    def read(self, tensors: Any) -> torch.Tensor:
        """The tensor of the opened `file`, a view of what is mapped unless it is an expert's.

        Raises what safetensors does, and ValueError for another number of experts.
        """
        if not self.experts:
            whole: torch.Tensor = tensors.get_tensor(self.name)
            return whole
        fused = tensors.get_slice(self.name)
        held = fused.get_shape()[0]
        if held != self.experts:
            raise ValueError(f"it holds {held} experts, config.json says {self.experts}")
        one: torch.Tensor = fused[self.expert][..., self.first :: self.every]
        return (one.mT if one.dim() > 1 else one).contiguous()


def places(files: Mapping[str, str], config: ModelConfig) -> dict[str, TensorPlace]:
    """Where each tensor of a model is, by the name that a block asks for it by.

    `files`: names of all stored tensors, and the file of each.
    """
    found: dict[str, TensorPlace] = {}
    for stored, file in files.items():
        name = stored
        for inside, plain in TEXT_PART.items():
            name = re.sub(inside, plain, name)
        fused = _FUSED.fullmatch(name) if config.model_type == "gpt_oss" else None
        if fused is None:
            found[name] = TensorPlace(file, stored)
        else:
            experts = int(config.num_local_experts)
            found.update(_experts(fused, file, stored, experts))
    return found


def _experts(
    fused: re.Match[str], file: str, stored: str, experts: int
) -> Iterator[tuple[str, TensorPlace]]:
    """The places of single experts. Columns of gate and up take turns."""
    owner, matrix, bias = fused.groups()
    leaf = "bias" if bias else "weight"
    parts = ["gate_proj", "up_proj"] if matrix == "gate_up_proj" else [matrix]
    for first, part in enumerate(parts):
        for expert in range(experts):
            place = TensorPlace(file, stored, experts, expert, first, len(parts))
            yield f"{owner}.{expert}.{part}.{leaf}", place
