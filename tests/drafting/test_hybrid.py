"""The hybrid: merged by what was right, who guessed what, and which of its models is asked."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.hybrid import AGAIN, LEAST, MOST, HybridGuesser, ModelChoice
from edgespec.drafting.steps import at_once
from edgespec.tree.drafted import Children
from edgespec.types.draft_pass import DraftPass
from edgespec.types.features import NO_FEATURES, NO_NEEDS, DraftNeeds, Features
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling


class Scripted(Guesser):
    """A guesser that says what a function says, by a model if it charges rows."""

    def __init__(
        self,
        name: str,
        says: Callable[[tuple[int, ...]], list[tuple[int, float]]],
        rows: int = 0,
        needs: DraftNeeds = NO_NEEDS,
    ) -> None:
        super().__init__(name, needs)
        self._says, self._rows = says, rows
        self.context: tuple[int, ...] = ()
        self.asked = 0
        self.given: list[Features] = []
        self.forked = (0, 0, 0)

    @property
    def is_free(self) -> bool:
        """See above."""
        return not self._rows

    def open(self, request: int, sampling: Sampling) -> None:
        """Begin."""
        self.context = ()

    def fork(self, request: int, base: int, rows: int, ends: bool) -> None:
        """Note it."""
        self.forked = (request, base, rows)

    @at_once
    def reading(self, request: int, context: Sequence[int], features: Features) -> bool:
        """Keep it."""
        self.context = tuple(context)
        self.given.append(features)
        return True

    @at_once
    def guessing(self, request: int, paths: Sequence[TokenPath], width: int) -> Children:
        """What the script says."""
        self.asked += 1
        if self._rows:
            self.ran(self._rows)
        found = [
            (index, token, score)
            for index, path in enumerate(paths)
            for token, score in self._says((*self.context, *path))[:width]
        ]
        parents, tokens, scores = zip(*found, strict=True) if found else ((),) * 3
        return Children(np.array(parents, int), np.array(tokens, int), np.array(scores, float))

    def close(self, request: int) -> None:
        """End."""


def always(*guesses: tuple[int, float]) -> Callable[[tuple[int, ...]], list[tuple[int, float]]]:
    """The same guesses everywhere."""
    return lambda context: list(guesses)


def hybrid(*members: Scripted) -> HybridGuesser:
    """Of these, with request 1 open and read."""
    made = HybridGuesser(members)
    made.open(1, Sampling())
    made.read(1, (0,), NO_FEATURES)
    return made


def row(value: int) -> Features:
    """Those of one committed row."""
    return Features(Tensor("float64", (1, 1), np.float64(value).tobytes()))


def follow(
    made: HybridGuesser, right: Callable[[int], int], count: int, rows: bool = False
) -> list[bool]:
    """So many committed tokens, each guessed before: whether it was among the guesses. `rows`: with
    features, counted from 0."""
    hits = []
    context = made._requests[1].context
    for step in range(count):
        children = made.guess(1, [()], 4)
        token = right(step)
        hits.append(token in children.tokens.tolist())
        context = (*context, token)
        made.read(1, context, row(len(context) - 2) if rows else NO_FEATURES)
    return hits


def test_what_two_name_is_named_once() -> None:
    one = Scripted("one", always((3, math.log(0.5)), (4, math.log(0.3))))
    two = Scripted("two", always((3, math.log(0.5)), (5, math.log(0.4))))
    made = hybrid(one, two)
    children = made.guess(1, [(), (7,)], 4)
    assert children.parents.tolist() == [0, 0, 0, 1, 1, 1]
    assert children.tokens.tolist() == [3, 5, 4] * 2
    assert children.made_by.tolist() == [3, 2, 1] * 2
    assert np.exp(children.scores[:3]) == pytest.approx([0.5, 0.4, 0.3])
    assert made.name == "hybrid:one+two"
    assert len(made.guess(1, [()], 1)) == 1


def test_scores_become_how_often_their_like_were_right() -> None:
    boaster = Scripted("boaster", always((3, math.log(0.9))))
    modest = Scripted("modest", always((4, math.log(0.2))))
    made = hybrid(boaster, modest)
    rng = random.Random(1)
    follow(made, lambda step: 4 if rng.random() < 0.8 else 9, 40)
    children = made.guess(1, [()], 2)
    assert children.tokens.tolist() == [4, 3]
    assert np.exp(children.scores[0]) > 0.6
    assert np.exp(children.scores[1]) < 0.3


def test_who_agrees_with_whom_is_learnt() -> None:
    one = Scripted("one", always((3, math.log(0.5)), (5, math.log(0.4))))
    two = Scripted("two", always((4, math.log(0.6)), (5, math.log(0.3))))
    made = hybrid(one, two)
    assert made.guess(1, [()], 4).tokens.tolist() == [4, 3, 5]
    follow(made, lambda step: (5, 5, 3)[step % 3], 126)
    children = made.guess(1, [()], 4)
    assert children.tokens.tolist() == [5, 3, 4], "both; the first alone; the second alone"
    assert np.exp(children.scores) == pytest.approx([2 / 3, 1 / 3, 0.0], abs=0.12)


def test_what_several_name_has_the_mean_of_their_log_odds() -> None:
    """A model's count twice."""
    shares = Scripted("shares", always((3, math.log(0.9)), (4, math.log(0.5))))
    model = Scripted("model", always((3, math.log(0.2)), (5, math.log(0.7))), rows=10)
    made = hybrid(shares, model)
    children = made.guess(1, [()], 4)
    assert children.tokens.tolist() == [5, 4, 3]
    odds = (9 * 0.25**2) ** (1 / 3)
    assert np.exp(children.scores) == pytest.approx([0.7, 0.5, odds / (1 + odds)])
    two = Scripted("two", always((3, math.log(0.2))))
    children = hybrid(shares, two).guess(1, [()], 4)
    assert np.exp(children.scores[0]) == pytest.approx(1.5 / 2.5)


