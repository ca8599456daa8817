"""The hybrid: merged by what was right, who guessed what, and when its model is asked."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from edgespec.drafting.base import Guesser, TokenPath
from edgespec.drafting.hybrid import HybridGuesser
from edgespec.drafting.steps import at_once
from edgespec.tree.drafted import Children
from edgespec.types.draft_pass import DraftPass
from edgespec.types.features import NO_FEATURES, NO_NEEDS, DraftNeeds, Features
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

TOKENS = 40


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


def test_what_runs_no_model_and_one_model_are_both_asked_always() -> None:
    """N-grams name other tokens than a model does."""
    looked_up = Scripted("looked_up", always((3, -0.2)))
    model = Scripted("model", always((4, -0.2)), rows=1)
    made = hybrid(looked_up, model)
    follow(made, lambda step: 4, 2 * TOKENS)
    assert looked_up.asked == model.asked == 2 * TOKENS
    work = [one.source for one in made.take_work() if isinstance(one, DraftPass)]
    assert work == ["model"] * 2 * TOKENS


def test_a_model_reads_what_it_missed_once_it_is_asked_again() -> None:
    """Every row once."""
    needs = DraftNeeds(final_hidden=True)
    needy = Scripted("needy", always((4, -0.1)), rows=10, needs=needs)
    made = hybrid(Scripted("grams", always((3, -0.1))), needy)
    assert made.needs == needs
    made.spare(1, free=True)
    follow(made, lambda step: 3, TOKENS, rows=True)
    assert len(needy.given) == len(needy.context) == 1, "it costs nothing meanwhile"
    made.spare(1, free=False)
    made.read(1, (0,) * (TOKENS + 2), row(TOKENS))
    finals = [features.final for features in needy.given if features.final]
    rows = [value for final in finals for value in np.frombuffer(final.data)]
    assert rows == list(range(TOKENS + 1)), "every row once, in order"


def test_the_next_turn_begins_with_what_every_member_read() -> None:
    """One that is not asked reads what it missed then, as it would be missing for ever."""
    needy = Scripted("needy", always((4, -0.1)), 10, needs=DraftNeeds(final_hidden=True))
    grams = Scripted("grams", always((3, -0.1)))
    made = hybrid(grams, needy)
    made.spare(1, free=True)
    follow(made, lambda step: 3, TOKENS, rows=True)
    assert len(needy.given) < TOKENS
    made.open(2, Sampling())
    made.fork(2, 1, 20, True)
    assert grams.forked == needy.forked == (2, 1, 20)
    finals = [features.final for features in needy.given if features.final]
    assert sum(final.shape[0] for final in finals) == TOKENS
    made.close(1)
    assert made.read(2, (0,) * 22, row(20))
    made.fork(2, 99, 20, True)


def test_a_request_can_be_guessed_for_without_its_models() -> None:
    """The model reads what it missed once it is asked again, and what is learnt of it stays."""
    grams, model = Scripted("ngram", always((1, -0.1))), Scripted("neural", always((2, -0.1)), 4)
    hybrid = HybridGuesser([grams, model])
    hybrid.open(1, Sampling())
    hybrid.spare(1, free=True)
    for count in range(1, 3 * TOKENS):
        assert hybrid.read(1, [9] * count, NO_FEATURES)
        assert hybrid.guess(1, [()], 4).tokens.tolist() == [1]
    assert (model.asked, model.context) == (0, ())
    hybrid.spare(1, free=False)
    hybrid.read(1, [9] * (3 * TOKENS), NO_FEATURES)
    assert sorted(hybrid.guess(1, [()], 4).tokens.tolist()) == [1, 2]
    assert len(model.context) == 3 * TOKENS


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
