"""Oracle: guesses hold the right token as often as told, in the shape that drafting.base asks."""

from __future__ import annotations

import random

import pytest
from support.growers import SoloOracle
from support.passes import rows_of

from edgespec.tree.drafted import FROM_ROOT
from edgespec.verify.sampling import Sampling

WHOLE = (1, 2, 3, 4, 5, 6, 7, 8)


def oracle(accuracy: float, seed: int = 0) -> SoloOracle:
    made = SoloOracle(random.Random(seed), accuracy)
    made.tell(WHOLE)
    made.open(1, Sampling(0.0, 0, 1.0, 0.0, 0))
    return made


@pytest.mark.parametrize("seed", range(20))
def test_trees_are_well_formed(seed: int) -> None:
    tree = oracle(0.7, seed).refresh(1, (1, 2), 4, 3)
    for at, parent in enumerate(tree.parents.tolist()):
        assert FROM_ROOT <= parent < at
        assert tree.scores[at] <= (0.0 if parent == FROM_ROOT else tree.scores[parent])
    pairs = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


def test_a_sure_oracle_guesses_the_next_token_of_every_path_on_the_answer() -> None:
    tree = oracle(1.0).refresh(1, (1, 2), 1, 3)
    assert 3 in tree.tokens.tolist()
    children = oracle(1.0).expand(1, (1, 2), [(), (3,), (3, 4)], 2)
    for at, right in enumerate((3, 4, 5)):
        assert right in children.tokens[children.parents == at].tolist()


def test_children_are_sorted_and_as_many_as_asked() -> None:
    children = oracle(0.5).expand(1, (1, 2), [(3,), (9, 9)], 2)
    assert children.parents.tolist() == sorted(children.parents.tolist())
    for at in range(2):
        scores = children.scores[children.parents == at].tolist()
        assert 1 <= len(scores) <= 2
        assert scores == sorted(scores, reverse=True)
        assert max(scores) <= 0


def test_work_is_told_once_and_pass_by_pass() -> None:
    made = oracle(1.0)
    made.refresh(1, (1, 2), 0, 1)
    assert rows_of(made) == (2,)
    made.refresh(1, (1, 2, 3), 2, 1)
    assert rows_of(made) == (1, 1), "what was read is not run again"
    made.expand(1, (1, 2, 3), [(), (4,)], 1)
    assert rows_of(made) == (1,)
    assert rows_of(made) == ()


def test_closing_forgets() -> None:
    made = oracle(1.0)
    assert made.open_requests == 1
    made.close(1)
    made.close(2)
    assert made.open_requests == 0
