"""Plain decoding is tried where guesses hardly bring anything, and kept where it is quicker."""

from __future__ import annotations

from collections import Counter

from edgespec.policy.pace import AGAIN, OLD, SETTLING, TIMED, Pace, PlainTime, Way

TRIAL = SETTLING + TIMED


def come(pace: Pace, tokens: int, guessed: float, plain: float, free: float = 0.0) -> Counter[Way]:
    """How many of so many tokens came in which way, if each takes that many seconds; `free` 0:
    nothing can be guessed without a model."""
    seconds = {Way.ALL: guessed, Way.FREE: free, Way.PLAIN: plain}
    ways: Counter[Way] = Counter()
    pace.free = free > 0
    for _ in range(tokens):
        ways[pace.way] += 1
        pace.learn(1, seconds[pace.way], 1.0)
    return ways


def test_what_is_clearly_quicker_is_never_doubted() -> None:
    assert come(Pace(), 5000, 0.2, 0.01) == {Way.ALL: 5000}


def test_plain_decoding_is_kept_if_it_is_quicker() -> None:
    """Guesses are tried again, each time later."""
    pace = Pace()
    assert come(pace, TIMED + TRIAL, 1.2, 1.0)[Way.ALL] == TIMED
    assert come(pace, AGAIN, 1.2, 1.0)[Way.ALL] == 0
    assert come(pace, 2 * AGAIN, 1.2, 1.0)[Way.ALL] == TRIAL
    assert come(pace, 32 * AGAIN, 1.2, 1.0)[Way.ALL] <= 6 * TRIAL


def test_guesses_are_kept_if_they_are_quicker() -> None:
    pace = Pace()
    assert come(pace, AGAIN, 0.9, 1.0)[Way.PLAIN] == TRIAL
    assert come(pace, OLD - 2 * AGAIN, 0.9, 1.0)[Way.PLAIN] == 0, "plain decoding's time is known"


def test_an_answer_of_hundred_tokens_loses_no_tenth_where_guesses_do_not_pay() -> None:
    """A fifth slower with guesses; the second answer knows what plain decoding takes."""
    ring = PlainTime()
    for _ in range(2):
        ways = come(Pace(ring), 100, 1.25, 1.0)
        assert 100 / (ways[Way.ALL] * 1.25 + ways[Way.PLAIN]) > 0.9


def test_each_request_is_judged_by_itself() -> None:
    """The next answer may be easy to guess, whatever the one before it was."""
    ring = PlainTime()
    assert come(Pace(ring), 200, 1.5, 1.0)[Way.PLAIN] > 100
    assert come(Pace(ring), 200, 0.4, 1.0) == {Way.ALL: 200}


def test_free_guesses_stay_where_dear_ones_do_not_pay() -> None:
    pace = Pace()
    come(pace, TIMED + 2 * TRIAL, 1.2, 1.0, free=0.5)
    assert come(pace, AGAIN, 1.2, 1.0, free=0.5) == {Way.FREE: AGAIN}
    pace = Pace()
    come(pace, TIMED + 2 * TRIAL, 1.2, 1.0, free=1.1)
    assert come(pace, AGAIN, 1.2, 1.0, free=1.1) == {Way.PLAIN: AGAIN}, "but not at any price"


def test_what_changes_is_noticed() -> None:
    pace = Pace()
    come(pace, TIMED + TRIAL, 1.2, 1.0)
    assert pace.way is Way.PLAIN
    come(pace, 4 * AGAIN, 0.2, 1.0)
    assert pace.way is Way.ALL
    assert come(pace, 50 * AGAIN, 0.2, 1.0)[Way.ALL] == 50 * AGAIN, "no more doubt"


def test_what_plain_decoding_took_is_forgotten() -> None:
    ring = PlainTime()
    ring.timed(1.0)
    ring.passed(OLD)
    assert ring.seconds == 1.0
    ring.passed(1)
    assert ring.seconds == 0.0


def test_tokens_that_come_together_are_timed_together() -> None:
    pace = Pace()
    for _ in range(TIMED // 4):
        assert pace.way is Way.ALL
        pace.learn(4, 6.0, 1.0)
    assert pace.way is Way.PLAIN, "1.5 seconds each"


def test_what_the_draft_missed_is_read_before_it_is_judged() -> None:
    """The first tokens after a change take much longer: no fault of the guesses."""
    pace = Pace()
    come(pace, TIMED + TRIAL, 1.2, 1.0)
    while pace.way is Way.PLAIN:
        pace.learn(1, 1.0, 1.0)
    come(pace, SETTLING, 500.0, 1.0)
    come(pace, TIMED, 0.3, 1.0)
    come(pace, TRIAL, 0.3, 1.0)
    assert pace.way is Way.ALL


def test_a_link_that_stands_still_once_is_no_reason_for_doubt() -> None:
    pace = Pace()
    come(pace, 100, 0.2, 1.0)
    pace.learn(1, 60.0, 1.0)
    assert come(pace, 1000, 0.2, 1.0) == {Way.ALL: 1000}
