"""RowLedger against a naive reference that knows every row's whole path."""

from __future__ import annotations

import random
from collections.abc import Callable
from copy import deepcopy

import numpy as np
import pytest
from support.tiers import tiered

from edgespec.errors import RemoteProtocolError
from edgespec.tree.ledger import NO_PARENT, RetainSet, RowLedger, Rows


def rows(*triples: tuple[int, int, int]) -> Rows:
    """Rows from (id, parent, position)."""
    ids, parents, positions = np.array(triples, np.int64).reshape(-1, 3).T
    return Rows(ids.copy(), parents.copy(), ids.copy(), positions.copy())


def state(ledger: RowLedger) -> dict[str, object]:
    """Everything that a ledger knows, to be compared."""
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in vars(ledger).items()}


class Truth:
    """A coordinator that grows, sends and prunes a tree, and writes down each row's path."""

    def __init__(self, rng: random.Random, prompt: int) -> None:
        self.rng = rng
        self.path_of = {i: tuple(range(i + 1)) for i in range(prompt)}
        self.newest = prompt
        self.root = prompt
        self.path_of[prompt] = tuple(range(prompt + 1))
        self.live = {prompt}
        self.unsent = [prompt]
        self.epoch = 0
        self.accepted: list[int] = []

    def grow(self) -> None:
        for _ in range(self.rng.randint(0, 6)):
            self._add(self.rng.choice(sorted(self.live)))

    def _add(self, parent: int) -> None:
        self.newest += 1
        self.path_of[self.newest] = (*self.path_of[parent], self.newest)
        self.live.add(self.newest)
        self.unsent.append(self.newest)

    def segment(self) -> Rows:
        """One to four unsent rows, parents first; often just one."""
        count = self.rng.choice((1, 1, 1, 2, 4))
        taken, self.unsent = self.unsent[:count], self.unsent[count:]
        return rows(*((i, self.path_of[i][-2], len(self.path_of[i]) - 1) for i in taken))

    def advance(self) -> RetainSet | None:
        """Accept a random sent path below the root; its end, or a token not guessed, is next."""
        path = [self.root]
        while path[-1] not in self.unsent and self.rng.random() < 0.7:
            children = [i for i in self.live if self.path_of[i][-2] == path[-1]]
            if not children:
                break
            path.append(self.rng.choice(sorted(children)))
        if path[-1] not in self.unsent and self.rng.random() < 0.4:
            self._add(path[-1])  # a miss: a root that nobody guessed
            path.append(self.newest)
        passed, self.root = path[:-1], path[-1]
        if not passed:
            return None
        self.live = {i for i in self.live if self.root in self.path_of[i]}
        self.unsent = [i for i in self.unsent if i in self.live]
        self.accepted += passed
        self.epoch += 1
        return RetainSet(self.epoch, self.newest, tuple(self.accepted), frozenset(self.live))


class Checked:
    """A ledger and a cache that moves as it says; every row of it is checked for what it sees."""

    def __init__(self, truth: Truth, prompt: int) -> None:
        self.truth = truth
        self.ledger = RowLedger()
        self.keep = RetainSet(0, -1, (), frozenset())
        self.cache = list(range(prompt))
        self.ledger.commit(rows(*((i, i - 1, i) for i in range(prompt))))

    def receive(self, segment: Rows) -> None:
        """As a stage does it: what the newest retained set drops is left out first."""
        segment = segment.take(np.flatnonzero(self.keep.keeps(segment.ids)))
        sees = self.ledger.append(segment)
        committed = self.cache[: self.ledger.committed]
        self.cache += segment.ids.tolist()
        behind = np.array(self.cache[self.ledger.committed :], np.int64)
        assert sees.shape == (len(segment), len(behind))
        for row_id, seen in zip(segment.ids.tolist(), sees, strict=True):
            visible = sorted([*committed, *behind[seen].tolist()])
            assert tuple(visible) == self.truth.path_of[row_id]

    def retain(self, keep: RetainSet) -> None:
        start = self.ledger.committed
        order = self.ledger.retain(keep)
        if order is not None:
            self.cache[start:] = [self.cache[start + i] for i in order.tolist()]
        self.keep = max(self.keep, keep, key=lambda k: k.epoch)
        assert self.cache == [*self.cache[: self.ledger.committed], *self.ledger.speculative]
        assert len(self.cache) == len(self.ledger)
        assert len(set(self.cache)) == len(self.cache)
        assert bool(self.keep.keeps(np.array(self.ledger.speculative, np.int64)).all())
        last = self.ledger.last_committed
        assert tuple(self.cache[: self.ledger.committed]) == self.truth.path_of[last]


