"""Weight files: the named tensors of a draft, from a safetensors file or one that torch wrote."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from edgespec.errors import ModelError
from edgespec.model.hub import ModelFiles
from edgespec.model.safetensors_writer import PADDING


def read_tensors(
    files: ModelFiles, safe: str, pickled: str, mapped: bool = True
) -> tuple[dict[str, torch.Tensor], Path]:
    """The tensors of the file `safe`, or else of `pickled`, and the file. Raises ModelError.

    `mapped`: a pickled file may be mapped; torch's oldest files cannot be.
    """
    if files.offers(safe):
        file = files.file(safe)
        try:
            with safe_open(str(file), framework="pt", device="cpu") as tensors:
                names = [n for n in tensors.keys() if not n.startswith(PADDING)]  # noqa: SIM118
                return {name: tensors.get_tensor(name) for name in names}, file
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {file} ({error}); download it again") from error
    if not files.offers(pickled):
        raise ModelError(f"{files.path} holds neither {safe} nor {pickled}; download it again")
    file = files.file(pickled)
    try:  # by the reader that makes tensors and runs no code
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # torch raises many kinds for a file that it will not read
        raise ModelError(
            f"cannot read {file} as plain tensors ({error}); use one that comes as {safe}"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in content.items()
    ):
        raise ModelError(f"{file} does not hold named tensors alone; use one that comes as {safe}")
    return content, file
