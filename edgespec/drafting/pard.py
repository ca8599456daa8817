"""PARD guesser: a whole small model with mask tokens guesses a block of positions in one pass.

PARD (arXiv 2504.18583): a usual causal model that was trained on with one token, the same for all
places, that stands for "not known yet". Behind the context come such masks; the last token and each
mask guess one position, whatever lies between. It reads no rows of the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from edgespec.drafting.base import PASS_ROWS, TokenPath
from edgespec.drafting.independent import JointPasses, NextRows
from edgespec.drafting.ranking import score_slots
from edgespec.drafting.steps import Steps, call
from edgespec.drafting.whole_model import WholeModelGuesser
from edgespec.errors import ModelError
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.source import TensorSource
from edgespec.tree.drafted import Children

SLOTS = 12
"""Positions that a pass guesses: PARD's own code asks for so many, of models trained for 8."""

_NOTHING = np.zeros(0, np.int64)


class MaskedRows:
    """What was run for one request: committed tokens; masks leave the cache with their pass.

    `out` [slots, H]: what the last token and the masks behind it gave, None until that is needed;
    `logits` [slots, V]: of these, once they are needed.
    """

    def __init__(self, request: int, passes: JointPasses, mask: int, most_rows: int) -> None:
        """An empty cache. `mask`: the masks' token; `most_rows`: the model's context."""
        self.request = request
        self.context: list[int] = []
        self.out: torch.Tensor | None = None
        self.logits: torch.Tensor | None = None
        self._passes, self._mask, self._most_rows = passes, mask, most_rows
        self._kv = passes.block.new_cache(0)

    @property
    def slots(self) -> int:
        """Positions behind the context that can be guessed: as far as the model's context goes."""
        return min(SLOTS, 1 + self._most_rows - len(self.context))

    def catch_up(self, news: TokenPath) -> Steps[None]:
        """Take new committed tokens; more than fit beside masks run now."""
        if not news:
            return
        self.context += news
        self.out = self.logits = None
        while len(self.context) - self._kv.length > PASS_ROWS:
            yield from self._run(PASS_ROWS, 0)

    def rewind(self, rows: int) -> None:
        self.context = self.context[:rows]
        # The last token runs again: what it gave is not kept.
        self._kv.gather(min(self._kv.length, max(len(self.context) - 1, 0)), _NOTHING)
        self.out = self.logits = None

    def copy(self, other: MaskedRows, rows: int) -> None:
        self.context = other.context[:rows]
        self._kv = other._kv.fork(0, min(other._kv.length, len(self.context)))
        self.rewind(rows)

    def masked(self) -> Steps[torch.Tensor]:
        """`out`: committed tokens that wait and the masks behind them run in one pass, if they have
        not; needs a context."""
        if self.out is None:
            waiting, slots = len(self.context) - self._kv.length, self.slots
            hidden = yield from self._run(waiting, slots - 1)
            self.out = hidden[waiting - 1 :].clone()
        return self.out

    def hidden_behind(self, paths: Sequence[TokenPath]) -> Steps[torch.Tensor]:
        out = yield from self.masked()
        return out[torch.tensor([len(path) for path in paths], device=out.device)]

    def _run(self, count: int, masks: int) -> Steps[torch.Tensor]:
        """The next `count` committed tokens, which stay in the cache, and masks, which do not."""
        held = self._kv.length
        tokens = [*self.context[held : held + count], *[self._mask] * masks]
        sees = np.tri(len(tokens), dtype=np.bool_)
        places = np.arange(held, held + len(tokens))
        given = NextRows(self.request, np.array(tokens), places, self._kv, held, sees)
        hidden = yield from call(self._passes.run, given)
        self._kv.gather(held + count, _NOTHING)
        return hidden


class _AskedPaths(NamedTuple):
    """Paths of a request, of `lengths` int64 [n], whose `width` best children are to be found."""

    request: int
    paths: Sequence[TokenPath]
    lengths: np.ndarray
    width: int


class PardGuesser(WholeModelGuesser[MaskedRows]):
    """A Guesser (see drafting.base) that runs a small model with masks. What it says of a position
    is the same whatever guesses lie before it."""

    def __init__(
        self,
        source: TensorSource,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
        vocab_size: int | None = None,
        ends: TensorSource | None = None,
    ) -> None:
        """Load the model; the rest as of IndependentGuesser. Raises ModelError, also for a model
        without masks, and for one that reads the base's rows."""
        block = Block(source, 0, source.layers, dtype, device)
        passes = JointPasses(block, self.ran, self.between_layers)
        mask = mask_token(source, block.vocab_size)
        most_rows = int(source.config.max_position_embeddings)
        super().__init__(
            "pard",
            lambda request: MaskedRows(request, passes, mask, most_rows),
            OutputHead(ends or source, dtype, device, share=block),
            known=block.vocab_size,
            most_rows=most_rows,
            vocab_size=vocab_size,
        )

    @property
    def one_pass(self) -> bool:
        return True

    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Steps[Children]:
        """There are none for paths that end where the masks do."""
        rows = self._rows[request]
        usable = [index for index, path in enumerate(paths) if len(path) < rows.slots]
        if not usable:
            return Children.none()
        yield from rows.masked()
        asked = [paths[index] for index in usable]
        lengths = np.array([len(path) for path in asked])
        found = yield from call(self._best, _AskedPaths(request, asked, lengths, width), late=True)
        return replace(found, parents=np.array(usable)[found.parents])

    @torch.inference_mode()
    def _best(self, every: Sequence[_AskedPaths]) -> list[Children]:
        """The best children of each request's paths."""
        self.between_layers()
        states = [self._rows[one.request] for one in every]
        product, found = score_slots(states, self._logits), []
        for (request, paths, lengths, width), state in zip(every, states, strict=True):
            assert state.logits is not None
            logits = state.logits[torch.from_numpy(lengths).to(state.logits.device)]
            where = len(state.context) + lengths
            best = self._ranking.children(request, paths, logits, where, width, product=product)
            found.append(best)
            product = 0
        return found


def mask_token(source: TensorSource, known: int) -> int:
    """The token of a model's masks; `known`: tokens that it can read. Raises ModelError."""
    settings = source.config.settings
    token = settings.get("pard_token")
    if settings.get("pard2") or settings.get("spd_type") == "pard2":
        raise ModelError(
            f"{source.path} is of PARD-2, whose model reads rows of the base as well; give one of "
            "PARD, which has pard_token in its config.json and no pard2"
        )
    if token is None:
        raise ModelError(
            f"{source.path}/config.json has no pard_token: this model was not trained with masks; "
            "give it as independent:FOLDER"
        )
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < known:
        raise ModelError(
            f"the pard_token of {source.path}/config.json is {token!r}, and the model reads tokens "
            f"0 to {known - 1}; correct it"
        )
    return token
