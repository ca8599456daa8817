"""The interfaces of compute: a stage's block of layers, and the output head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from edgespec.machines.effects import RunBlock
from edgespec.tree.ledger import IntArray, Rows
from edgespec.tree.stems import Fork
from edgespec.types.stop_check import StopCheck
from edgespec.types.tensor import Tensor
from edgespec.verify.rules import RulesAt
from edgespec.verify.sampling import Choice, Sampling
from edgespec.verify.top_logprobs import TopLogprobs


class BlockBackend(Protocol):
    """One stage's consecutive layers with a KV cache for every open request.

    The cache's slots are exactly those of the stage's RowLedger: committed rows, then speculative
    rows. Calls come from one thread, in order.
    """

    def open(self, request: int, reserve: int) -> None:
        """Make an empty cache with room for `reserve` rows; it grows if more come."""

    def move(self, request: int, base: int) -> None:
        """Begin `request` with the cache of `base`, which has none afterwards."""

    def fork(self, request: int, base: int, how: Fork) -> None:
        """Begin `request` with rows of `base`, which keeps them; they are held once."""

    def run(self, job: RunBlock, stop: StopCheck) -> Tensor | None:
        """Run the block over the rows of all parts and append their keys and values to the caches.

        Returns hidden rows, a Tensor [R, H] in the model's dtype (after the final norm on the
        last stage), or None if `stop()` turned true between two layers: the rows' slots then
        hold garbage that a later `gather` drops. So do those of a part whose `stop(request)` turned
        true, which is left out from there on; its rows [R, H] are then zeros.
        """

    def take_aux_hidden(self) -> Tensor | None:
        """What entered the RunBlock.aux_layers of this block in the last run: uint8
        [R, ...], layer by layer (see model.aux_hidden); None if the block has none of them."""

    def gather(self, request: int, start: int, order: IntArray) -> None:
        """After the first `start` slots, keep slot `start + i` for i in `order`, in that order."""

    def close(self, request: int) -> None:
        """Free the request's cache; unknown requests are ignored."""


class Walk(NamedTuple):
    """Rows whose target tokens are wanted, with their hidden rows [R, H], and the rules by which
    they are chosen (see decoding.effects.RunHead)."""

    hidden: Tensor
    rows: Rows
    sampling: Sampling
    top: int = -1
    rules: RulesAt | None = None


class Head(Protocol):
    """The base model's output head, on the coordinator or the last stage."""

    def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
        """Sample the tokens after each walk's rows, along the path that they lead down from its
        first one; several walks share one product with the output matrix.

        With `top` of at least 0, also so many of the likeliest tokens, and log-probabilities.
        """

    def score(self, hidden: Tensor, tokens: IntArray, top: int) -> TopLogprobs:
        """How likely these tokens [R] are after the rows [R, H], and `top` of the likeliest there.

        A row's do not depend on the others, of which only a few have their logits held at once.
        """