def test_who_has_nothing_to_say_of_a_path_disagrees_with_nobody() -> None:
    """Where the other one does not know the context, a guess is worth what it says."""
    sure = Scripted("sure", always((3, math.log(0.9))))
    picky = Scripted("picky", lambda context: [(4, -0.1)] if len(context) % 2 else [])
    made = hybrid(sure, picky)
    follow(made, lambda step: 3 if step % 2 else 4, 200)
    children = made.guess(1, [(), (4,)], 2)
    assert children.tokens.tolist() == [4, 3, 3]
    assert np.exp(children.scores) == pytest.approx([1.0, 0.0, 1.0], abs=0.15)


def test_of_two_models_the_better_one_is_asked() -> None:
    """Both until it is clear which guesses better, then that one alone until both are tried again;
    what runs none beside them always."""
    rng = random.Random(2)
    good, bad = (
        Scripted(name, always((token, -0.2), (other, -1.8)), rows=rows)
        for name, token, other, rows in (("good", 3, 4, 30), ("bad", 4, 3, 20))
    )
    cheap = Scripted("cheap", always((5, -1.0)))
    made = hybrid(bad, cheap, good)

    def asked(tokens: int, share: float) -> tuple[int, int]:
        """How often each was asked for so many tokens of a request, in which 3 has that share of
        what is not 5."""
        before = bad.asked, good.asked
        may = 3, 4, 5
        shares = 0.9 * share, 0.9 * (1 - share), 0.1
        follow(made, lambda step: rng.choices(may, shares)[0], tokens)
        made.open(1, Sampling())
        made.read(1, (0,), NO_FEATURES)
        return bad.asked - before[0], good.asked - before[1]

    assert asked(AGAIN, 0.9) == (LEAST, AGAIN), "it is soon clear; both again much later"
    assert asked(LEAST, 0.9) == (0, LEAST), "they change where a request begins"
    together, alone = asked(AGAIN, 0.0)
    assert (together, alone < MOST) == (AGAIN, True), "the other one is better now"
    assert cheap.asked == 2 * AGAIN + LEAST


def test_what_a_member_says_that_is_asked_alone_stays_as_it_is() -> None:
    """So that a hybrid is no worse than the member that goes on, which has scores that compare."""
    good, bad = (
        Scripted(name, always((token, -0.2), (other, -1.8)), rows=20)
        for name, token, other in (("good", 3, 4), ("bad", 4, 3))
    )
    made = hybrid(bad, good)
    follow(made, lambda step: 3, 3 * LEAST)
    assert made.guess(1, [()], 2).tokens.tolist() == [3, 4]
    assert made.guess(1, [()], 2).scores.tolist() == [-0.2, -1.8]


def test_what_runs_no_model_and_one_model_are_both_asked_always() -> None:
    """N-grams name other tokens than a model does."""
    looked_up = Scripted("looked_up", always((3, -0.2)))
    model = Scripted("model", always((4, -0.2)), rows=1)
    made = hybrid(looked_up, model)
    follow(made, lambda step: 4, 2 * MOST)
    assert looked_up.asked == model.asked == 2 * MOST
    work = [one.source for one in made.take_work() if isinstance(one, DraftPass)]
    assert work == ["model"] * 2 * MOST


