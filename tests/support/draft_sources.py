"""Draft sources with random weights, fed with what the base would give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support import dspark_heads
from support.dspark_heads import write_dspark
from support.eagle_heads import FORMS, write_eagle
from support.growers import SoloGrower
from support.mtp_heads import write_mtp

from edgespec.drafting.base import Guesser
from edgespec.drafting.dspark.guesser import load_dspark
from edgespec.drafting.eagle.guesser import load_eagle
from edgespec.drafting.eagle.shape import Kind
from edgespec.drafting.easyspec.guesser import EasySpecGuesser
from edgespec.drafting.easyspec.model import GroupedModel
from edgespec.drafting.mtp import MtpGuesser
from edgespec.drafting.ppd import PPDGuesser, PPDTokens
from edgespec.drafting.steps import Steps
from edgespec.model.aux_hidden import packed
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.sim.toy import VOCABULARY
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.features import NO_FEATURES, Features


class Fed(SoloGrower):
    """A head's tree, given the features of all committed tokens but the newest."""

    def __init__(self, guesser: Guesser) -> None:
        super().__init__(guesser)
        self._given: dict[int, int] = {}

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        """See TreeGrower."""
        super().fork(request, base, rows, ends)
        if base in self._given:
            self._given[request] = rows

    def refreshing(self, request: int, context: Sequence[int], *args: Any) -> Steps[DraftedTree]:
        """See TreeGrower."""
        return super().refreshing(request, context, *args[:2], self._features(request, context))

    def expanding(self, request: int, context: Sequence[int], *args: Any) -> Steps[Children]:
        """See TreeGrower."""
        return super().expanding(request, context, *args[:2], self._features(request, context))

    def _features(self, request: int, context: Sequence[int]) -> Features:
        first, end = self._given.get(request, 0), len(context) - 1
        self._given[request] = max(first, end)
        if first >= end:
            return NO_FEATURES
        layers = self.needs.aux_layers
        rows = [
            torch.randn((32, 1 + len(layers)), generator=torch.Generator().manual_seed(place))
            for place in range(first, end)
        ]
        final, *aux_hidden = torch.stack(rows).unbind(-1)
        return Features(from_torch(final), packed(aux_hidden) if layers else None, layers)


Few = torch.Tensor | None


class Chained(SoloGrower):
    """Prompt tokens' tree, given a chain below the last token whose next one is committed."""

    def __init__(self, base: Path, dtype: str = "float32") -> None:
        self._head = OutputHead(Checkpoint(base), dtype)
        super().__init__(PPDGuesser(PPDTokens(6, 2, torch.zeros(12, 32)), self._head))

    def refreshing(self, request: int, context: Sequence[int], *args: Any) -> Steps[DraftedTree]:
        """See TreeGrower."""
        return super().refreshing(request, context, *args[:2], self._chain(context))

    def expanding(self, request: int, context: Sequence[int], *args: Any) -> Steps[Children]:
        """See TreeGrower."""
        return super().expanding(request, context, *args[:2], self._chain(context))

    def _chain(self, context: Sequence[int]) -> Features:
        dice = torch.Generator().manual_seed(len(context))
        rows = from_torch(torch.randn((12, 32), generator=dice).to(self._head.dtype))
        return Features(ppd_rows=rows, anchor=len(context) - 2)


def easyspec(base: Path, dtype: str = "float32") -> SoloGrower:
    """The base as an easyspec draft."""
    source = Checkpoint(base)
    model, head = GroupedModel(source, 4, dtype), OutputHead(source, dtype)
    return SoloGrower(EasySpecGuesser(model, head, 64, VOCABULARY))


def eagle(
    form: str, scored: int, base: Path, folder: Path, dtype: str = "float32", few: Few = None
) -> SoloGrower:
    """A random head of a form, which scores so many tokens; `few`: those that it guesses alone."""
    write_eagle(folder, replace(FORMS[form], vocab=VOCABULARY, draft_vocab=scored))
    kind: Kind = "eagle3" if FORMS[form].third else "eagle"
    source = Checkpoint(base)
    return Fed(load_eagle(folder, kind, source, OutputHead(source, dtype), dtype, guessed=few))


def dspark(
    form: str, scored: int, base: Path, folder: Path, dtype: str = "float32", few: Few = None
) -> SoloGrower:
    """A random one-pass head of a form, which scores so many tokens; `few`: see `eagle`."""
    shape = dspark_heads.FORMS[form]
    taps = tuple(layer % 5 for layer in dspark_heads.TAPS)
    write_dspark(folder, replace(shape, vocab=VOCABULARY, draft_vocab=scored, taps=taps, base=5))
    source = Checkpoint(base)
    return Fed(load_dspark(folder, source, OutputHead(source, dtype), dtype, guessed=few))


def mtp(folder: Path, dtype: str = "float32", few: Few = None) -> SoloGrower:
    """The random head that a random base brings; `few`: see `eagle`."""
    write_mtp(folder, vocab_size=VOCABULARY)
    source = Checkpoint(folder)
    return Fed(MtpGuesser(source, source, OutputHead(source, dtype), dtype, guessed=few))
