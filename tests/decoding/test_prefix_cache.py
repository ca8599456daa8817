"""Kept rows: the next turn of a conversation begins with what the stages hold, exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.local_ring import Step
from support.rings import FakeRing, submit
from support.tiers import tiered

from edgespec.decoding.prefix_cache import LEAST_ROWS, CachedPrefix, PrefixCache
from edgespec.sim.toy import VOCABULARY
from edgespec.wire.client_messages import Finished, Submit
from edgespec.wire.messages import CloseRequest, Retain
from edgespec.wire.segment import Segment

PLENTY = 100_000


def prompt_of(tokens: Sequence[int]) -> str:
    """A text that is cut into these tokens."""
    return "".join(chr(VOCABULARY * 9 + token) for token in tokens)


def asking(tag: int, tokens: Sequence[int], scope: str = "", **changes: object) -> Submit:
    """A request whose prompt is these tokens."""
    return replace(submit(tag, prompt_of(tokens), **changes), scope=scope)  # type: ignore[arg-type]


ANNA, BERT = "Anna", "Bert"


def kept(
    tokens: Sequence[int],
    capacity: int = 0,
    first: int = 0,
    *,
    prompt: int = 0,
    own: int = 0,
) -> CachedPrefix:
    """An answered request of Anna's with these tokens; half of them are the prompt."""
    tokens = tuple(tokens)
    prompt = prompt or len(tokens) // 2
    ids = tuple(range(first, first + len(tokens)))
    return CachedPrefix(tokens, ids, capacity or len(tokens), ANNA, prompt, own or prompt - 1)


# --- the list -------------------------------------------------------------------------------------


def test_the_longest_common_beginning_is_taken_and_is_nobody_elses_then() -> None:
    rows = PrefixCache(1000)
    assert rows.add(1, kept(range(40))) == []
    assert rows.add(2, kept([*range(30), 99, 98])) == []
    base = rows.take((*range(35), 77), ANNA)
    assert base is not None
    assert (base.request, base.ids) == (1, tuple(range(35)))
    again = rows.take((*range(35), 77), ANNA)
    assert again is not None
    assert (again.request, again.ids) == (2, tuple(range(30)))
    assert rows.take((*range(35), 77), ANNA) is None


def test_rows_are_nobody_elses() -> None:
    rows = PrefixCache(1000)
    rows.add(1, kept(range(40)))
    assert rows.take(tuple(range(60)), BERT) is None
    assert rows.take(tuple(range(60)), "") is None
    assert rows.take(tuple(range(60)), ANNA) is not None


@pytest.mark.parametrize(
    ("said", "taken"),
    [
        ((*range(60), 7), True),  # it goes on
        ((*range(50), 7, 8, 9), True),  # it goes on; the answer comes back cut otherwise
        ((*range(40), 7, 8, 9), True),  # the same, from the answer's first token on
        (tuple(range(40)), True),  # it is asked again
        ((*range(38), 7, 8), False),  # another message behind the same opening
        ((*range(24), 7, 8), False),  # another conversation with the same preamble
    ],
)
def test_what_another_conversation_goes_on_with_is_left_to_it(
    said: tuple[int, ...], taken: bool
) -> None:
    rows = PrefixCache(1000)
    rows.add(1, kept(range(100, 200), prompt=50))
    rows.add(2, kept(range(60), prompt=40))
    base = rows.take(said, ANNA)
    assert (base is not None) == taken
    assert len(rows) == (1 if taken else 2)


def test_few_rows_behind_a_long_preamble_are_not_kept_for_their_conversation() -> None:
    """Short questions with the same long preamble, each by itself."""
    rows = PrefixCache(1000)
    rows.add(1, kept(range(300), prompt=250))
    base = rows.take((*range(200), *range(1000, 1050)), ANNA)
    assert base is not None
    assert base.own == 0, "nothing is known of its conversation"
    rows.add(2, kept(range(310), prompt=250))
    assert rows.take((*range(199), *range(1000, 1050)), ANNA) is None, "a third of it is lost"


def test_a_conversation_that_went_on_is_known_by_all_that_was_said_before() -> None:
    rows = PrefixCache(1000)
    rows.add(1, kept(range(60), prompt=40))
    base = rows.take(tuple(range(80)), ANNA)
    assert base is not None
    assert base.own == 60
    rows.add(2, kept(range(200), prompt=80, own=base.own))
    assert rows.take((*range(50), 7, 8), ANNA) is None, "another answer to the same first question"
    changed = rows.take((*range(65), 7, 8), ANNA)
    assert changed is not None, "its last message was changed"
    assert changed.own == base.own, "and may be changed once more"


def test_the_last_token_of_a_prompt_is_always_read() -> None:
    rows = PrefixCache(1000)
    rows.add(1, kept(range(40)))
    base = rows.take(tuple(range(40)), ANNA)
    assert base is not None
    assert len(base.ids) == 39


