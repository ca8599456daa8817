"""Draft sources of one's own: what to derive one from, and the guesser that is made of it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.choice import DraftChoice
from edgespec.drafting.steps import at_once
from edgespec.errors import ConfigError
from edgespec.plugins import DRAFT_GROUP, load
from edgespec.tree.drafted import Children
from edgespec.types.draft_pass import SpentSeconds
from edgespec.types.features import Features
from edgespec.verify.sampling import Sampling

if TYPE_CHECKING:  # it imports torch
    from edgespec.drafting.registry import BaseParts

Result = TypeVar("Result")


class DraftSource(ABC):
    """Guesses what may follow a text; named by `--draft package.module:Class[:ARGUMENT]`.

    Guesses cannot change an answer, only how fast it comes. All calls come from one thread, and
    name open requests.
    """

    @property
    def name(self) -> str:
        """What results call it."""
        return type(self).__name__.lower()

    @classmethod
    def make(cls, argument: str, base: BaseParts) -> DraftSource:
        """The source for a base model: `Class()`, or `Class(argument)` if there is an argument.

        To be overridden by one that needs more: `base` has the base model's vocab_size, the folder
        of its tokenizer, and the dtype and device that models on this machine have.
        """
        return cls(argument) if argument else cls()  # type: ignore[call-arg]

    def open(self, request: int, sampling: Sampling) -> None:  # noqa: B027
        """A request begins; `sampling`: how its tokens are taken."""

    @abstractmethod
    def read(self, request: int, tokens: Sequence[int]) -> None:
        """The next tokens of the request's text, which stay: first its prompt, then its answer."""

    @abstractmethod
    def guess(
        self, request: int, paths: Sequence[TokenPath], width: int
    ) -> Sequence[Sequence[tuple[int, float]]]:
        """For each path, up to `width` tokens that may follow the text read so far and then that
        path (empty: the text itself), each with its natural-log probability, not above 0."""

    def close(self, request: int) -> None:  # noqa: B027
        """A request has ended."""

    def seconds(self, tokens: int, paths: int) -> float | None:
        """What reading so many tokens (with 0 paths), or guessing after so many paths (with 0
        tokens), takes on the coordinator's device, for `simulate` and `--emulate`.

        None: it takes what it takes on this machine, so that a simulation's figures vary.
        """
        return None


class OwnGuesser(Guesser):
    """The Guesser (see drafting.base) that asks a DraftSource."""

    def __init__(self, source: DraftSource, vocab_size: int) -> None:
        super().__init__(source.name)
        self._source, self._vocab_size = source, vocab_size
        self._read: dict[int, int] = {}  # tokens of each open request

    @property
    def is_model(self) -> bool:
        return False  # nobody knows: it may name what no model does

    def open(self, request: int, sampling: Sampling) -> None:
        self._read[request] = 0
        self._source.open(request, sampling)

    @at_once
    def reading(self, request: int, context: Sequence[int], features: Features) -> bool:
        tokens = context[self._read[request] :]
        self._read[request] = len(context)
        self._charged(len(tokens), 0, lambda: self._source.read(request, tokens))
        return True

    @at_once
    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """Raises ValueError for guesses that are none."""
        found = self._charged(0, len(paths), lambda: self._source.guess(request, paths, width))
        if len(found) != len(paths):
            raise ValueError(f"draft {self.name} guesses after {len(found)} of {len(paths)} paths")
        rows = [
            (at, token, score)
            for at, guesses in enumerate(found)
            for token, score in sorted(dict(guesses).items(), key=lambda one: -one[1])[:width]
        ]
        for _, token, score in rows:
            if not (0 <= token < self._vocab_size and score <= 0.0):
                raise ValueError(
                    f"draft {self.name} guesses token {token} with log-probability {score}; tokens "
                    f"are below {self._vocab_size}, and no log-probability is above 0"
                )
        parents, tokens, scores = zip(*rows, strict=True) if rows else ((), (), ())
        return Children(
            np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
        )

    def close(self, request: int) -> None:
        super().close(request)
        if self._read.pop(request, None) is not None:
            self._source.close(request)

    def _charged(self, tokens: int, paths: int, call: Callable[[], Result]) -> Result:
        """Call the source, and note what that takes."""
        began = time.perf_counter()
        found = call()
        measured = time.perf_counter() - began
        declared = self._source.seconds(tokens, paths)
        self._work.append(SpentSeconds(measured if declared is None else declared, self.name))
        return found


def own_class(name: str) -> type[DraftSource]:
    """The class that a member of a choice names. Raises ConfigError if there is none."""
    return load(name, DraftSource, DRAFT_GROUP)  # type: ignore[type-abstract]


def own_guesser(name: str, argument: str, base: BaseParts) -> Guesser:
    """The source of somebody's own. Raises ConfigError if it cannot be made."""
    try:
        return OwnGuesser(own_class(name).make(argument, base), base.vocab_size)
    except TypeError as problem:
        raise ConfigError(f"draft {name} cannot be made: {problem}") from None


def say_measured(choice: DraftChoice, say: Callable[[str], None]) -> None:
    """Tell of sources whose time is measured where times are charged, so that they vary."""
    for one in choice.members:
        if one.is_own and own_class(one.name).seconds is DraftSource.seconds:
            say(f"draft {one.name} declares no time (`seconds`): it is charged what it takes here")
