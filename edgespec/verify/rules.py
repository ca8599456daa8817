"""Rules: what changes a request's logits, token by token: a grammar, penalties, biases.

They depend on the answer so far, that is on the path from its first token down the draft tree. So
each row has its own, whatever was computed beside it, and the text is that of plain decoding under
the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
class ThoughtLimit:
    """Ends a thought after `budget` tokens of it: the tokens of the `closing` mark come there.

    A thought has begun with the prompt if there is no `opening` mark, else with an answer that has
    it first. One that has been closed by then is not touched.
    """

    budget: int
    opening: tuple[int, ...]
    closing: tuple[int, ...]

    def forced(self, answer: Answer) -> int | None:
        """The token that has to come after that answer; None: any may."""
        begun, size = len(self.opening), len(self.closing)
        at = len(answer) - begun - self.budget
        if not 0 <= at < size or answer[:begun] != self.opening:
            return None
        ends = range(size, begun + self.budget + 1)
        if any(answer[end - size : end] == self.closing for end in ends):
            return None
        return self.closing[at]


@dataclass(frozen=True, slots=True)
class Rules:
    """All rules of one request.

    First the logits of tokens that the `prompt` or the answer has are divided by `repetition`,
    those below 0 multiplied (Keskar et al., CTRL, section 4.1). Then is added to them, before
    temperature and filters, as OpenAI's API has it: `bias`, pairs of a token and what it gets; less
    `presence` for a token that the answer has, and less `frequency` for each time that it has it.
    Then what the `grammar` forbids goes, and `ends` in an answer of fewer than `least` tokens.
    Where the `thought` has to end, all but its next token goes.
    """

    grammar: Grammar | None = None
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    repetition: float = 1.0
    prompt: frozenset[int] = frozenset()
    least: int = 0
    ends: tuple[int, ...] = ()
    thought: ThoughtLimit | None = None

    def begun(self, prompt: Sequence[int], grammar: Grammar | None, *, thinks: bool) -> Rules:
        """These and that grammar, after that prompt, which ends within a thought if it `thinks`. An
        answer that a grammar holds has no thought."""
        seen = frozenset(prompt) if self.repetition != 1 else frozenset()
        thought = self.thought if grammar is None else None
        if thought is not None and thinks:
            thought = replace(thought, opening=())
        return replace(self, grammar=grammar, prompt=seen, thought=thought)

    def __bool__(self) -> bool:
        """Whether they change anything."""
        held = self.grammar is not None or self.thought is not None
        return held or self._adds or bool(self.least and self.ends)

    @property
    def _adds(self) -> bool:
        return bool(self.presence or self.frequency or self.bias) or self.repetition != 1

    def applied(self, logits: Logits, answer: Answer) -> Logits:
        """The logits [V] of the token after that answer, as a new array.

        Raises ConfigError if nothing is left, or a bias is for a token that the model lacks.
        """
        found = np.array(logits)
        if self._adds:
            found = found.astype(np.float64)
            self._add(found, answer)
        if self.grammar is not None:
            self._forbid(found, self.grammar, answer)
        if len(answer) < self.least:
            found[[token for token in self.ends if token < len(found)]] = -np.inf
            if not (found > -np.inf).any():
                raise ConfigError(
                    f"min_tokens is {self.least}, and after the first {len(answer)} tokens of the "
                    "answer nothing may come but its end"
                )
        if self.thought is not None and (token := self.thought.forced(answer)) is not None:
            found[:] = -np.inf
            found[token] = 0.0
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
        if self.repetition != 1:
            seen = np.array(sorted(self.prompt.union(answer)), np.int64)
            at = logits[seen]
            logits[seen] = np.where(at > 0, at / self.repetition, at * self.repetition)
        for token, value in self.bias:
            if token >= len(logits):
                raise ConfigError(f"logit_bias names token {token}; the last is {len(logits) - 1}")
            logits[token] += value
        tokens, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        logits[tokens] -= self.presence + self.frequency * counts


@dataclass(frozen=True, slots=True)
class RulesAt:
    """A request's rules, and its answer up to the first of some rows, its own token included.
    `told`: what says of each row, in the place of the rules' grammar, what may come behind it."""

    rules: Rules
    answer: Answer
    told: tuple[Grammar, ...] = ()

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
            rules = replace(self.rules, grammar=self.told[row]) if self.told else self.rules
            return rules.applied(logits(row), (*self.answer, *reversed(path)))

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
