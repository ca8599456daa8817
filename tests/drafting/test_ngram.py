"""N-gram guesses against a search written plainly, and what they learn."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.drafting.ngram import PRIORS, NgramGuesser
from edgespec.types.features import NO_FEATURES
from edgespec.verify.noise import gumbel
from edgespec.verify.sampling import Sampling

LETTERS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def guessed(
    guesser: NgramGuesser, path: tuple[int, ...] = (), width: int = 8
) -> list[tuple[int, float]]:
    """Tokens behind one path with their scores."""
    children = guesser.guess(1, [path], width)
    return list(zip(children.tokens.tolist(), children.scores.tolist(), strict=True))


def fresh(context: list[int], sampling: Sampling = Sampling()) -> NgramGuesser:  # noqa: B008
    """A guesser that has read nothing but this."""
    guesser = NgramGuesser()
    guesser.open(1, sampling)
    assert guesser.read(1, context, NO_FEATURES)
    return guesser


def plain_best(context: list[int], path: tuple[int, ...]) -> int | None:
    """What came most often behind the longest match, the newest of equals."""
    whole = [*context, *path]
    for length in PRIORS:
        tail = whole[-length:]
        ends = [
            at
            for at in range(length, len(context))
            if len(tail) == length and context[at - length : at] == tail
        ]
        if ends:
            counts = Counter(context[at] for at in reversed(ends[-32:]))
            return counts.most_common(1)[0][0]
    return None


@given(LETTERS, st.lists(st.integers(0, 3), max_size=8))
def test_the_best_guess_follows_the_longest_match(context: list[int], path: list[int]) -> None:
    found = guessed(fresh(context), tuple(path))
    best = plain_best(context, tuple(path))
    assert [token for token, _ in found[:1]] == ([] if best is None else [best])


@given(LETTERS, LETTERS)
def test_reading_in_parts_indexes_the_same(one: list[int], other: list[int]) -> None:
    parts = fresh(one)
    for end in range(len(one) + 1, len(one) + len(other) + 1):
        parts.read(1, [*one, *other][:end], NO_FEATURES)
    whole = fresh([*one, *other])
    mine, theirs = parts._requests[1], whole._requests[1]
    assert (mine.tokens, mine.places) == (theirs.tokens, theirs.places)


def test_several_matches_give_several_guesses() -> None:
    found = guessed(fresh([1, 2, 5, 1, 2, 6, 1, 2, 6, 3, 2, 7, 1, 2]))
    assert [token for token, _ in found] == [6, 5, 7]
    assert [score for _, score in found] == sorted((s for _, s in found), reverse=True)
    assert sum(math.exp(score) for _, score in found) <= 1.0


def test_success_raises_a_kind_of_guess_and_failure_lowers_it() -> None:
    before = guessed(fresh([1, 2, 3, 1]))[0]
    assert before[0] == 2
    guesser = fresh([1, 2, 3, 1])
    guesser.read(1, [1, 2, 3, 1, 2, 3, 1, 2, 3, 1], NO_FEATURES)
    guesser.open(1, Sampling())
    guesser.read(1, [8, 9, 8], NO_FEATURES)
    after = guessed(guesser)[0]
    assert after[0] == 9
    guesser.read(1, [8, 9, 8, 7, 8, 6, 8, 5, 8, 4, 8, 3, 8], NO_FEATURES)
    low, usual = (one._successes_of(Sampling()).share(1, 0) for one in (guesser, NgramGuesser()))
    assert low < usual < 1
    assert before[1] <= after[1]


def test_the_prompt_is_no_lesson() -> None:
    guesser = fresh([1, 2] * 20)
    assert not guesser._successes_of(Sampling())._seen


@pytest.mark.parametrize("seed", range(6))
def test_the_shared_noise_decides_between_equals(seed: int) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    context = [1, 5, 1, 6, 1]
    found = guessed(fresh(context, sampling))
    noise = dict(zip((5, 6), gumbel(seed, len(context), [5, 6]).tolist(), strict=True))
    shares = {6: PRIORS[1], 5: PRIORS[1] / 4}
    wanted = sorted(shares, key=lambda token: -(math.log(shares[token]) + noise[token]))
    assert [token for token, _ in found] == wanted


def test_nothing_stays_of_a_closed_request() -> None:
    guesser = fresh([1, 2, 1])
    guesser.close(1)
    guesser.close(1)
    assert not guesser._requests
