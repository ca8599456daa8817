"""Covering: few cases of many factors, in which every pair of values of two factors occurs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Pair = frozenset[tuple[str, Any]]


def pairs(case: Mapping[str, Any]) -> set[Pair]:
    """What a case covers."""
    return {frozenset(two) for two in combinations(case.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[Pair]:
    """What all cases have to cover, in order."""
    found: list[Pair] = []
    for (one, ones), (other, others) in combinations(factors.items(), 2):
        found += [frozenset({(one, a), (other, b)}) for a, b in product(ones, others)]
    return found


def covering(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases that cover all pairs. Each takes the first pair that none has yet, and then for factor
    after factor the value with the most such pairs, of equal ones that taken least often."""
    missing = dict.fromkeys(all_pairs(factors))
    taken: Counter[tuple[str, Any]] = Counter()
    cases = []
    while missing:
        case: dict[str, Any] = dict(next(iter(missing)))
        for factor, values in factors.items():
            if factor not in case:
                new = {
                    value: sum(frozenset({(factor, value), had}) in missing for had in case.items())
                    for value in values
                }
                case[factor] = max(values, key=lambda v: (new[v], -taken[factor, v]))
        cases.append({factor: case[factor] for factor in factors})
        taken.update(case.items())
        for pair in pairs(case):
            missing.pop(pair, None)
    return cases