@pytest.mark.parametrize("chunk", tiered(range(10), range(3)))
def test_every_row_sees_its_own_path_whenever_retained_sets_come(chunk: int) -> None:
    for seed in range(chunk * 60, chunk * 60 + 60):
        rng = random.Random(seed)
        prompt = rng.randint(1, 5)
        truth = Truth(rng, prompt)
        prompt_and_late = (0.0, 0.3, 1.0)
        stages = [(Checked(truth, prompt), rng.choice(prompt_and_late)) for _ in range(3)]
        sets: list[RetainSet] = []
        try:
            for _ in range(25):
                truth.grow()
                if truth.unsent:
                    segment = truth.segment()
                    for checked, _ in stages:
                        checked.receive(segment)
                if (made := truth.advance()) is not None:
                    sets.append(made)
                for checked, late in stages:
                    # Any of the sets so far, any number of times, in any order, or never.
                    while sets and rng.random() > late:
                        checked.retain(rng.choice(sets[-4:]))
                        if rng.random() < 0.3:
                            break
        except BaseException:
            print(f"seed {seed}")
            raise


def test_all_stages_agree_once_they_have_the_same_set() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        truth = Truth(rng, 2)
        slow, fast = Checked(truth, 2), Checked(truth, 2)
        newest = None
        for _ in range(20):
            truth.grow()
            if truth.unsent:
                segment = truth.segment()
                slow.receive(segment)
                fast.receive(segment)
            if (made := truth.advance()) is not None:
                newest = made
                fast.retain(made)
        if newest is not None:
            slow.retain(newest)
            assert state(slow.ledger) == state(fast.ledger), f"seed {seed}"


def test_a_lone_row_does_not_see_its_sibling() -> None:
    ledger = RowLedger()
    ledger.commit(rows((0, NO_PARENT, 0)))
    ledger.append(rows((1, 0, 1)))
    ledger.append(rows((2, 1, 2)))
    assert ledger.append(rows((3, 1, 2))).tolist() == [[True, False, True]]


def test_rows_above_the_watermark_are_untouched() -> None:
    ledger = _grown()
    order = ledger.retain(RetainSet(1, 2, (1,), frozenset({2})))
    assert order is not None
    assert order.tolist() == [0, 1, 2, 3]
    assert ledger.speculative == (2, 3, 4)


def test_a_set_keeps_what_it_names_and_what_it_cannot_know() -> None:
    keep = RetainSet(1, 5, (2,), frozenset({4}))
    ids = np.array([1, 2, 3, 4, 5, 6, 7])
    assert keep.keeps(ids).tolist() == [False, True, False, True, False, True, True]
    assert keep.keeps(ids[:0]).tolist() == []


def test_what_is_named_in_neither_list_goes() -> None:
    ledger = _grown()
    order = ledger.retain(RetainSet(1, 4, (1,), frozenset({3})))
    assert order is not None
    assert order.tolist() == [0, 2]
    assert (ledger.committed, ledger.last_committed, ledger.speculative) == (2, 1, (3,))


def test_an_older_or_repeated_set_changes_nothing() -> None:
    ledger = _grown()
    ledger.retain(RetainSet(5, 4, (1,), frozenset({2, 4})))
    before = deepcopy(state(ledger))
    for epoch in (5, 4, 1):
        assert ledger.retain(RetainSet(epoch, 100, (1, 2), frozenset())) is None
        assert state(ledger) == before


