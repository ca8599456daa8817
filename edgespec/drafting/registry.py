"""Registry: builds the draft source that a choice names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from edgespec.config import Quantisation
from edgespec.drafting.base import Guesser
from edgespec.drafting.choice import DraftChoice
from edgespec.drafting.dspark.guesser import load_dspark
from edgespec.drafting.eagle.guesser import PLAIN, load_eagle
from edgespec.drafting.easyspec.guesser import EasySpecGuesser
from edgespec.drafting.easyspec.model import USUAL_SIZE, GroupedModel, layer_groups
from edgespec.drafting.grower import TreeGrower
from edgespec.drafting.hybrid import HybridGuesser
from edgespec.drafting.independent import IndependentGuesser
from edgespec.drafting.mtp import MtpGuesser, has_mtp
from edgespec.drafting.ngram import NgramGuesser
from edgespec.drafting.own import own_guesser
from edgespec.drafting.ppd import PPDGuesser, read_ppd_tokens
from edgespec.drafting.vocabulary import Counts, guessed_tokens
from edgespec.model.ends import OutputHead
from edgespec.model.hub import local_folder
from edgespec.model.source import TensorSource
from edgespec.model.sources import open_source
from edgespec.model.tokenizer import require_same_tokenizer

log = logging.getLogger(__name__)

Tokens = torch.Tensor | None
HeadSettings = tuple[
    TensorSource, OutputHead, str, torch.device | str, Quantisation, Quantisation, Tokens
]


@dataclass(frozen=True, slots=True)
class BaseParts:
    """What a source may take of the base model, and how it runs.

    `tokenizer`: the folder of the base's tokenizer. `source`: where the base's tensors are, those
    of its ends at least. `head`: None if it is on the last stage. `quantisation`: how layers of the
    draft are held, `head_quantisation`: how its own output head is. `counts`: how often the base's
    tokens came in its answers, as far as is known.
    """

    tokenizer: str | Path
    source: TensorSource
    head: OutputHead | None
    dtype: str
    device: torch.device | str
    quantisation: Quantisation = PLAIN
    head_quantisation: Quantisation = PLAIN
    counts: Counts | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.source.config.vocab_size)

    @property
    def guessed(self) -> Tokens:
        """The tokens that a head guesses, if its files do not say which."""
        return guessed_tokens(self.vocab_size, self.counts)

    def own_head(self) -> OutputHead:
        """The base's head, for a source that guesses with it."""
        assert self.head is not None, "see DraftChoice.check_head"
        return self.head

    def draft(self, folder: str) -> TensorSource:
        """A draft model, as its layers are to be held."""
        return open_source(folder, self.quantisation)

    def draft_ends(self, folder: str) -> TensorSource:
        """A draft model, as its output head is to be held."""
        return open_source(folder, self.head_quantisation)

    @property
    def for_heads(self) -> HeadSettings:
        """What the loader of a head takes behind its folder: whose it is, and how it is held."""
        held = self.quantisation, self.head_quantisation
        return self.source, self.own_head(), self.dtype, self.device, *held, self.guessed


def _independent(folder: str, base: BaseParts) -> Guesser:
    require_same_tokenizer(base.tokenizer, local_folder(folder))
    return IndependentGuesser(
        base.draft(folder),
        base.dtype,
        base.device,
        vocab_size=base.vocab_size,
        ends=base.draft_ends(folder),
    )


def _easyspec(folder: str, base: BaseParts) -> Guesser:
    """Layers in groups, if there are any; else one after the other."""
    require_same_tokenizer(base.tokenizer, local_folder(folder))
    source = base.draft(folder)
    if len(layer_groups(source.layers)) == source.layers:
        log.info("%s has %d layers, too few for groups: drafting plainly", folder, source.layers)
        return _independent(folder, base)
    model = GroupedModel(source, USUAL_SIZE, base.dtype, base.device)
    head = OutputHead(base.draft_ends(folder), base.dtype, base.device)
    limit = int(source.config.max_position_embeddings)
    return EasySpecGuesser(model, head, limit, base.vocab_size)


def _ppd(folder: str, base: BaseParts) -> Guesser:
    head = base.own_head()
    return PPDGuesser(read_ppd_tokens(folder, head.hidden_size), head)


def _mtp(folder: str, base: BaseParts) -> Guesser:
    layer = base.draft(str(base.source.path)) if has_mtp(base.source) else base.source
    held = base.own_head(), base.dtype, base.device, base.head_quantisation, base.guessed
    return MtpGuesser(base.source, layer, *held)


BUILDERS: Mapping[str, Callable[[str, BaseParts], Guesser]] = {
    "independent": _independent,
    "eagle": lambda folder, base: load_eagle(folder, "eagle", *base.for_heads),
    "eagle3": lambda folder, base: load_eagle(folder, "eagle3", *base.for_heads),
    "dspark": lambda folder, base: load_dspark(folder, *base.for_heads),
    "mtp": _mtp,
    "ngram": lambda folder, base: NgramGuesser(),
    "ppd": _ppd,
    "easyspec": _easyspec,
}
"""What builds each source of drafting.choice, given the folder of its weights."""


def build_draft(
    choice: DraftChoice,
    base: BaseParts,
    builders: Mapping[str, Callable[[str, BaseParts], Guesser]] = BUILDERS,
) -> TreeGrower | None:
    """The draft source; None if none is chosen.

    `builders`: what builds each source.
    Raises ModelError or ConfigError for weights that do not fit.
    """
    guessers = [
        own_guesser(one.name, one.folder, base)
        if one.is_own
        else builders[one.name](one.folder, base)
        for one in choice.members
    ]
    if not guessers:
        return None
    return TreeGrower(HybridGuesser(guessers) if len(guessers) > 1 else guessers[0])
