"""Rules: what changes a request's logits, token by token: a grammar, penalties, biases.

They depend on the answer so far, that is on the path from its first token down the draft tree. So
each row has its own, whatever was computed beside it, and the text is that of plain decoding under
the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ConfigError
from edgespec.tree.ledger import Rows
from edgespec.verify.sampling import Logits

Mask = NDArray[np.bool_]
Answer = tuple[int, ...]
"""The tokens of an answer so far."""


class Grammar(Protocol):
    """What a request's answer may be. Calls come from one thread."""

    def allowed(self, answer: Answer) -> Mask:
        """Which tokens may come after these, bool [V]; the model's further ones may not.

        None where these are no beginning of such an answer, or lead nowhere, or have ended. An end
        token may come where the answer may end, other control tokens never. Raises ConfigError if
        to find out takes more than it may.
        """

    def has_ended(self, answer: Answer) -> bool:
        """Whether an end token is among these."""


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules of one request.

    Added to the logits, before temperature and filters, as OpenAI's API has it: `bias`, pairs of a
    token and what it gets; less `presence` for a token that the answer has, and less `frequency`
    for each time that it has it. Then what the `grammar` forbids goes.
    """

    grammar: Grammar | None = None
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()

    def __bool__(self) -> bool:
        """Whether they change anything."""
        return self.grammar is not None or bool(self.presence or self.frequency or self.bias)

    def applied(self, logits: Logits, answer: Answer) -> Logits:
        """The logits [V] of the token after that answer, as a new array.

        Raises ConfigError if nothing is left, or a bias is for a token that the model lacks.
        """
        found = np.array(logits)
        if self.presence or self.frequency or self.bias:
            found = found.astype(np.float64)
            self._add(found, answer)
        if self.grammar is not None:
            self._forbid(found, self.grammar, answer)
        return found

    @staticmethod
    def _forbid(logits: Logits, grammar: Grammar, answer: Answer) -> None:
        mask = grammar.allowed(answer)
        if not mask[: len(logits)].any():
            if grammar.has_ended(answer):  # nobody reads what comes there
                return
            raise ConfigError(
                "the grammar leaves no token that may come after the first "
                f"{len(answer)} tokens of the answer, nor may it end there"
            )
        logits[: len(mask)][~mask[: len(logits)]] = -np.inf
        logits[len(mask) :] = -np.inf

    def _add(self, logits: Logits, answer: Answer) -> None:
        for token, value in self.bias:
            if token >= len(logits):
                raise ConfigError(f"logit_bias names token {token}; the last is {len(logits) - 1}")
            logits[token] += value
        tokens, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        logits[tokens] -= self.presence + self.frequency * counts


@dataclass(frozen=True, slots=True)
class RulesAt:
    """A request's rules, and its answer up to the first of some rows, its own token included."""

    rules: Rules
    answer: Answer

    def along(self, logits: Callable[[int], Logits], rows: Rows) -> Callable[[int], Logits]:
        """The logits of each row by the rules; `logits(i)`: those of row i, all of which hang from
        the first one."""
        place = {row: at for at, row in enumerate(rows.ids.tolist())}

        def applied(row: int) -> Logits:
            path: list[int] = []
            at = row
            while at:
                path.append(int(rows.tokens[at]))
                at = place[int(rows.parents[at])]
            return self.rules.applied(logits(row), (*self.answer, *reversed(path)))

        return applied


def forced(mask: Mask) -> int | None:
    """The one token that may come; None if there are several, or none."""
    return int(mask.argmax()) if np.count_nonzero(mask) == 1 else None


def chain(grammar: Grammar, answer: Sequence[int], most: int) -> tuple[int, ...]:
    """The tokens, `most` at most, that must come after that answer."""
    found: list[int] = []
    while len(found) < most:
        token = forced(grammar.allowed((*answer, *found)))
        if token is None:
            break
        found.append(token)
    return tuple(found)
