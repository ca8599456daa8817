"""What a worker takes next: heads together, drafts together, long texts in parts, all in order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from support.cases import case

from edgespec.backends.jobs import Drafts, ReadPart, RunHeads, effects_of
from edgespec.backends.waiting import Waiting
from edgespec.decoding.drafting import READ_ONLY
from edgespec.decoding.effects import CloseDraft, Draft, GatherRows, OpenDraft, RunHead
from edgespec.drafting.base import PASS_ROWS
from edgespec.machines.effects import Effect
from edgespec.policy.base import Deepen, Expand, Grow, Plan
from edgespec.tree.ledger import Rows
from edgespec.types.features import Features
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Sampling

EXPAND = Expand((1,), 2, 4)


def head(request: int, rows: int = 1) -> RunHead:
    ids = np.arange(rows)
    hidden = Tensor("float32", (rows, 1), bytes(4 * rows))
    return RunHead(10 + request, request, hidden, Rows(ids, ids - 1, ids, ids), Sampling())


def draft(request: int, plan: Plan = EXPAND, context: int = 1) -> Draft:
    paths = ((),) if isinstance(plan, Expand) else ()
    return Draft(20 + request, request, plan, (0,) * context, paths)


def jobs(*effects: Effect) -> list[Effect]:
    """In the order in which they are carried out, all asked for at once."""
    waiting = Waiting()
    for effect in effects:
        waiting.add(effect)
    return list(drained(waiting))


def drained(waiting: Waiting) -> Sequence[Effect]:
    found = []
    while waiting:
        found.append(waiting.take()[1])
    return found


def test_heads_go_first_and_together() -> None:
    gather = GatherRows(1, 0, np.zeros(1, np.int64))
    assert jobs(gather, draft(1), head(1)) == [head(1), gather, draft(1)]
    assert jobs(head(1), gather, head(2), head(3)) == [
        RunHeads((head(1), head(2), head(3))),
        gather,
    ]


def test_drafts_of_one_kind_go_together() -> None:
    assert jobs(draft(1), draft(2), draft(3)) == [Drafts((draft(1), draft(2), draft(3)))]
    grow, deepen = draft(1, Grow(3, 2, 8)), draft(2, Deepen(1, 2, 8), 0)
    assert jobs(grow, draft(3), deepen) == [Drafts((grow, deepen)), draft(3)]


def test_no_draft_passes_what_its_own_request_asked_for_before() -> None:
    opened, ended = OpenDraft(3, Sampling(), base=2, rows=1), CloseDraft(4)
    effects = [draft(1), draft(1), opened, draft(2), draft(3), draft(5), ended, draft(4)]
    first, second = Drafts((draft(1), draft(5))), Drafts((draft(2), draft(3)))
    assert jobs(*effects) == [first, draft(1), opened, second, ended, draft(4)]


def test_what_was_asked_for_later_does_not_join() -> None:
    waiting = Waiting()
    for at, effect in ((1.0, head(1)), (2.0, head(2)), (3.0, head(3))):
        waiting.add(effect, at)
        waiting.add(draft(effect.request), at)
    assert waiting.head_at == 1.0
    assert waiting.take(0.5) == (1.0, head(1))
    assert waiting.take(3.0) == (2.0, RunHeads((head(2), head(3))))
    assert waiting.head_at is None
    assert waiting.first == (1.0, draft(1))
    assert waiting.take(2.5) == (1.0, Drafts((draft(1), draft(2))))
    assert waiting.take(0.0) == (3.0, draft(3))


def test_a_job_has_no_more_rows_than_a_pass() -> None:
    half = PASS_ROWS // 2
    taken = jobs(head(1, half), head(2, half), head(3, 1))
    assert [len(effects_of(one)) for one in taken] == [2, 1]
    taken = jobs(head(1, 2 * PASS_ROWS), head(2, 1))
    assert [len(effects_of(one)) for one in taken] == [1, 1]
    taken = jobs(*(draft(n, context=100) for n in (1, 2, 3)))
    assert [len(effects_of(one)) for one in taken] == [2, 1], "reading counts"
    taken = jobs(*(draft(n, Grow(2, 90, 1)) for n in (1, 2, 3)))
    assert [len(effects_of(one)) for one in taken] == [2, 1]


def test_a_long_text_is_read_between_the_drafts_of_others() -> None:
    long, size = draft(1, READ_ONLY, 2 * PASS_ROWS + 50), PASS_ROWS
    waiting = Waiting()
    waiting.add(OpenDraft(1, Sampling()))
    waiting.add(long)
    waiting.take()
    taken = []
    for number in range(2, 6):
        waiting.add(draft(number))
        taken.append(waiting.take()[1])
    assert taken[0] == ReadPart(1, long.context, size)
    assert taken[1] == Drafts((draft(2), draft(3))), "no other waits for more than one part"
    assert taken[2] == ReadPart(1, long.context, 2 * size)
    assert taken[3] == Drafts((draft(4), draft(5)))
    assert list(drained(waiting)) == [long]
    waiting.add(draft(1, context=len(long.context) + 1))
    waiting.add(CloseDraft(1))
    waiting.add(OpenDraft(1, Sampling()))
    waiting.add(long)
    assert [type(one) for one in drained(waiting)] == [
        Draft,
        CloseDraft,
        OpenDraft,
        ReadPart,
        ReadPart,
        Draft,
    ]


def test_what_is_read_of_a_base_is_not_read_again() -> None:
    size = PASS_ROWS
    whole = draft(1, context=size)
    longer = draft(2, READ_ONLY, 2 * size)
    assert jobs(whole, OpenDraft(2, Sampling(), base=1, rows=size), longer)[2:] == [longer]
    goes_on = draft(1, context=2 * size)
    forked = OpenDraft(2, Sampling(), base=1, rows=size, ends=True)
    assert type(jobs(whole, forked, goes_on)[2]) is ReadPart, "nothing is left of it"
    assert jobs(whole, replace(forked, ends=False), goes_on)[2:] == [goes_on]
    parts = jobs(whole, OpenDraft(2, Sampling(), base=1, rows=size - 1), longer)[2:]
    assert parts == [ReadPart(2, longer.context, 2 * size - 1), longer]


def test_the_rest_of_a_text_stays_before_the_end_of_its_request() -> None:
    long = draft(1, READ_ONLY, 3 * PASS_ROWS)
    taken = jobs(long, draft(2), CloseDraft(1), draft(3))
    assert [type(one) for one in taken] == [ReadPart, Drafts, ReadPart, Draft, CloseDraft]


def test_rows_of_the_base_are_taken_as_they_come() -> None:
    """A head's features are consecutive: they cannot be left for later."""
    rows = Tensor("float32", (9, 1), bytes(36))
    fed = replace(draft(1, READ_ONLY, 4 * PASS_ROWS), features=Features(rows))
    assert jobs(fed) == [fed]
    read = draft(2, READ_ONLY, 9)
    assert jobs(fed, read) == [Drafts((fed, read))]


