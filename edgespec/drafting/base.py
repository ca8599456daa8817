"""The interface of a guesser, which says what may follow; drafting.grower grows trees of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from edgespec.config import FREE_SOURCES
from edgespec.drafting.steps import Steps, alone
from edgespec.tree.drafted import Children
from edgespec.tree.ledger import IntArray
from edgespec.types.draft_pass import DraftPass, DraftWork, HeadForm, RankedRows
from edgespec.types.features import NO_NEEDS, DraftNeeds, Features
from edgespec.verify.rules import Mask
from edgespec.verify.sampling import Sampling

PASS_ROWS = 256
"""Rows of a text that run together: bounds masks, activations, and how long others wait."""

TokenPath = Sequence[int]
"""Tokens of a guess and its ancestors, from the first after the context on."""


class Guesser(ABC):
    """Guesses what comes next; keeps its own cache for every open request.

    `name`: what results and messages call it. `needs`: what it must be given beyond tokens.
    `sources`: the names of its members, in the order of the bits of Children.sources; a guesser
    without members is its own. `form`: what it is made of, if it says so. Calls come from one
    thread, in order, and name open requests only; the steps of several requests may be carried out
    together (see drafting.steps).
    """

    def __init__(
        self, name: str, needs: DraftNeeds = NO_NEEDS, sources: tuple[str, ...] = ()
    ) -> None:
        self.name, self.needs, self.sources = name, needs, sources or (name,)
        self.form: HeadForm | None = None
        self._work: list[DraftWork] = []
        self._let_in: Callable[[], object] = lambda: None
        self.allowed: dict[int, Mapping[TokenPath, Mask]] = {}

    @property
    def one_pass(self) -> bool:
        """Whether further levels of a tree cost it no pass now, only the ranking of their guesses:
        what is asked to guess below one path then guesses below its best guesses too."""
        return False

    @property
    def is_free(self) -> bool:
        """Whether it, or one of its members, runs no model."""
        return any(name in FREE_SOURCES for name in self.sources)

    @property
    def is_model(self) -> bool:
        """Whether a hybrid has it as its model: two would name much the same tokens."""
        return not self.is_free

    def spare(self, request: int, free: bool) -> None:  # noqa: B027
        """Ask only members that run no model for the request from now on, or all again."""

    @abstractmethod
    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request; its guesses are ranked with the request's shared noise."""

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:  # noqa: B027
        """The first `rows` tokens of `request`, which was just opened, are those of `base`: what
        was read of them need not be read again, and their features do not come again. `ends`:
        `base` is about to be closed, and leaves what it has; else it is copied. Ignored if `base`
        is unknown."""

    @abstractmethod
    def reading(self, request: int, context: Sequence[int], features: Features) -> Steps[bool]:
        """Make `context` the committed tokens; it only grows. False if nothing can be guessed
        after it, in which case the context read last stays. `features` are taken in either way."""

    def reading_part(self, request: int, context: Sequence[int], rows: int) -> Steps[None]:
        """Run the first `rows` tokens of a `context` that is to be read soon, if they have to be;
        its features are still to come."""
        yield from ()

    @abstractmethod
    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Steps[Children]:
        """The `width` best children of each path after the context read last; width >= 1.

        An empty path stands for the context's last token. Scores are the guesses' own, given their
        path. There are none for paths that the guesser can say nothing about.
        """

    def read(self, request: int, context: Sequence[int], features: Features) -> bool:
        """`reading` of one request alone."""
        return alone(self.reading(request, context, features))

    def guess(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """`guessing` of one request alone."""
        return alone(self.guessing(request, paths, width))

    def allow(self, request: int, masks: Mapping[TokenPath, Mask]) -> None:
        """After these paths, which `guessing` is asked about next, no tokens may come but those of
        the masks [V]. What can, ranks no others: they would take the place of ones that may come.
        """
        self.allowed[request] = masks

    def close(self, request: int) -> None:
        """Free all that is held of the request; unknown requests are ignored."""
        self.allowed.pop(request, None)

    def let_in(self, call: Callable[[], object]) -> None:
        """Have `call()` made from now on between two layers of every forward pass."""
        self._let_in = call

    def between_layers(self) -> bool:
        """Called by a model before each layer, and before its output matrix; False, as no draft is
        stopped."""
        self._let_in()
        return False

    def ran(self, rows: int, *requests: int, joined: int = 0) -> None:
        """Note a forward pass over so many rows of these requests; `joined`: see DraftPass."""
        self._work.append(DraftPass(rows, self.name, requests, joined, self.form))

    def ranked(self, positions: IntArray, sampling: Sampling, product: int | None = None) -> None:
        """Note that guesses were taken from a row of logits for each of these positions; `product`:
        see RankedRows."""
        where = tuple(positions.tolist())
        way, seed = sampling.way, sampling.seed
        self._work.append(RankedRows(where, self.name, way, seed, product, self.form))

    def take_work(self) -> tuple[DraftWork, ...]:
        """What was done since the last call, in order: what a device is charged for."""
        work, self._work = tuple(self._work), []
        return work
