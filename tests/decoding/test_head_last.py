"""The output head on the last stage: what it chooses, what travels, and the same text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs
from support import rings
from support.rings import Chaos, FakeRing, Faults, assert_one_end, submit
from support.segments import changed
from support.stages import REQUEST, Stage, draft, faults, hidden, numbers, opening, sent
from support.tiers import tiered

from edgespec.backends.base import Walk
from edgespec.decoding.effects import AbortBlock, RunHead, SendRing
from edgespec.decoding.events import HeadDone
from edgespec.decoding.flights import PartFlight
from edgespec.decoding.target_walk import NO_VERDICT, chosen
from edgespec.machines.effects import Effect, SendCoordinator
from edgespec.machines.events import ComputeFailed
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.registry import POLICIES
from edgespec.sim.toy_model import FakeHead
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.client_messages import Failed, Finished, Tokens
from edgespec.wire.codec import decode, encode
from edgespec.wire.messages import Fault
from edgespec.wire.segment import Choosing, Segment, Verdict

GREEDY = Choosing(0.0, 0, 1.0, 0.0, 3, -1)
VOCABULARY = rings.VOCABULARY
CHOICE = Choice(np.array([0]), np.array([9]), np.array([np.inf]))


@pytest.fixture(autouse=True)
def _small_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing costs anything, as here, the adaptive policy would guess without end."""
    monkeypatch.setitem(POLICIES, "adaptive", Adaptive(width=3, most_rows=6))


# --- a stage alone --------------------------------------------------------------------------------


def last_stage() -> Stage:
    """The last stage, at the head's work on the end of a prompt of two rows."""
    stage = Stage(is_last=True)
    stage.segment(changed(opening(), choosing=GREEDY))
    return stage


def heads(effects: list[Effect]) -> RunHead:
    """The one job of the head that starts; nothing leaves yet."""
    assert not [e for e in effects if isinstance(e, SendRing)]
    (job,) = (e for e in effects if isinstance(e, RunHead))
    return job


def said(stage: Stage, head: RunHead, *path: tuple[int, int]) -> list[Effect]:
    """The head is done: target tokens of places in its rows."""
    rows, tokens = np.array(path, np.int64).T
    choice = Choice(rows, tokens, np.array([0.5, np.inf, 1.5][: len(path)]))
    return stage.tell(HeadDone(head.job, REQUEST, choice))


def guesses(seq: int, *rows: tuple[int, int, int, int]) -> Segment:
    """Speculative rows from (id, parent, position, token)."""
    segment = draft(seq, *(row[:3] for row in rows))
    return changed(segment, tokens=numbers(*(row[3] for row in rows)))


def after_prompt(token: int = 9) -> Stage:
    """The last stage, with that target token after the prompt."""
    stage = last_stage()
    head = heads(stage.done())
    said(stage, head, (0, token))
    return stage


def floats(row: list[float]) -> Tensor:
    """Figures of one row."""
    return Tensor("float64", (1, len(row)), np.array(row, "<f8").tobytes())


def verdict_of(effects: list[Effect]) -> Verdict:
    """What leaves: no hidden rows, but this."""
    segment = sent(effects)
    assert segment.hidden is None
    (part,) = segment.parts
    assert part.choosing is None
    assert part.verdict is not None
    return part.verdict


def test_tokens_travel_all_the_way_once_the_end_of_a_prompt_asks_for_it() -> None:
    stage = Stage(is_first=True)
    stage.segment(changed(opening(), choosing=GREEDY))
    out = sent(stage.done())
    assert out.parts[0].choosing == GREEDY
    assert out.parts[0].tokens.tolist() == [0, 1]
    stage.segment(changed(guesses(2, (2, 1, 2, 9)), hidden=None))
    assert sent(stage.done()).parts[0].tokens.tolist() == [9]


def test_the_head_says_what_comes_after_the_prompts_last_row() -> None:
    stage = last_stage()
    head = heads(stage.done())
    assert (head.rows.ids.tolist(), head.rows.positions.tolist()) == ([1], [1])
    assert (head.sampling, head.top) == (Sampling(seed=3), -1)
    verdict = verdict_of(said(stage, head, (0, 9)))
    assert (verdict.ids.tolist(), verdict.tokens.tolist()) == ([1], [9])


