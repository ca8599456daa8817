"""The pairwise cases of a matrix: each pair of values occurs in one."""

from __future__ import annotations

from support.covering import all_pairs, covering, pairs


def test_every_pair_occurs_and_cases_are_few() -> None:
    factors = {"long": "abcdefgh", "wide": range(12), "short": "xy", "dtype": ("16", "32", "64")}
    cases = covering(factors)
    covered = set().union(*map(pairs, cases))
    assert covered == set(all_pairs(factors))
    assert len(covered) == 8 * 12 + 8 * 2 + 8 * 3 + 12 * 2 + 12 * 3 + 2 * 3
    assert len(cases) == 8 * 12, "as many as the two longest factors have pairs"