def test_few_common_rows_are_not_worth_it() -> None:
    rows = PrefixCache(1000)
    rows.add(1, kept(range(40)))
    assert rows.take((*range(LEAST_ROWS - 1), 500, 501, 502), ANNA) is None
    assert rows.add(2, kept(range(LEAST_ROWS - 1))) == [2], "nor is it kept"


def test_the_least_recently_used_goes_first() -> None:
    rows = PrefixCache(100)
    for number in (1, 2, 3):
        assert rows.add(number, kept(range(30), first=number)) == []
    assert rows.add(4, kept(range(30))) == [1]
    assert rows.make_room(10) == []
    assert rows.make_room(50) == [2, 3]
    assert rows.make_room(500) == [4], "it runs all the same"
    assert len(rows) == 0


def test_without_a_limit_nothing_is_kept() -> None:
    rows = PrefixCache(0)
    assert rows.add(1, kept(range(40))) == [1]
    assert rows.take(tuple(range(50)), ANNA) is None


# --- a ring ---------------------------------------------------------------------------------------


def prefilled(fake: FakeRing, before: int) -> int:
    """Certain rows that were sent since there were so many segments."""
    return sum(len(s.parts[0].ids) for s in sent(fake)[before:] if s.parts[0].committed)


def sent(fake: FakeRing) -> list[Segment]:
    """Segments that the coordinator has sent."""
    return fake.ring.sent  # type: ignore[attr-defined]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings note what their coordinator sends."""
    from support.local_ring import LocalRing

    from edgespec.decoding.effects import (
        SendRing,
    )

    dispatch = LocalRing._dispatch

    def noting(self: LocalRing, number: int, effects: object) -> None:
        effects = list(effects)  # type: ignore[call-overload]
        notes = self.__dict__.setdefault("sent", [])
        if number == 0:
            notes += [e.segment for e in effects if isinstance(e, SendRing)]
        dispatch(self, number, effects)

    monkeypatch.setattr(LocalRing, "_dispatch", noting)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("policy", ["autoregressive", "naive_tree", "flowspec", "adaptive"])
def test_a_second_turn_reads_what_is_new_and_nothing_else(stages: int, policy: str) -> None:
    fake = FakeRing(stages, kept_rows=2000)
    first = asking(1, range(100), max_new_tokens=20, policy=policy)
    answer = fake.ring.ask(first)
    assert answer.token_ids == fake.expected(first).token_ids
    assert answer.cached_tokens == 0
    said = [*range(100), *answer.token_ids]
    before = len(sent(fake))
    second = asking(2, [*said, 3, 1, 4, 1, 5], max_new_tokens=20, policy=policy)
    again = fake.ring.ask(second)
    assert again.token_ids == fake.expected(second).token_ids
    # Nobody has had to run the answer's last token.
    assert again.cached_tokens == len(said) - 1
    assert prefilled(fake, before) == 6
    fake.assert_consistent()


@pytest.mark.usefixtures("watched")
def test_the_same_prompt_again_reads_its_last_row() -> None:
    fake = FakeRing(3, kept_rows=2000)
    first = asking(1, range(60), max_new_tokens=30, policy="flowspec")
    fake.ring.ask(first)
    before = len(sent(fake))
    again = fake.ring.ask(asking(2, range(60), max_new_tokens=30, policy="flowspec", seed=5))
    assert (
        again.token_ids == fake.expected(asking(2, range(60), max_new_tokens=30, seed=5)).token_ids
    )
    assert prefilled(fake, before) == 1


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("length", [8, 40])
def test_two_conversations_with_one_preamble_in_turns_read_what_is_new(length: int) -> None:
    fake = FakeRing(2, kept_rows=5000)
    preamble = [n % 7 for n in range(24)]
    said = {ANNA: list(preamble), BERT: list(preamble)}  # one user's two conversations
    for turn in range(5):
        for number, name in enumerate(said):
            before, known = len(sent(fake)), len(said[name]) - 1 if turn else 0
            new = [(10 + number + n + turn) % VOCABULARY for n in range(length)]
            ask = asking(10 * turn + number, said[name] + new, max_new_tokens=12, seed=number)
            answer = fake.ring.ask(ask)
            assert answer.token_ids == fake.expected(ask).token_ids
            assert prefilled(fake, before) == len(said[name]) + length - known
            assert answer.cached_tokens == known
            said[name] += [*new, *answer.token_ids]
    fake.assert_consistent()


@pytest.mark.thorough
@pytest.mark.usefixtures("watched")
def test_an_answer_that_is_asked_for_again_and_a_changed_message_read_what_is_new() -> None:
    fake = FakeRing(2, kept_rows=5000)
    first = list(range(30))
    answer = fake.ring.ask(asking(1, first, max_new_tokens=100))
    again = fake.ring.ask(asking(2, first, max_new_tokens=100, seed=5))
    assert again.cached_tokens == len(first) - 1, "a long answer is in nobody's way"
    said = [*first, *again.token_ids]
    assert again.token_ids != answer.token_ids
    fake.ring.ask(asking(3, [*said, 1, 2, 3, 4], max_new_tokens=300))
    for tag, message in enumerate(([1, 2, 9, 9], [1, 8, 8, 8]), start=4):
        changed = asking(tag, [*said, *message], max_new_tokens=300)
        end = fake.ring.ask(changed)
        assert end.token_ids == fake.expected(changed).token_ids
        assert end.cached_tokens >= len(said) - 1
    fake.assert_consistent()