def test_reading_makes_no_guess_wait_that_was_asked_for_before() -> None:
    read = draft(2, READ_ONLY, 90)
    assert jobs(draft(1), read, draft(3)) == [Drafts((draft(1), draft(3))), read]
    assert jobs(read, draft(1)) == [Drafts((read, draft(1)))]
    assert jobs(read, draft(3, READ_ONLY, 9), draft(1)) == [
        Drafts((read, draft(3, READ_ONLY, 9), draft(1)))
    ]


def test_any_order_keeps_the_order_of_each_request() -> None:
    joint = 0
    for seed in range(100):
        rng = random.Random(seed)
        waiting, asked, taken = Waiting(), list[Effect](), list[Effect]()
        for _ in range(40):
            request = rng.randint(1, 4)
            plan = rng.choice((EXPAND, Grow(2, 2, 1), READ_ONLY))
            effect = rng.choice(
                (
                    draft(request, plan, rng.choice((1, 3, 700))),
                    CloseDraft(request),
                    OpenDraft(request, Sampling()),
                )
            )
            waiting.add(effect)
            asked.append(effect)
            if rng.random() < 0.4:
                taken.append(waiting.take()[1])
        taken += drained(waiting)
        done = [one for job in taken for one in effects_of(job) if not isinstance(one, ReadPart)]
        joint += sum(isinstance(job, Drafts) for job in taken)
        with case(seed):
            for request in range(1, 5):
                own = [one for one in asked if one.request == request]  # type: ignore[attr-defined]
                assert own == [one for one in done if one.request == request]  # type: ignore[attr-defined]
    assert joint > 50
