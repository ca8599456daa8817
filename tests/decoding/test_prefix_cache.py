"""Kept rows: the next turn of a conversation begins with what the stages hold, exactly."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from support.local_ring import Step
from support.rings import Chaos, FakeRing, Faults, assert_one_end, submit
from support.tiers import thorough, tiered

from edgespec.decoding import scheduler
from edgespec.decoding.row_account import LEAST_ROWS, CachedPrefix, PrefixCache
from edgespec.sim.toy import VOCABULARY
from edgespec.tree import stems
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


def kept(tokens: Sequence[int], first: int = 0, asker: str = ANNA) -> CachedPrefix:
    """A request of Anna's with these tokens."""
    tokens = tuple(tokens)
    return CachedPrefix(tokens, tuple(range(first, first + len(tokens))), asker)


def taken(
    rows: PrefixCache, prompt: Sequence[int], asker: str = ANNA, **live: CachedPrefix
) -> tuple[int, int, bool]:
    """Of which request a prompt takes how many rows, and whether that ends."""
    reused = rows.take(tuple(prompt), asker, {int(name[1:]): one for name, one in live.items()})
    return (reused.request, len(reused.ids), reused.ends) if reused else (0, 0, False)


# --- the list -------------------------------------------------------------------------------------


def test_the_longest_common_beginning_is_found_as_often_as_it_is_asked_for() -> None:
    rows = PrefixCache()
    assert rows.add(1, kept(range(60)))
    assert rows.add(2, kept([*range(50), 99, 98]))
    for _ in range(3):
        assert taken(rows, [*range(55), 77]) == (1, 55, False)
        assert taken(rows, [*range(50), 99, 7]) == (2, 51, False)
    assert len(rows) == 2


def test_a_conversation_that_goes_on_takes_its_rows_along() -> None:
    rows = PrefixCache()
    rows.add(1, kept(range(100, 160)))
    rows.add(2, kept(range(60)))
    assert taken(rows, range(70)) == (2, 60, True)
    assert len(rows) == 1
    assert taken(rows, range(70)) == (0, 0, False)
    assert taken(rows, range(100, 160)) == (1, 59, False), "its last row is to be computed"


def test_of_two_with_as_much_in_common_the_one_that_needs_no_sharing() -> None:
    rows = PrefixCache()
    rows.add(1, kept(range(40)))
    rows.add(2, kept(range(60)))
    assert taken(rows, [*range(40), 7]) == (1, 40, True)
    assert taken(rows, [*range(40), 7]) == (2, 40, False)


def test_rows_of_live_requests_are_found_too_and_never_end() -> None:
    rows = PrefixCache()
    rows.add(1, kept(range(40)))
    assert taken(rows, range(80), n3=kept(range(60))) == (3, 60, False)
    assert taken(rows, range(50), n3=kept(range(35))) == (1, 40, True)
    assert taken(rows, range(50), n3=kept(range(35))) == (3, 35, False)


def test_rows_are_of_no_use_to_other_askers_unless_the_owner_says_so() -> None:
    for across in (False, True):
        rows = PrefixCache(across)
        rows.add(1, kept(range(40)))
        assert (taken(rows, range(39), BERT) != (0, 0, False)) is across
        assert (taken(rows, range(39), "") != (0, 0, False)) is across
        assert (taken(rows, range(60), BERT, n2=kept(range(50))) != (0, 0, False)) is across
        assert taken(rows, range(60)) == (1, 40, True)


def test_few_common_rows_are_not_worth_it() -> None:
    rows = PrefixCache()
    rows.add(1, kept(range(40)))
    assert taken(rows, [*range(stems.LEAST_ROWS - 1), 500, 501]) == (0, 0, False)
    assert rows.add(3, kept(range(100, 100 + LEAST_ROWS)))
    assert taken(rows, range(100, 150)) == (3, LEAST_ROWS, True)
    assert not rows.add(2, kept(range(LEAST_ROWS - 1))), "nor is it kept"


def test_the_least_recently_used_goes_first() -> None:
    rows = PrefixCache()
    for number in (1, 2, 3):
        rows.add(number, kept([number] * 40))
    assert taken(rows, [1] * 39) == (1, 38, False)
    assert list(rows) == [2, 3, 1]


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

    dispatch = LocalRing.dispatch

    def noting(self: LocalRing, number: int, effects: object) -> None:
        effects = list(effects)  # type: ignore[call-overload]
        notes = self.__dict__.setdefault("sent", [])
        if number == 0:
            notes += [e.segment for e in effects if isinstance(e, SendRing)]
        dispatch(self, number, effects)

    monkeypatch.setattr(LocalRing, "dispatch", noting)


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
    first = list(range(40))
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
    fake = FakeRing(3, kept_rows=500)
    for tag in range(1, 6):
        fake.ring.ask(asking(tag, [tag] * 90, max_new_tokens=5))
        assert all(block.held_rows <= 500 for block in fake.blocks)
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


# --- several requests with one preamble -----------------------------------------------------------


def held(fake: FakeRing) -> set[int]:
    """Rows on each stage, by its cache and by its books."""
    rows = [block.held_rows for block in fake.blocks]
    assert rows == [machine.held_rows for machine in fake.machines]
    return set(rows)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("head_last", [False, thorough(True)])