def test_one_askers_rows_are_of_no_use_to_another() -> None:
    fake = FakeRing(2, kept_rows=5000)
    prompt = list(range(60))
    turns = ((1, ANNA, 0), (2, BERT, 0), (3, "", 0), (4, ANNA, 59), (5, BERT, 59))
    for tag, asker, cached in turns:
        end = fake.ring.ask(asking(tag, prompt, max_new_tokens=5, scope=asker))
        assert end.cached_tokens == cached
        assert end.token_ids == fake.expected(asking(tag, prompt, max_new_tokens=5)).token_ids


def test_what_is_not_kept_is_freed_everywhere() -> None:
    fake = FakeRing(3, kept_rows=700)
    for tag in range(1, 6):
        fake.ring.ask(asking(tag, [tag] * 90, max_new_tokens=5))
        assert sum(block.open_requests for block in fake.blocks) <= 3 * 2
        assert fake.draft.open_requests == fake.blocks[0].open_requests  # type: ignore[attr-defined]
        fake.assert_consistent()
    fake.ring.ask(asking(9, [7] * 500, max_new_tokens=5))
    assert [block.open_requests for block in fake.blocks] == [0, 0, 0], "it alone is too long"
    assert fake.draft.open_requests == 0  # type: ignore[attr-defined]


def test_a_lost_ring_takes_all_of_it_along() -> None:
    fake = FakeRing(2, kept_rows=2000)
    answer = fake.ring.ask(asking(1, range(50), max_new_tokens=5))
    assert fake.draft.open_requests == 1  # type: ignore[attr-defined]
    fake.ring.lose("stage 2 was lost")
    fake.ring.mend()
    fake.ring.run()
    assert fake.draft.open_requests == 0  # type: ignore[attr-defined]
    second = asking(2, [*range(50), *answer.token_ids, 1, 2], max_new_tokens=5)
    again = fake.ring.ask(second)
    assert again.token_ids == fake.expected(second).token_ids
    assert again.cached_tokens == 0


def conversation(fake: FakeRing, rng: random.Random, heard: list[list[int]]) -> list[int]:
    """The tokens of a prompt that goes on with, or branches off from, something said before."""
    new = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
    if not heard or rng.random() < 0.2:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))] + new
    before = rng.choice(heard)
    return before[: rng.randint(1, len(before))] + new if rng.random() < 0.5 else before + new


def play(fake: FakeRing, rng: random.Random, cancel: int | None) -> None:
    """Any order of things; retained sets may be lost, and come twice, before or behind data."""
    for step_number in range(PLENTY):
        steps = list(fake.ring.steps())
        if not steps:
            return
        step = rng.choice(steps)
        lose = repeat = False
        if step.kind == "control" and step.node:
            waiting = fake.ring.waiting_control(step.node)
            step = Step("control", step.node, rng.randrange(len(waiting)))
            message = waiting[step.index]
            if isinstance(message, CloseRequest):
                step = Step("control", step.node, 0)  # it is never lost, and in order
            elif isinstance(message, Retain):
                lose, repeat = rng.random() < 0.2, rng.random() < 0.2
        fake.ring.take(step, lose=lose, repeat=repeat and not lose)
        if cancel is not None and step_number == cancel:
            fake.ring.cancel(int(getattr(fake, "tag", 0)))
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", tiered(range(12), range(3)))
def test_conversations_in_any_order_of_things_get_plain_decodings_tokens(seed: int) -> None:
    rng = random.Random(seed)
    fake = FakeRing(rng.randint(1, 4), kept_rows=rng.choice([600, 1500, 5000]))
    heard: list[list[int]] = []
    cached = 0
    for tag in range(1, 9):
        tokens = conversation(fake, rng, heard)
        policy = rng.choice(["autoregressive", "pruned", "pipedec", "flowspec", "adaptive"])
        ask = asking(tag, tokens, max_new_tokens=rng.randint(1, 25), policy=policy)
        fake.tag = tag  # type: ignore[attr-defined]
        cancel = rng.randrange(300) if rng.random() < 0.25 else None
        fake.ring.submit(ask)
        play(fake, rng, cancel)
        (end,) = (m for m in fake.ring.replies if isinstance(m, Finished) and m.tag == tag)
        right = fake.expected(ask).token_ids
        if end.finish_reason == "cancelled":
            assert right[: len(end.token_ids)] == end.token_ids
        else:
            assert end.token_ids == right, f"seed {seed}"
        cached += end.cached_tokens
        heard.append(tokens + list(end.token_ids))
        fake.assert_consistent()
        rows = sum(len(ledger) for ledger in fake.machines[0].ledgers().values())
        assert rows <= max(fake.coordinator._ring.kept_rows, 1200)
    if seed == 0:
        assert cached > 0
