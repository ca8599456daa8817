"""DSpark guesser: a block of positions in one pass; what follows a path by its last token, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from edgespec.config import Quantisation
from edgespec.drafting.base import TokenPath
from edgespec.drafting.dspark.format import read_head
from edgespec.drafting.dspark.head import MARKOV, DSparkHead, rows_of
from edgespec.drafting.dspark.rows import BlockPasses, BlockRows, HeadRows, SlotLogits, TreeRows
from edgespec.drafting.dspark.shape import DSparkShape
from edgespec.drafting.eagle.guesser import PLAIN
from edgespec.drafting.held_head import HeadGuesser, HeadRequest, filled
from edgespec.drafting.steps import Steps, call
from edgespec.drafting.weight_file import HeadFiles, narrowed
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource
from edgespec.tree.drafted import Children
from edgespec.types.features import Features

NAME = "dspark"


@dataclass(slots=True)
class _BlockRequest(HeadRequest):
    """One request, and its committed rows."""

    rows: HeadRows


class _Asked(NamedTuple):
    """Paths of a request whose `width` best children are to be found."""

    request: int
    paths: Sequence[TokenPath]
    width: int


class DSparkGuesser(HeadGuesser[_BlockRequest]):
    """A Guesser: a DSpark, DFlash or JetSpec head beside the base's ends.

    What it says of a position is the same whatever guesses lie before it, but for what the Markov
    head adds by the last of them. A head that learnt to be shown guesses, and whose slots see those
    before them alone, has a slot for each path that is asked about, instead of masks.
    """

    def __init__(
        self,
        files: HeadFiles[DSparkShape],
        base: OutputHead,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        quantisation: Quantisation = PLAIN,
        head_quantisation: Quantisation = PLAIN,
        guessed: torch.Tensor | None = None,
    ) -> None:
        """`base` and its tensors `source` are lent where the head has no output matrix or embedding
        of its own; `quantisation` is of the matrices of its layers and of its own output matrix,
        `head_quantisation` of the base's rows that it scores with. `guessed`: tokens, see
        `narrowed`. Raises ModelError for what cannot be lent or held so."""
        files = narrowed(files, guessed, [MARKOV] if files.shape.markov_rank else [])
        shape, held = files.shape, (quantisation, head_quantisation)
        self._shape = shape
        # A matrix of its own is a draft's, as its layers are: no text depends on it.
        super().__init__(NAME, shape.aux_hidden, files, base, source, dtype, device, *held)
        self.form = shape.form(source.config)
        with torch.device("meta"):
            empty = DSparkHead(shape)
        spared = empty.spared(quantisation.group)
        self._head = filled(
            empty, files.weights, quantisation, self._dtype, self._device, NAME, spared
        )
        self._rows = TreeRows if shape.shows else BlockRows
        self._scored = None if files.tokens is None else files.tokens.to(self._device)
        self._passes = BlockPasses(self._head, self._parts)

    @property
    def one_pass(self) -> bool:
        return self._rows is BlockRows

    def _begun(self, request: int) -> _BlockRequest:
        return _BlockRequest(self._rows(request, self._passes))

    def _read(self, given: torch.Tensor) -> torch.Tensor:
        return self._head.context(given)

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        state, old = self._requests[request], self._requests.get(base)
        if old is None:
            return
        state.broken = old.broken or old.rows.committed < rows
        state.rows.begin_with(old.rows, rows, ends)

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Take features and committed tokens; False as long as the features of any but the newest
        are not here: a block stands on all of them. A head that is shown guesses is shown those
        tokens too."""
        state = self._requests[request]
        grown = len(context) > len(state.context)
        came = yield from self._news(request, context, features)
        if grown or came is not None:
            state.rows.said.clear()
        if state.broken:
            return False
        if came is not None:
            yield from state.rows.add(came)
        return state.rows.follow(state.context)

    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Steps[Children]:
        """There are none for paths that end where the block does."""
        state, known = self._requests[request], self._known(paths)
        if not known or not self._known([state.context[-1:]]):
            return Children.none()
        yield from state.rows.ask([tuple(paths[index]) for index in known])
        usable = [index for index in known if state.rows.about(tuple(paths[index]))]
        if not usable:
            return Children.none()
        asked = _Asked(request, [paths[index] for index in usable], width)
        found = yield from call(self._rank, asked, late=True)
        return replace(found, parents=np.array(usable)[found.parents])

    @torch.inference_mode()
    def _rank(self, asked: Sequence[_Asked]) -> list[Children]:
        """The best children of each request's paths. The output matrix meets all slots of a block
        at once, and those of several requests together."""
        self.between_layers()
        states = [self._requests[one.request] for one in asked]
        product = self._score([one for state in states for one in state.rows.said.values()])
        found = []
        for one, state in zip(asked, states, strict=True):
            lengths = np.array([len(path) for path in one.paths], np.int64)
            logits = self._conditional(state, one.paths)
            positions = len(state.context) + lengths
            request, paths, width = one
            found.append(
                self._ranking.children(
                    request, paths, logits, positions, width, self._tokens, product
                )
            )
            product = 0
        return found

    def _score(self, every: Sequence[SlotLogits]) -> int:
        """Have the logits of all slots there, by one product for those that lack them: its rows, 0
        if there was none."""
        fresh = [one for one in every if one.logits is None]
        if fresh:
            found = self._logits(torch.cat([one.out for one in fresh]))
            for one, own in zip(fresh, found.split([len(one.out) for one in fresh]), strict=True):
                one.logits = own
        return sum(len(one.out) for one in fresh)

    def _conditional(self, state: _BlockRequest, paths: Sequence[TokenPath]) -> torch.Tensor:
        """Logits [P, vocab] of what follows each path."""
        parts = []
        for path in paths:
            about = state.rows.about(tuple(path))
            assert about is not None
            said, depth = about
            assert said.logits is not None
            parts.append(said.logits[depth])
        rows = torch.stack(parts)
        if not self._shape.markov_rank:
            return rows
        before = [path[-1] if path else state.context[-1] for path in paths]
        known = rows_of(torch.tensor(before, device=self._device), self._shape, self._scored)
        return rows + self._head.markov(known).to(rows.dtype)


def load_dspark(
    path: str | Path,
    source: TensorSource,
    base: OutputHead,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    quantisation: Quantisation = PLAIN,
    head_quantisation: Quantisation = PLAIN,
    guessed: torch.Tensor | None = None,
) -> DSparkGuesser:
    """The one-pass head in a folder, or of a hub id, for the base `source` with the output head
    `base`; see DSparkGuesser.

    Raises ModelError if there is none, it does not fit, or cannot be quantised so.
    """
    files = read_head(path, base.hidden_size, base.vocab_size, base.layers)
    held = quantisation, head_quantisation, guessed
    return DSparkGuesser(files, base, source, dtype, device, *held)