@pytest.mark.parametrize("better", [0, 1, 2])
def test_models_are_compared_on_the_same_tokens(better: int) -> None:
    """How hard a text is changes far more than which of three models guesses it best."""
    rng, found = random.Random(7), ModelChoice(range(3))
    comparing = MOST
    for step in range(MOST):
        if not all(map(found.asks, range(3))):
            comparing = min(comparing, step)
        hard = step // 20 % 2 * 0.6
        worth = {number: (rng.random() > hard) * 0.5 for number in range(3)}
        worth[better] += 0.2
        found.learn(worth)
    assert comparing >= LEAST
    assert [number for number in range(4) if found.asks(number)] == [better, 3]


def test_of_equals_one_is_asked_after_all() -> None:
    found = ModelChoice((0, 1))
    for _ in range(MOST):
        assert found.asks(0)
        assert found.asks(1)
        found.learn({0: 0.5, 1: 0.5})
    assert found.asks(0) != found.asks(1)


def test_a_model_that_cannot_guess_is_compared_with_none() -> None:
    """Its context is too short, say: all are still asked, as the other may fail later."""
    found = ModelChoice((0, 1))
    for _ in range(2 * MOST):
        found.learn({1: 0.5})
    assert found.asks(0)
    assert found.asks(1)


def test_a_model_reads_what_it_missed_once_it_is_asked_again() -> None:
    """The one that was not chosen, and every row once."""
    needs = DraftNeeds(final_hidden=True)
    needy = Scripted("needy", always((4, -0.1)), rows=10, needs=needs)
    made = hybrid(Scripted("better", always((3, -0.1)), rows=10), needy)
    assert made.needs == needs
    follow(made, lambda step: 3, AGAIN + LEAST, rows=True)
    assert len(needy.given) == len(needy.context) == LEAST, "it costs nothing meanwhile"
    made.open(2, Sampling())
    needy.context = ()
    made.read(1, (0,) * (AGAIN + LEAST + 2), row(AGAIN + LEAST))
    finals = [features.final for features in needy.given if features.final]
    rows = [value for final in finals for value in np.frombuffer(final.data)]
    assert rows == list(range(AGAIN + LEAST + 1)), "every row once, in order"


def test_the_next_turn_begins_with_what_every_member_read() -> None:
    """One that is not asked reads what it missed then, as it would be missing for ever."""
    needy = Scripted("needy", always((4, -0.1)), 10, needs=DraftNeeds(final_hidden=True))
    better = Scripted("better", always((3, -0.1)), rows=10)
    made = hybrid(better, needy)
    follow(made, lambda step: 3, LEAST + 7, rows=True)
    assert len(needy.given) < LEAST + 7
    made.open(2, Sampling())
    made.fork(2, 1, 20, True)
    assert better.forked == needy.forked == (2, 1, 20)
    finals = [features.final for features in needy.given if features.final]
    assert sum(final.shape[0] for final in finals) == LEAST + 7
    made.close(1)
    assert made.read(2, (0,) * 22, row(20))
    made.fork(2, 99, 20, True)


def test_a_request_can_be_guessed_for_without_its_models() -> None:
    """The model reads what it missed once it is asked again, and what is learnt of it stays."""
    grams, model = Scripted("ngram", always((1, -0.1))), Scripted("neural", always((2, -0.1)), 4)
    hybrid = HybridGuesser([grams, model])
    hybrid.open(1, Sampling())
    hybrid.spare(1, free=True)
    for count in range(1, 3 * MOST):
        assert hybrid.read(1, [9] * count, NO_FEATURES)
        assert hybrid.guess(1, [()], 4).tokens.tolist() == [1]
    assert (model.asked, model.context) == (0, ())
    hybrid.spare(1, free=False)
    hybrid.read(1, [9] * (3 * MOST), NO_FEATURES)
    assert sorted(hybrid.guess(1, [()], 4).tokens.tolist()) == [1, 2]
    assert len(model.context) == 3 * MOST


def test_guesses_that_rank_nothing_better_are_left_out_until_they_do() -> None:
    """They would take the places of the model's own."""
    grams = Scripted("grams", always((5, -0.2), (7, -0.4)))
    model = Scripted("model", always((3, -0.3), (6, -1.5)), rows=10)
    made = hybrid(grams, model)
    assert made.guess(1, [()], 4).tokens.tolist() == [5, 3, 7, 6]
    follow(made, lambda step: 3, 128)
    children = made.guess(1, [()], 4)
    assert (children.tokens.tolist(), children.scores.tolist()) == ([3, 6], [-0.3, -1.5])
    assert grams.asked == model.asked, "they cost nothing"
    hits = follow(made, lambda step: 5, 40)
    assert all(hits[8:])