def test_of_a_segment_the_head_reads_what_hangs_from_the_walk_alone() -> None:
    stage = after_prompt(9)
    # 2 and 3 below row 1, of which 3 is right; 4 below 2, 5 and 6 below 3, 7 below 6.
    first = (2, 1, 2, 8), (3, 1, 2, 9), (4, 2, 3, 9)
    stage.segment(guesses(2, *first, (5, 3, 3, 1), (6, 3, 3, 2), (7, 6, 4, 4)))
    head = heads(stage.done())
    assert head.rows.ids.tolist() == [3, 5, 6, 7]
    assert head.hidden == hidden(103, 105, 106, 107)
    # The target token after row 3 is 2, so that row 6 is next; after that a miss.
    verdict = verdict_of(said(stage, head, (0, 2), (2, 5)))
    assert (verdict.ids.tolist(), verdict.tokens.tolist()) == ([3, 6], [2, 5])
    choice, others = chosen(verdict)
    assert (choice.margins.tolist(), others) == ([0.5, np.inf], None)
    # What the walk does not come to is not read; the new root that the miss gave is.
    stage.segment(guesses(3, (8, 6, 4, 3)))
    assert verdict_of(stage.done()) is NO_VERDICT
    stage.segment(guesses(4, (9, 6, 4, 5), (10, 9, 5, 1)))
    assert heads(stage.done()).rows.ids.tolist() == [9, 10]


def test_the_heads_time_is_the_last_stages() -> None:
    stage = last_stage()
    head = heads(stage.done(after=2.0))
    stage.now += 0.5
    assert [(time.rows, time.seconds) for time in sent(said(stage, head, (0, 9))).cost] == [
        (2, 2.5)
    ]


def test_a_request_that_ends_while_the_head_is_at_work_leaves_its_header() -> None:
    stage = last_stage()
    head = heads(stage.done())
    assert not [e for e in stage.end() if isinstance(e, AbortBlock)]
    assert verdict_of(said(stage, head, (0, 9))) is NO_VERDICT
    assert stage.machine.ledgers() == {}


def test_a_new_ring_forgets_the_head_at_work() -> None:
    stage = last_stage()
    head = heads(stage.done())
    stage.machine.reset()
    assert said(stage, head, (0, 9)) == []
    stage.segment(changed(opening(1), choosing=GREEDY))
    assert heads(stage.done()).rows.ids.tolist() == [1]


def test_a_head_that_fails_ends_its_request_alone() -> None:
    stage = last_stage()
    head = heads(stage.done())
    effects = stage.tell(ComputeFailed(head.job, REQUEST, "the logits hold NaN"))
    assert faults(effects) == ["the logits hold NaN"]
    assert not sent(effects).rows


def several(count: int) -> tuple[Stage, list[RunHead]]:
    """The last stage, at the head's work on the ends of so many prompts in one segment."""
    stage = Stage(is_last=True)
    one = [changed(opening(request=REQUEST + n), choosing=GREEDY) for n in range(count)]
    rows = hidden(*(float(n) for n in range(2 * count)))
    stage.segment(structs.replace(one[0], parts=tuple(s.parts[0] for s in one), hidden=rows))
    return stage, [effect for effect in stage.done() if isinstance(effect, RunHead)]


def test_the_heads_of_all_parts_are_asked_for_at_once() -> None:
    stage, jobs = several(3)
    assert [(job.request, len(job.rows)) for job in jobs] == [(REQUEST + n, 1) for n in range(3)]
    assert [job.hidden for job in jobs] == [hidden(100.0 + 2 * n + 1) for n in range(3)]
    tokens = {job.job: 9 + n for n, job in enumerate(jobs)}
    for job in (jobs[1], jobs[2], jobs[0]):
        choice = Choice(np.array([0]), np.array([tokens[job.job]]), np.array([np.inf]))
        effects = stage.tell(HeadDone(job.job, job.request, choice))
    verdicts = [part.verdict for part in sent(effects).parts]
    assert [v.tokens.tolist() for v in verdicts if v is not None] == [[9], [10], [11]]


