"""EAGLE guesser: guesses by a head that reads the base's own features of committed rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from edgespec.config import Quantisation
from edgespec.drafting.base import TokenPath
from edgespec.drafting.eagle.format import read_head
from edgespec.drafting.eagle.head import EagleHead
from edgespec.drafting.eagle.rows import EaglePasses, PairPasses, PairRows
from edgespec.drafting.eagle.shape import HeadShape, Kind, Rope
from edgespec.drafting.held_head import HeadGuesser, HeadRequest, filled
from edgespec.drafting.ranking import Unranked
from edgespec.drafting.steps import Steps, call
from edgespec.drafting.weight_file import HeadFiles, narrowed
from edgespec.errors import ModelError
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource
from edgespec.tree.drafted import Children
from edgespec.types.features import Features

log = logging.getLogger(__name__)

PLAIN = Quantisation()
"""Held as it comes."""

TESTED_ROWS = 200
"""Committed rows by which the settings of a head in doubt are told apart."""


@dataclass(slots=True)
class _PairedRequest(HeadRequest):
    """One request, and the rows of its pairs.

    `features`: of all committed rows that came, from the first on, in parts [n, hidden];
    `unpaired`: of the last of them, whose pairs lack their token.
    """

    pairs: PairRows
    unpaired: torch.Tensor
    features: list[torch.Tensor] = field(default_factory=list)


class PairGuesser(HeadGuesser[_PairedRequest]):
    """A Guesser by a head that reads pairs: a row of the base and the token behind it."""

    _passes: PairPasses
    _ropes: tuple[Rope, ...] = (Rope(),)
    """What its rotary embeddings may be; more than one where its files are in doubt."""

    def _begun(self, request: int) -> _PairedRequest:
        passes = self._passes
        nothing = torch.zeros((0, passes.hidden), dtype=self._dtype, device=self._device)
        return _PairedRequest(PairRows(request, passes, self._ropes[0]), nothing)

    def _read(self, given: torch.Tensor) -> torch.Tensor:
        return given

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        state, old = self._requests[request], self._requests.get(base)
        if old is None:
            return
        known = torch.cat([state.unpaired, *old.features])[:rows]
        state.broken = old.broken or len(known) < rows
        state.features = [known]
        # A pair is of a row's features and the next token: of the last row's that is another one.
        if ends:
            state.pairs = old.pairs
            state.pairs.request = request
            state.pairs.rewind(rows - 1)
        else:
            state.pairs.copy(old.pairs, rows - 1)
        state.unpaired = known[state.pairs.committed :]

    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Take features and committed tokens; False as long as the features of any but the newest
        are not here (those of a prompt come with its chunks): to imitate so many of them would take
        as many passes."""
        state = self._requests[request]
        came = yield from self._news(request, context, features)
        if state.broken:
            return False
        if came is not None:
            state.features.append(came)
            state.unpaired = torch.cat([state.unpaired, came])
        first = state.pairs.committed
        count = min(len(state.unpaired), len(context) - 1 - first)
        if count > 0:
            fresh, state.unpaired = state.unpaired[:count], state.unpaired[count:]
            yield from state.pairs.add(fresh, context[first + 1 : first + 1 + count])
            if len(self._ropes) > 1 and first + count >= TESTED_ROWS:
                yield from self._try(request, state, torch.cat(state.features)[: first + count])
        return 0 < state.pairs.committed == len(context) - 1

    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Steps[Children]:
        state, usable = self._requests[request], self._known(paths)
        if not usable:
            return Children.none()
        asked = [paths[index] for index in usable]
        out = yield from state.pairs.behind(asked)
        positions = len(state.context) + np.array([len(path) for path in asked])
        wanted = Unranked(request, asked, out, positions, width)
        found = yield from call(self._rank, wanted, late=True)
        return replace(found, parents=np.array(usable)[found.parents])

    @torch.inference_mode()
    def _rank(self, asked: Sequence[Unranked]) -> list[Children]:
        """The best children of each request's paths."""
        self.between_layers()
        return self._ranking.together(asked, self._logits, self._tokens)

    def _try(self, request: int, state: _PairedRequest, features: torch.Tensor) -> Steps[None]:
        """Keep the settings by which most next tokens are foreseen."""
        pairs, known = state.context[1 : len(features) + 1], np.array(state.context[2:])
        ropes = self._ropes
        made = [PairRows(request, self._passes, rope) for rope in ropes]
        right: list[float] = []
        for rows in made:
            out = yield from rows.read(features, pairs)
            best = self._logits(out)[: len(known)].argmax(1).cpu().numpy()
            tokens = best if self._tokens is None else self._tokens[best]
            right.append(float((tokens == known[: len(tokens)]).mean()))
        best_of = int(np.argmax(right))
        shares = ", ".join(
            f"rope theta {rope.theta:g}: {share:.0%}"
            for rope, share in zip(ropes, right, strict=True)
        )
        chosen = ropes[best_of]
        log.info("%s head: right next tokens by %s; using %g", self.name, shares, chosen.theta)
        self._ropes = (chosen,)
        state.pairs = made[best_of]


class EagleGuesser(PairGuesser):
    """A Guesser: an EAGLE-1, EAGLE-2 or EAGLE-3 head beside the base's ends."""

    def __init__(
        self,
        files: HeadFiles[HeadShape],
        base: OutputHead,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        quantisation: Quantisation = PLAIN,
        head_quantisation: Quantisation = PLAIN,
        guessed: torch.Tensor | None = None,
    ) -> None:
        """`base` and its tensors `source` are lent where the head has no matrix or embedding of
        its own; `quantisation` is of the matrices of its layer, `head_quantisation` of that which
        it scores with. `guessed`: tokens, see `narrowed`. Raises ModelError for what cannot be lent
        or held so."""
        files = narrowed(files, guessed)
        shape, held = files.shape, (head_quantisation, head_quantisation)
        super().__init__(shape.kind, shape.aux_hidden, files, base, source, dtype, device, *held)
        with torch.device("meta"):
            empty = EagleHead(shape)
        self._head = filled(
            empty, files.weights, quantisation, self._dtype, self._device, shape.kind
        )
        self._ropes = shape.ropes
        self._passes = EaglePasses(self._head, self._parts)

    def _read(self, given: torch.Tensor) -> torch.Tensor:
        return self._head.features(given)

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        return super()._logits(self._head.outgoing(rows))


def load_eagle(
    path: str | Path,
    kind: Kind,
    source: TensorSource,
    base: OutputHead,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    quantisation: Quantisation = PLAIN,
    head_quantisation: Quantisation = PLAIN,
    guessed: torch.Tensor | None = None,
) -> EagleGuesser:
    """The head of that kind in a folder, or of a hub id, for the base `source` with the output
    head `base`; see EagleGuesser.

    Raises ModelError if there is none, it does not fit, or cannot be quantised so.
    """
    files = read_head(path, base.hidden_size, base.vocab_size, base.layers)
    if files.shape.kind != kind:
        raise ModelError(f"{path} is an {files.shape.kind} head; say {files.shape.kind}:{path}")
    held = quantisation, head_quantisation, guessed
    return EagleGuesser(files, base, source, dtype, device, *held)
