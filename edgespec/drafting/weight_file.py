"""Weight files: the named tensors of a draft, read from a safetensors file or one that torch wrote,
and written as safetensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import safe_open

from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.shape import HeadShape
from edgespec.errors import ModelError
from edgespec.model.hub import ModelFiles
from edgespec.model.reading import reading
from edgespec.model.safetensors_writer import PADDING, SafetensorsWriter, Slot

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""In which heads are stored."""

_EMBEDDING, _MATRIX, _SCORED = "embed_tokens.weight", "lm_head.weight", ("d2t", "t2d")


Shape = TypeVar("Shape", HeadShape, DSparkShape, None)
HeadOf = TypeVar("HeadOf", HeadShape, DSparkShape)


@dataclass(frozen=True)
class HeadFiles(Generic[Shape]):
    """One head as read.

    `weights`: by the names of its module. `embedding` [V, hidden] and `matrix` [vocab, hidden] are
    None where the base's are borrowed. `tokens` int64 [vocab]: the base's token of each column,
    None where column v is token v; of a borrowed matrix, the rows that the head scores with.
    """

    shape: Shape
    weights: dict[str, torch.Tensor]
    embedding: torch.Tensor | None = None
    matrix: torch.Tensor | None = None
    tokens: torch.Tensor | None = None


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


def narrowed(
    files: HeadFiles[HeadOf], tokens: torch.Tensor | None, by_token: Sequence[str] = ()
) -> HeadFiles[HeadOf]:
    """That head, which guesses these tokens alone (None: all) if it does not say which it does;
    `by_token`: its weights with a row for each that it guesses."""
    if files.tokens is not None or tokens is None:
        return files
    weights = files.weights | {name: files.weights[name][tokens] for name in by_token}
    matrix = None if files.matrix is None else files.matrix[tokens]
    shape = replace(files.shape, vocab=len(tokens))
    return replace(files, shape=shape, weights=weights, matrix=matrix, tokens=tokens)


def checked_head(
    shape: HeadOf,
    stored: Mapping[str, torch.Tensor],
    head: Callable[[HeadOf], torch.nn.Module],
    kinds: str,
    file: Path,
    base_vocab: int,
) -> HeadFiles[HeadOf]:
    """A `head` of that shape by the tensors of its file; `kinds`: what messages call it.

    Raises ModelError if they are others, or do not fit a base with so many tokens.
    """
    with torch.device("meta"):
        own = {name: tuple(w.shape) for name, w in head(shape).named_parameters()}
    strange = stored.keys() - own.keys() - {_EMBEDDING, _MATRIX, *_SCORED}
    if strange:
        # Leaving a bias or norm out would compute something else than the head.
        raise ModelError(
            f"{file} holds {min(strange)!r}, which no {kinds} head that edgespec knows has; "
            "use another head for this base"
        )
    wanted = dict(own)
    if shape.own_embedding:
        wanted[_EMBEDDING] = (base_vocab, shape.hidden)
    if shape.own_head:
        wanted[_MATRIX] = (shape.vocab, shape.hidden)
    for name, size in wanted.items():
        check_tensor(name, stored.get(name), size, file)
    return HeadFiles(
        shape,
        {name: stored[name] for name in own},
        stored[_EMBEDDING] if shape.own_embedding else None,
        stored[_MATRIX] if shape.own_head else None,
        scored_tokens(shape.vocab, stored.get("d2t"), file, base_vocab),
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
