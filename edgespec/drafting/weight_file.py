"""Weight files: the named tensors of a draft, read from a safetensors file or one that torch wrote,
and written as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from edgespec.errors import ModelError
from edgespec.model.hub import ModelFiles
from edgespec.model.reading import reading
from edgespec.model.safetensors_writer import PADDING, SafetensorsWriter, Slot

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""In which heads are stored."""


def read_tensors(
    files: ModelFiles, safe: str, pickled: str, mapped: bool = True
) -> tuple[dict[str, torch.Tensor], Path]:
    """The tensors of the file `safe`, or else of `pickled`, and the file. Raises ModelError.

    `mapped`: a pickled file may be mapped; torch's oldest files cannot be.
    """
    if files.offers(safe):
        file = files.file(safe)
        with (
            reading(file, "download it again"),
            safe_open(str(file), framework="pt", device="cpu") as tensors,
        ):
            names = [n for n in tensors.keys() if not n.startswith(PADDING)]  # noqa: SIM118
            return {name: tensors.get_tensor(name) for name in names}, file
    if not files.offers(pickled):
        raise ModelError(f"{files.path} holds neither {safe} nor {pickled}; download it again")
    file = files.file(pickled)
    with reading(f"{file} as plain tensors", f"use one that comes as {safe}"):
        # By the reader that makes tensors and runs no code.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in content.items()
    ):
        raise ModelError(f"{file} does not hold named tensors alone; use one that comes as {safe}")
    return content, file


def write_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write the file, whole or not at all. Raises OSError as writing does."""
    slots = [Slot(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    with SafetensorsWriter(slots, {"format": "pt"}).into(file) as opened:
        for name, tensor in tensors.items():
            opened.append(name, tensor)


def check_tensor(name: str, tensor: torch.Tensor | None, size: tuple[int, ...], file: Path) -> None:
    """Raise ModelError if a head's file lacks this tensor, or has it in another size or dtype."""
    if tensor is None:
        raise ModelError(f"{file} lacks the tensor {name!r}; download the head again")
    if tuple(tensor.shape) != size or tensor.dtype not in FLOATS:
        raise ModelError(
            f"{name!r} in {file} is {tensor.dtype}{list(tensor.shape)}, this base needs floats "
            f"{list(size)}: it is a head for another base, or its config.json is of another head; "
            "use the one that was trained for this base"
        )


def scored_tokens(
    vocab: int, offsets: torch.Tensor | None, file: Path, base_vocab: int
) -> torch.Tensor | None:
    """The base's token of each of `vocab` columns, int64: its number plus the file's offset `d2t`;
    None where column v is token v. Raises ModelError for offsets that are missing, or wrong."""
    if offsets is None:
        if vocab != base_vocab:
            raise ModelError(
                f"{file} scores {vocab} tokens, the base has {base_vocab}, and no tensor "
                "'d2t' says which ones they are; use the head that was trained for this base"
            )
        return None
    whole = offsets.dtype in (torch.int64, torch.int32) and offsets.shape == (vocab,)
    tokens = torch.arange(vocab) + offsets.long() if whole else offsets
    if not whole or int(tokens.min()) < 0 or int(tokens.max()) >= base_vocab:
        raise ModelError(
            f"'d2t' in {file} names tokens outside the base's vocabulary of {base_vocab}; use the "
            "head that was trained for this base"
        )
    if len(tokens.unique()) != len(tokens):
        raise ModelError(f"'d2t' in {file} names a token twice; download the head again")
    return tokens


def scored_tensors(tokens: torch.Tensor | None, base_vocab: int) -> dict[str, torch.Tensor]:
    """The tensors that say which tokens, int64 [vocab], a head scores (see scored_tokens): `d2t`,
    and `t2d` bool [base_vocab], which of the base's they are. None for all of them."""
    if tokens is None:
        return {}
    chosen = tokens.cpu()
    known = torch.zeros(base_vocab, dtype=torch.bool).index_fill_(0, chosen, True)
    return {"d2t": chosen - torch.arange(len(chosen)), "t2d": known}