def test_of_several_heads_one_fails_alone() -> None:
    stage, jobs = several(3)
    assert not faults(stage.tell(HeadDone(jobs[0].job, jobs[0].request, CHOICE)))
    effects = stage.tell(ComputeFailed(jobs[1].job, jobs[1].request, "NaN"))
    assert SendCoordinator(Fault(REQUEST + 1, "NaN")) in effects
    out = sent(stage.tell(HeadDone(jobs[2].job, jobs[2].request, CHOICE)))
    assert [len(part.ids) for part in out.parts] == [1, 0, 1]
    assert [part.verdict is not None for part in out.parts] == [True, False, True]
    assert isinstance(decode(encode(out)), Segment)
    assert set(stage.machine.ledgers()) == {REQUEST, REQUEST + 2}


def test_heads_of_a_ring_that_is_gone_are_ignored() -> None:
    stage, jobs = several(2)
    stage.machine.reset()
    for job in jobs:
        assert not stage.tell(HeadDone(job.job, job.request, CHOICE))
    assert not stage.machine._given_up, "the block had come back before"


@pytest.mark.parametrize("head_last", [False, True])
def test_one_product_serves_all_parts_of_a_segment(
    head_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []

    class Counting(FakeHead):
        def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
            passes.append(len(walks))
            return super().choose(walks)

    monkeypatch.setattr(rings, "FakeHead", Counting)
    fake = FakeRing(2, live=6, head_last=head_last)
    for tag in range(6):
        fake.ring.submit(submit(tag, "hello", 12, "autoregressive", tag))
    fake.ring.run()
    assert sum(passes) == 6 * 12
    assert len(passes) <= 54, "two share most segments, as six fill three places"


def test_settings_that_sample_nothing_end_the_request() -> None:
    stage = Stage(is_last=True)
    bad = structs.replace(GREEDY, top_p=7.0)
    (reason,) = faults(stage.segment(changed(opening(), choosing=bad)))
    assert "top_p is 7.0" in reason


def test_a_stage_without_the_choice_asked_for_sends_hidden_rows() -> None:
    stage = Stage(is_last=True)
    stage.segment(opening())
    out = sent(stage.done())
    assert out.hidden is not None
    assert out.parts[0].verdict is None


# --- what comes to the coordinator ----------------------------------------------------------------


def test_a_verdict_crosses_the_ring_as_it_is() -> None:
    stage = last_stage()
    head = replace(heads(stage.done()), top=2)
    some = np.array([[4, 5]]), np.array([[-0.5, -1.5]])
    others = TopLogprobs(np.array([-0.25]), *some)
    choice = Choice(np.array([0]), np.array([9]), np.array([np.inf]))
    segment = sent(stage.tell(HeadDone(head.job, REQUEST, choice, others)))
    back = decode(encode(segment))
    assert isinstance(back, Segment)
    verdict = back.parts[0].verdict
    assert verdict is not None
    again, rivals = chosen(verdict)
    assert (again.tokens.tolist(), again.margins.tolist()) == ([9], [np.inf])
    assert rivals is not None
    assert rivals.log_probs.tolist() == [-0.25]
    assert (rivals.top.tolist(), rivals.top_log_probs.tolist()) == ([[4, 5]], [[-0.5, -1.5]])


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("stages", tiered((1, 2, 3, 8), (1, 3)))
def test_the_answer_is_the_plain_one(policy: str, stages: int) -> None:
    fake = FakeRing(stages, head_last=True)
    for tag, seed in enumerate((0, 2**64 - 1)):
        ask = submit(tag, "hello you", 12, policy, seed=seed)
        assert fake.ring.ask(ask).token_ids == fake.expected(ask).token_ids
    fake.assert_nothing_left()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_more_is_asked_of_the_head_than_on_the_coordinator(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lock-step all that the coordinator knows has come to the last stage: so that one reads
    no row that the coordinator would not, which are those of its tree, and each once."""
    read: list[int] = []

    class Counting(FakeHead):
        def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
            rows = [number for walk in walks for number in walk.rows.ids.tolist()]
            (request,) = fake.coordinator._requests.values()
            assert set(rows) <= set(request.tree.ids)
            read.extend(rows)
            return super().choose(walks)

    monkeypatch.setattr(rings, "FakeHead", Counting)
    fake = FakeRing(3, head_last=True)
    # No end but the limit, beyond which no row is sent.
    assert fake.ring.ask(submit(1, "hello", 24, policy)).new_tokens == 24
    assert len(read) == len(set(read)) >= 24, "a row was read twice, or a token came unread"


@pytest.mark.parametrize("policy", tiered(sorted(POLICIES), ("adaptive", "flowspec")))
@pytest.mark.parametrize("seed", range(4))
def test_any_timing_gives_the_plain_answer(policy: str, seed: int) -> None:
    fake = FakeRing(3, head_last=True)
    asks = [submit(tag, "hello", 16, policy, seed=tag) for tag in range(2)]
    for ask in asks:
        fake.ring.submit(ask)
    chaos = Chaos(fake, random.Random(seed), Faults(lose_retain=0.3, repeat=0.1, reorder=0.3))
    while chaos.step():
        pass
    for ask in asks:
        end = assert_one_end(fake.ring.replies, ask.tag)
        assert isinstance(end, Finished)
        assert end.token_ids == fake.expected(ask).token_ids


def test_a_lost_ring_goes_on_with_the_head_on_the_next_ones_last_stage() -> None:
    fake = FakeRing(3, head_last=True)
    ask = submit(1, "hello", 30, "flowspec")
    fake.ring.submit(ask)
    assert fake.take_turns(60)
    fake.ring.lose("stage 3 is silent")
    fake.ring.mend()
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Finished)
    assert (end.token_ids, end.recoveries) == (fake.expected(ask).token_ids, 1)


def test_a_next_turn_begins_with_the_rows_of_the_last_one() -> None:
    fake = FakeRing(2, head_last=True, kept_rows=2000)
    first = submit(1, "hello", 12, "flowspec")
    fake.ring.ask(first)
    both = first.prompt + fake.expected(first).text
    again = submit(2, both, 12, "flowspec")
    end = fake.ring.ask(again)
    assert end.token_ids == fake.expected(again).token_ids


LIES = [
    Verdict(numbers(2), numbers(10**9), numbers(), floats([0.5])),
    Verdict(numbers(2), numbers(-1), numbers(), floats([0.5])),
    Verdict(numbers(2), numbers(VOCABULARY), numbers(), floats([0.5])),
    Verdict(numbers(2), numbers(9), numbers(), floats([np.nan])),
    Verdict(numbers(2), numbers(9), numbers(2**62), floats([0.5, -1.0, -2.0])),
    Verdict(numbers(2), numbers(9), numbers(-1), floats([0.5, -1.0, -2.0])),
    Verdict(numbers(2), numbers(9), numbers(3), floats([0.5, np.nan, -2.0])),
]


def test_a_verdict_of_other_tokens_or_without_numbers_does_not_fit() -> None:
    part = draft(1, (2, 1, 2)).parts[0]
    for lie in LIES:
        top = 1 if len(lie.top) else -1
        flight = PartFlight(
            part.request, False, frozenset([2]), 1, structs.replace(GREEDY, top=top)
        )
        told = structs.replace(part, verdict=lie)
        assert not flight.could_return_as(told, None, VOCABULARY), lie
        rowless = structs.replace(told, ids=numbers())
        assert not flight.could_return_as(rowless, None, VOCABULARY), lie
        figures = [np.inf, -1.0, -np.inf][: lie.figures.shape[1]]
        right = structs.replace(lie, tokens=numbers(9), top=lie.top * 0, figures=floats(figures))
        assert flight.could_return_as(structs.replace(part, verdict=right), None, VOCABULARY)


def test_a_token_that_there_is_not_comes_to_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lying(FakeHead):
        def choose(self, walks: Sequence[Walk]) -> list[tuple[Choice, TopLogprobs | None]]:
            said = super().choose(walks)
            return [(replace(one, tokens=one.tokens * 0 + 2**62), top) for one, top in said]

    monkeypatch.setattr(rings, "FakeHead", Lying)
    fake = FakeRing(2, head_last=True)
    fake.ring.submit(submit())
    fake.ring.run()
    assert not [m for m in fake.ring.replies if isinstance(m, Tokens | Finished)]


def test_a_ring_whose_last_stage_has_no_head_says_so() -> None:
    fake = FakeRing(2, head_last=True)
    fake.ring.nodes[2].compute._head = None  # type: ignore[union-attr]
    fake.ring.submit(submit())
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 1)
    assert isinstance(end, Failed)
    assert "output head is not on this node" in end.reason