def test_accepted_rows_committed_before_are_passed_over() -> None:
    ledger = _grown()
    ledger.retain(RetainSet(1, 4, (1,), frozenset({2, 4})))
    ledger.retain(RetainSet(2, 4, (1, 2), frozenset({4})))
    assert (ledger.committed, ledger.last_committed, ledger.speculative) == (3, 2, (4,))


def _grown() -> RowLedger:
    """0 committed; 1 below it; 2 and 3 below 1; 4 below 2."""
    ledger = RowLedger()
    ledger.commit(rows((0, NO_PARENT, 0)))
    ledger.append(rows((1, 0, 1), (2, 1, 2), (3, 1, 2), (4, 2, 3)))
    return ledger


def _retain(
    accepted: tuple[int, ...], retained: set[int], mark: int = 100
) -> Callable[[RowLedger], object]:
    return lambda ledger: ledger.retain(RetainSet(9, mark, accepted, frozenset(retained)))


MALFORMED: dict[str, Callable[[RowLedger], object]] = {
    "unknown parent": lambda x: x.append(rows((5, 99, 3))),
    "parent is a committed row before the last": lambda x: x.append(rows((5, NO_PARENT, 0))),
    "repeated id": lambda x: x.append(rows((4, 2, 3))),
    "repeated id in one segment": lambda x: x.append(rows((5, 2, 3), (5, 2, 3))),
    "child before its parent": lambda x: x.append(rows((6, 5, 4), (5, 2, 3))),
    "id below its parent's": lambda x: x.append(rows((5, 2, 3), (3, 5, 4))),
    "its own parent": lambda x: x.append(rows((5, 5, 3))),
    "position too far": lambda x: x.append(rows((5, 2, 4))),
    "position of the parent": lambda x: x.append(rows((5, 2, 2))),
    "negative position": lambda x: x.append(rows((5, 0, -1))),
    "good row, then a bad one": lambda x: x.append(rows((5, 2, 3), (6, 5, 9))),
    "committed behind speculative": lambda x: x.commit(rows((5, 0, 1))),
    "accepts a path with a gap": _retain((2,), set()),
    "accepts siblings": _retain((1, 2, 3), set()),
    "accepts a row twice": _retain((1, 1), set()),
    "accepts in the wrong order": _retain((2, 1), set()),
    "keeps a sibling of what it accepts": _retain((1, 2), {3}),
    "keeps a child without its parent": _retain((), {1, 4}),
    "keeps only rows above the watermark, whose parents go": _retain((), set(), mark=1),
}


@pytest.mark.parametrize("act", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_input_changes_nothing(act: Callable[[RowLedger], object]) -> None:
    ledger = _grown()
    before = deepcopy(state(ledger))
    with pytest.raises(RemoteProtocolError):
        act(ledger)
    assert state(ledger) == before


@pytest.mark.parametrize(
    "bad",
    [
        rows((2, 1, 3)),  # a gap in positions
        rows((2, 0, 2)),  # a parent that is not the row before
        rows((2, 1, 2), (3, 1, 3)),
        rows((1, 1, 2)),  # an id that was there
        rows((3, 1, 2), (2, 3, 3)),  # ids that shrink
    ],
)
def test_certain_rows_must_continue_the_committed_ones(bad: Rows) -> None:
    ledger = RowLedger()
    ledger.commit(rows((0, NO_PARENT, 0), (1, 0, 1)))
    before = deepcopy(state(ledger))
    with pytest.raises(RemoteProtocolError):
        ledger.commit(bad)
    assert state(ledger) == before


def test_empty_rows_change_nothing() -> None:
    ledger = _grown()
    before = deepcopy(state(ledger))
    assert ledger.append(rows()).shape == (0, 4)
    assert state(ledger) == before
    fresh = RowLedger()
    fresh.commit(rows())
    assert (len(fresh), fresh.last_committed) == (0, NO_PARENT)


def test_what_append_returned_stays_as_it_was() -> None:
    ledger = _grown()
    sees = ledger.append(rows((5, 4, 4)))
    before = sees.copy()
    ledger.append(rows((6, 5, 5)))
    ledger.retain(RetainSet(1, 6, (1, 2), frozenset({4, 5, 6})))
    assert (sees == before).all()