@pytest.mark.parametrize("policy", tiered(["autoregressive", "flowspec", "adaptive"], ["flowspec"]))
def test_two_chats_in_turns_read_what_is_new_and_share_their_preamble(
    policy: str, head_last: bool
) -> None:
    fake = FakeRing(3, kept_rows=5000, head_last=head_last)
    preamble = [n % 23 for n in range(80)]
    chats = [list(preamble), list(preamble)]
    for turn in range(4):
        for number, said in enumerate(chats):
            known = len(said) - 1 if turn else len(preamble) * number
            before = len(sent(fake))
            said += [(10 * number + n + turn) % VOCABULARY for n in range(10)]
            ask = asking(10 * turn + number, said, max_new_tokens=12, policy=policy, seed=number)
            answer = fake.ring.ask(ask)
            assert answer.token_ids == fake.expected(ask).token_ids
            assert answer.cached_tokens == known
            assert prefilled(fake, before) == len(said) - known
            said += answer.token_ids
    fake.assert_consistent()
    one, other = (len(said) - 1 for said in chats)
    assert held(fake) == {one + other - len(preamble)}
    for machine in fake.machines:
        shared = [machine.stems.shares(number) for number in machine.ledgers()]
        assert shared == [[(80, 2)], [(80, 2)]]
    assert fake.coordinator.rows.saved == len(preamble)
    assert fake.coordinator.rows.used(0) == one + other - len(preamble)


@pytest.mark.parametrize("whole", [True, False])
def test_a_request_starts_without_a_base_that_a_stage_has_refused(whole: bool) -> None:
    """The stage's Fault is on its way when the opening leaves that names the base."""
    fake = FakeRing(3, kept_rows=3000, live=2)
    first = asking(1, [n % 19 for n in range(60)], max_new_tokens=9)
    fake.ring.ask(first)
    fake.ring.dispatch(2, fake.machines[1]._refuse(1, "it has no room"))
    said = [*(n % 19 for n in range(60)), *fake.expected(first).token_ids]
    ask = asking(2, [*said[: len(said) if whole else 40], 3, 4], max_new_tokens=9)
    fake.ring.submit(ask)
    fake.ring.run()
    end = assert_one_end(fake.ring.replies, 2)
    assert isinstance(end, Finished), end
    assert end.token_ids == fake.expected(ask).token_ids
    assert (end.cached_tokens, end.recoveries) == (len(said) - 1 if whole else 40, 1)
    assert len(fake.coordinator.rows.kept) == 1, "nothing of the base"
    fake.assert_consistent()
    assert held(fake) == {fake.coordinator.rows.used(0)}


@pytest.mark.parametrize("seed", tiered(range(30), range(6)))
def test_live_requests_share_rows_whatever_happens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preambles of all lengths; cancels, lost rings, late and lost retained sets; and requests
    that wait again, as nothing is left free for what they grow."""
    monkeypatch.setattr(scheduler, "ROOM_TO_GROW", 0)
    rng = random.Random(seed)
    fake = FakeRing(
        rng.randint(1, 3),
        live=rng.randint(1, 4),
        kept_rows=rng.choice([700, 900, 3000]),
        prefill_chunk=16,
    )
    preamble = [rng.randrange(VOCABULARY) for _ in range(150)]
    heard: list[list[int]] = [preamble]
    wanted: dict[int, Submit] = {}
    cancelled: set[int] = set()
    loses = seed % 2 == 0
    chaos = Chaos(fake, rng, Faults(lose_retain=0.2 * loses, repeat=0.1, reorder=0.3))
    shared = most = 0
    for tag in range(14):
        said = rng.choice(heard)
        tokens = said[: rng.randint(30, len(said))]
        tokens += [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))]
        policy = rng.choice(["autoregressive", "pruned", "pipedec", "flowspec", "naive_tree"])
        wanted[tag] = asking(tag, tokens, max_new_tokens=rng.randint(1, 20), policy=policy)
        fake.ring.submit(wanted[tag])
        for _ in range(rng.choice([0, 30, 300, 3000])):
            if not chaos.step():
                break
            fake.assert_consistent()
            if rng.random() < 0.001:
                fake.ring.lose("stage 1 was lost")
                fake.ring.mend()
            if rng.random() < 0.001:
                cancelled.add(tag)
                fake.ring.cancel(tag)
            shared = max(shared, fake.machines[0].stems.saved)
            most = max(most, len(fake.machines[0].ledgers()))
        right = fake.expected(wanted[tag]).token_ids
        heard.append([*tokens, *right])
    while chaos.step():
        fake.assert_consistent()
    for tag, ask in wanted.items():
        end, right = assert_one_end(fake.ring.replies, tag), fake.expected(ask)
        assert isinstance(end, Finished), end
        if tag not in cancelled:
            assert end.token_ids == right.token_ids, f"seed {seed}, request {tag}"
    # Where the last retained set of a request was lost, some of its guesses are kept too.
    used = fake.coordinator.rows.used(0)
    assert min(held(fake)) >= used if loses else held(fake) == {used}
    assert shared or most < 2 or seed, "something is shared in the first of them"
    # What is left goes with its ring.
    fake.ring.lose("stage 1 was lost")
    fake.ring.mend()
    fake.ring.run()
    assert held(fake) == {0}
    assert not len(fake.coordinator.rows)
    fake.assert_nothing_left()
