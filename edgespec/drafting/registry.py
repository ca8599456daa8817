"""Registry: builds the draft source that a choice names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.drafting.base import Guesser
from edgespec.drafting.choice import DraftChoice
from edgespec.drafting.eagle.guesser import load_eagle
from edgespec.drafting.grower import TreeDraft
from edgespec.drafting.hybrid import HybridGuesser
from edgespec.drafting.independent import IndependentGuesser
from edgespec.drafting.ngram import NgramGuesser
from edgespec.drafting.ppd.format import read_prompts
from edgespec.drafting.ppd.guesser import PromptGuesser
from edgespec.model.ends import OutputHead
from edgespec.model.hub import local_folder
from edgespec.model.source import TensorSource
from edgespec.model.tokenizer import require_same_tokenizer


@dataclass(frozen=True, slots=True)
class BaseParts:
    """What a source may take of the base model, and how it shall run.

    `tokenizer`: the folder of the base's tokenizer. `source`: where the base's tensors are, those
    of its ends at least. `source_of`: opens a folder of weights, or a
    hub id, as the draft is to hold them.
    """

    tokenizer: str | Path
    source: TensorSource
    head: OutputHead
    dtype: str
    device: torch.device | str
    source_of: Callable[[str], TensorSource]


def _independent(folder: str, base: BaseParts) -> Guesser:
    require_same_tokenizer(base.tokenizer, local_folder(folder))
    return IndependentGuesser(
        base.source_of(folder), base.dtype, base.device, vocab_size=base.head.vocab_size
    )


def _eagle(folder: str, base: BaseParts) -> Guesser:
    return load_eagle(folder, "eagle", base.source, base.head, base.dtype, base.device)


def _eagle3(folder: str, base: BaseParts) -> Guesser:
    return load_eagle(folder, "eagle3", base.source, base.head, base.dtype, base.device)


def _ppd(folder: str, base: BaseParts) -> Guesser:
    return PromptGuesser(read_prompts(folder, base.head.hidden_size), base.head)


BUILDERS: Mapping[str, Callable[[str, BaseParts], Guesser]] = {
    "independent": _independent,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "ngram": lambda folder, base: NgramGuesser(),
    "ppd": _ppd,
}
"""What builds each source of drafting.choice, given the folder of its weights."""


def build_draft(
    choice: DraftChoice,
    base: BaseParts,
    seconds: Callable[[tuple[int, ...]], float] | None = None,
) -> TreeDraft | None:
    """The draft source; None if none is chosen.

    `seconds`: what the rows of forward passes cost, where times are charged and not measured.
    Raises ModelError or ConfigError for weights that do not fit.
    """
    guessers = [BUILDERS[member.name](member.folder, base) for member in choice.members]
    if not guessers:
        return None
    return TreeDraft(HybridGuesser(guessers, seconds) if len(guessers) > 1 else guessers[0])
