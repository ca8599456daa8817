"""What the last stage is told of a request's rules: few bytes, nothing lost, nothing believed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.segments import changed
from support.stages import REQUEST, Stage, faults, opening
from support.tiers import examples

from edgespec.backends.compute import CoordinatorCompute
from edgespec.decoding.effects import FindMasks
from edgespec.decoding.events import MasksFound
from edgespec.decoding.told_rules import MOST_BYTES, FollowedRules, MaskBook, told_rules
from edgespec.errors import CapacityError, ConfigError, RemoteProtocolError
from edgespec.machines.effects import SendCoordinator
from edgespec.machines.events import ComputeFailed
from edgespec.tree.ledger import IntArray
from edgespec.types.tensor import Tensor
from edgespec.verify.rules import Answer, Mask, Rules, ThoughtLimit
from edgespec.wire.codec import decode, packed
from edgespec.wire.messages import Fault
from edgespec.wire.segment import MOST_MASKS, MOST_TOKENS, Allowed, Choosing, Segment, TokenMask

MASKED = structs.replace(told_rules(Rules(), ()), masked=True)
RULES = Rules(
    None, 0.5, -0.25, ((5, 3.5), (0, -100.0)), 1.3, frozenset({9, 2}), 4, (1, 2),
    ThoughtLimit(7, (3,), (4, 5)),
)  # fmt: skip


def numbers(*values: int) -> IntArray:
    return np.array(values, np.int64)


def crossed(**changes: Any) -> Segment:
    """The end of a prompt with these fields, when it has crossed the ring."""
    back = decode(packed(changed(opening(), **changes)))
    assert isinstance(back, Segment)
    return back


def chooses(rules: Any = None, allowed: Any = None) -> Choosing:
    return Choosing(0.0, 0, 1.0, 0.0, 3, -1, rules, allowed)


def allowed_of(segment: Segment) -> Allowed:
    choosing = segment.parts[0].choosing
    assert choosing is not None
    assert choosing.allowed is not None
    return choosing.allowed


def masks(size: int) -> st.SearchStrategy[Mask]:
    """Of few runs and of many, nothing and all among them."""
    edges = st.lists(st.integers(0, size), max_size=4).map(sorted)
    runs = edges.map(lambda e: np.searchsorted(e, np.arange(size), side="right") % 2 == 1)
    noise = st.integers(0, 99).map(lambda seed: np.random.default_rng(seed).random(size) < 0.9)
    return st.one_of(runs, noise)


@given(data=st.data())
@examples(40)
def test_the_last_stage_has_the_masks_that_grammars_gave(data: st.DataObject) -> None:
    """Row by row, however many there are; and none takes more than a bit a token."""
    size = data.draw(st.sampled_from([1, 7, 8, 300, 5000]), "vocabulary")
    known = data.draw(st.lists(masks(size), min_size=1, max_size=6), "masks")
    book, follows = MaskBook(), FollowedRules(MASKED)
    told = 0
    for row in range(0, 60, 3):
        some = [data.draw(st.sampled_from([*known, None]), "mask") for _ in range(3)]
        ids = numbers(row, row + 1, row + 2)
        told_now = chooses(MASKED, book.allowed(ids, some))
        back = allowed_of(crossed(choosing=told_now))
        told += len(back.masks)
        assert all(len(mask.data) <= -(-size // 8) for mask in back.masks)
        follows.allow(back)
        rules = follows.at(ids)
        for grammar, mask in zip(rules.told, some, strict=True):
            assert grammar.has_ended(()) == (mask is None)
            if mask is not None:
                assert grammar.allowed(()).tolist() == mask.tolist()
    assert told <= len(known), "each is said once"


def test_what_a_rule_allows_takes_few_bytes() -> None:
    """Of 248,320 tokens: one, all but one, and what no runs can say."""
    some = [np.arange(248_320) == 77, np.arange(248_320) != 77, np.arange(248_320) % 3 == 0]
    told = MaskBook().allowed(numbers(1, 2, 3), some).masks
    assert [len(mask.data) for mask in told] == [12, 16, 248_320 // 8]


def test_more_masks_than_the_last_stage_keeps_take_turns() -> None:
    book, follows = MaskBook(), FollowedRules(MASKED)
    every = [np.arange(2000) == n for n in range(MOST_MASKS + 40)]
    for n in [*range(len(every)), 5, 45, 5]:
        follows.allow(book.allowed(numbers(n), [every[n]]))
        (grammar,) = follows.at(numbers(n)).told
        assert grammar.allowed(()).tolist() == every[n].tolist()
    assert len(book.allowed(numbers(5), [every[5]]).masks) == 0
    with pytest.raises(CapacityError, match="too many different things"):
        book.allowed(np.arange(len(every)), every)


def test_masks_have_a_bound_of_bytes() -> None:
    dense = [np.arange(MOST_TOKENS) % 64 < n % 32 + 2 for n in range(32)]
    dense += [~mask for mask in dense]
    most = MOST_BYTES // (MOST_TOKENS // 8)
    assert most == 32
    assert len(MaskBook().allowed(np.arange(most), dense[:most]).masks) == most
    with pytest.raises(CapacityError, match="too many different things"):
        MaskBook().allowed(np.arange(most + 1), dense[: most + 1])
    with pytest.raises(CapacityError, match="a vocabulary of more than"):
        MaskBook().allowed(numbers(1), [np.ones(MOST_TOKENS + 1, np.bool_)])


def test_the_last_stage_has_the_rules_of_d0() -> None:
    told = told_rules(RULES, (8, 8))
    back = crossed(choosing=chooses(told)).parts[0].choosing
    assert back is not None
    assert back.rules is not None
    follows = FollowedRules(back.rules)
    follows.chose([1])
    found = follows.at(numbers(3))
    assert (found.rules, found.answer, found.told) == (RULES, (8, 8, 1), ())
    assert FollowedRules(told_rules(Rules(), ())).at(numbers(1)).rules == Rules()


def mask(**changes: Any) -> Allowed:
    """Of one row, and one mask of 16 tokens by bits, with other fields."""
    one = structs.replace(TokenMask(0, 16, False, b"ab"), **changes)
    return Allowed(numbers(1), numbers(0), (one,))


def runs(*lengths: int) -> bytes:
    return np.array(lengths, "<u4").tobytes()


LIES = [
    {"choosing": chooses(None, lie)}
    for lie in (
        mask(slot=-1),
        mask(slot=MOST_MASKS),
        mask(size=0),
        mask(size=17),
        mask(size=MOST_TOKENS + 1, data=bytes(MOST_TOKENS // 8 + 1)),
        mask(data=b"abc"),
        mask(by_runs=True, data=runs(8, 8)),
        mask(by_runs=True, size=64, data=runs(60)),
        mask(by_runs=True, size=64, data=runs(2**32 - 1, 65)),
        mask(by_runs=True, size=64, data=runs(64)[:3]),
        structs.replace(mask(), slots=numbers(0, 0)),
        structs.replace(mask(), slots=numbers(MOST_MASKS)),
        structs.replace(mask(), slots=numbers(-2)),
        structs.replace(mask(), masks=mask().masks * 257),
    )
] + [
    {"choosing": chooses(structs.replace(told_rules(RULES, ()), **lie))}
    for lie in (
        {"biased": numbers(1)},
        {"biased": numbers(-1, 1)},
        {"bias": Tensor("float64", (2,), np.array([np.nan, 1.0]).tobytes())},
        {"bias": Tensor("float64", (2, 1), bytes(16))},
        {"repetition": 0.0},
        {"repetition": -1.0},
        {"budget": -2},
        {"least": -1},
        {"ends": numbers(-1)},
        {"answer": numbers(-7)},
        {"prompt": numbers(-7)},
    )
]


@pytest.mark.parametrize("lie", LIES, ids=range(len(LIES)))
def test_rules_that_cannot_be_are_refused(lie: dict[str, Any]) -> None:
    frame = packed(changed(opening(), **lie))
    with pytest.raises(RemoteProtocolError, match="malformed message"):
        decode(frame)


def test_what_is_right_beside_those_lies_is_taken() -> None:
    for right in (mask(), mask(by_runs=True, size=64, data=runs(60, 4))):
        (back,) = allowed_of(crossed(choosing=chooses(None, right))).masks
        assert bytes(back.data) == right.masks[0].data


def test_a_row_of_which_nothing_was_said_chooses_nothing() -> None:
    follows = FollowedRules(MASKED)
    follows.allow(None)
    (grammar,) = follows.at(numbers(3)).told
    with pytest.raises(ConfigError, match="did not say what the grammar allows"):
        grammar.allowed(())


def test_a_request_that_cannot_be_served_is_told_so_by_the_last_stage() -> None:
    """What its rules leave no token of is its own fault, and not the ring's."""
    for kind in ("invalid", ""):
        stage = Stage(is_last=True)
        stage.segment(changed(opening(), choosing=chooses(MASKED)))
        (head,) = stage.done()
        effects = stage.tell(ComputeFailed(head.job, REQUEST, "no token", kind))  # type: ignore[attr-defined]
        assert faults(effects) == ["no token"]
        assert SendCoordinator(Fault(REQUEST, "no token", invalid=kind == "invalid")) in effects


def test_a_grammar_that_breaks_holds_up_no_other_request() -> None:
    """The segment that waits for both leaves: only its own request is told."""

    class Words:
        def allowed(self, answer: Answer) -> Mask:
            return np.ones(len(answer), np.bool_)

        def has_ended(self, answer: Answer) -> bool:
            return False

    class Broken(Words):
        def allowed(self, answer: Answer) -> Mask:
            raise RuntimeError("the matcher is poisoned")

    asked = ((1, Broken(), ((3, 4),)), (2, Words(), ((3, 4, 5),)))
    event = CoordinatorCompute(None, None).perform(FindMasks(7, asked), lambda: False)
    assert isinstance(event, MasksFound)
    (_, why), (_, masks) = event.found
    assert why == "RuntimeError: the matcher is poisoned"
    assert not isinstance(masks, str)
    assert [None if one is None else len(one) for one in masks] == [3]
