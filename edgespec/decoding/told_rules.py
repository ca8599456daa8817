"""Told rules: what the last stage is told of a request's rules, if it chooses the tokens.

All but a grammar are numbers, and go with the end of the prompt: the last stage follows the answer,
and applies them as D0 would. A grammar stays on D0, which has the tokenizer. It is asked there what
may come behind each row that leaves, and that goes with the row: most masks are the same as one
before (any token of a string), or so few runs of tokens that they take some bytes. No mask takes
more than a bit for each token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from edgespec.errors import CapacityError, ConfigError
from edgespec.tree.ledger import IntArray
from edgespec.types.tensor import Tensor
from edgespec.verify.rules import Answer, Grammar, Mask, Rules, RulesAt, ThoughtLimit
from edgespec.wire.segment import MOST_MASKS, MOST_TOKENS, Allowed, Choosing, TokenMask, ToldRules

MOST_BYTES = 4 << 20
"""Of the new masks that rows of one request bring in one segment."""

_UNTOLD = -2
"""In the place of a slot: nothing was said of that row."""


def told_choosing(
    choosing: Choosing | None, rules: Rules | None, answer: Sequence[int]
) -> Choosing | None:
    """How the last stage chooses a request's tokens by its rules, after its answer so far."""
    if choosing is None or not rules:
        return choosing
    return replace(choosing, rules=told_rules(rules, answer))


def told_rules(rules: Rules, answer: Sequence[int]) -> ToldRules:
    """What the last stage is told of a request's rules and its answer so far."""

    def numbers(tokens: Sequence[int]) -> IntArray:
        return np.array(tokens, np.int64)

    limit, bias = rules.thought, np.array([value for _, value in rules.bias], "<f8")
    return ToldRules(
        numbers(answer),
        rules.presence,
        rules.frequency,
        numbers([token for token, _ in rules.bias]),
        Tensor("float64", bias.shape, bias.tobytes()),
        rules.repetition,
        numbers(sorted(rules.prompt)),
        rules.least,
        numbers(rules.ends),
        limit.budget if limit else -1,
        numbers(limit.opening if limit else ()),
        numbers(limit.closing if limit else ()),
        rules.grammar is not None,
    )


def _rules_of(told: ToldRules) -> Rules:
    """The rules, but for a grammar."""
    marks = tuple(told.opening.tolist()), tuple(told.closing.tolist())
    return Rules(
        None,
        told.presence,
        told.frequency,
        tuple(zip(told.biased.tolist(), told.biases.tolist(), strict=True)),
        told.repetition,
        frozenset(told.prompt.tolist()),
        told.least,
        tuple(told.ends.tolist()),
        ThoughtLimit(told.budget, *marks) if told.budget >= 0 else None,
    )


_Key = tuple[int, bool, bytes]
"""Of a mask: its tokens, and as the wire has it."""


def _packed(mask: Mask) -> tuple[bool, bytes]:
    """A mask as the wire has it (see TokenMask), and whether that is by runs."""
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    if 4 * (len(changes) + 2) <= -(-len(mask) // 8):
        ends = [*([0] if mask[0] else []), *changes.tolist(), len(mask)]
        return True, np.diff(ends, prepend=0).astype("<u4").tobytes()
    return False, np.packbits(mask, bitorder="little").tobytes()


def _unpacked(mask: TokenMask) -> Mask:
    if not mask.by_runs:
        bits = np.unpackbits(np.frombuffer(mask.data, np.uint8), bitorder="little")
        return bits[: mask.size].astype(np.bool_)
    may = np.arange(len(mask.runs)) % 2 == 1
    found: Mask = np.repeat(may, mask.runs)
    return found


class MaskBook:
    """D0's: which masks of a request the last stage knows, and in which slots."""

    def __init__(self) -> None:
        self._slots: dict[_Key, int] = {}  # those used last at the end

    def allowed(self, ids: IntArray, masks: Sequence[Mask | None]) -> Allowed:
        """What the last stage is told with these rows, of which None have ended their answer.

        Raises CapacityError if that is more than may be said at once.
        """
        keys = [None if mask is None else (len(mask), *_packed(mask)) for mask in masks]
        own = dict.fromkeys(key for key in keys if key is not None)
        new = [key for key in own if key not in self._slots]
        if len(own) > MOST_MASKS or sum(len(data) for _, _, data in new) > MOST_BYTES:
            raise CapacityError("the grammar allows too many different things at once")
        if max((size for size, _, _ in new), default=0) > MOST_TOKENS:
            raise CapacityError(f"a vocabulary of more than {MOST_TOKENS} tokens has no grammar")
        for key in own:
            if key in self._slots:
                self._slots[key] = self._slots.pop(key)
        news = tuple(TokenMask(self._give_slot(key), *key) for key in new)
        slots = [-1 if key is None else self._slots[key] for key in keys]
        return Allowed(ids, np.array(slots, np.int64), news)

    def _give_slot(self, key: _Key) -> int:
        """A free one, or that which was not used for longest."""
        slot = len(self._slots)
        if slot == MOST_MASKS:
            slot = self._slots.pop(next(iter(self._slots)))
        self._slots[key] = slot
        return slot


class _Told:
    """A verify.rules.Grammar of one row: what was told of it, None: nothing."""

    def __init__(self, mask: TokenMask | None, *, ended: bool) -> None:
        self._mask, self._ended = mask, ended

    def allowed(self, answer: Answer) -> Mask:
        if self._ended:
            return np.zeros(1, np.bool_)
        if self._mask is None:
            raise ConfigError("the coordinator did not say what the grammar allows here")
        return _unpacked(self._mask)

    def has_ended(self, answer: Answer) -> bool:
        return self._ended


class FollowedRules:
    """The last stage's: a request's rules, and its answer as far as it was chosen."""

    def __init__(self, told: ToldRules) -> None:
        self._rules, self._answer = _rules_of(told), told.answer.tolist()
        self._is_masked = told.masked
        self._masks: dict[int, TokenMask] = {}
        self._slots: dict[int, int] = {}  # of the rows at hand

    def allow(self, allowed: Allowed | None) -> None:
        """What may come behind the rows that come next."""
        self._slots = {}
        if allowed is not None:
            # The frame that it came in is not kept for it.
            news = (TokenMask(m.slot, m.size, m.by_runs, bytes(m.data)) for m in allowed.masks)
            self._masks.update((mask.slot, mask) for mask in news)
            pairs = zip(allowed.ids.tolist(), allowed.slots.tolist(), strict=True)
            self._slots.update(pairs)

    def at(self, ids: IntArray) -> RulesAt:
        """The rules of these rows, the first of which is the newest of the answer."""
        told: list[Grammar] = []
        for row in ids.tolist() if self._is_masked else ():
            slot = self._slots.get(row, _UNTOLD)
            told.append(_Told(self._masks.get(slot), ended=slot == -1))
        return RulesAt(self._rules, tuple(self._answer), tuple(told))

    def chose(self, tokens: Sequence[int]) -> None:
        """These are the next ones of the answer."""
        self._answer += tokens
