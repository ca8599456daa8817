"""Plain decoding is tried where guesses hardly bring anything, and kept where it is quicker."""

from __future__ import annotations

from edgespec.policy.pace import AGAIN, SETTLING, TIMED, Pace


def come(pace: Pace, tokens: int, guessed: float, plain: float, round_trip: float = 1.0) -> int:
    """Tokens that came with guesses, of so many that take `guessed` or `plain` seconds each."""
    count = 0
    for _ in range(tokens):
        count += pace.guesses
        pace.learn(1, guessed if pace.guesses else plain, round_trip)
    return count


def test_what_is_clearly_quicker_is_never_doubted() -> None:
    pace = Pace()
    assert come(pace, 5000, 0.2, 0.01) == 5000


def test_plain_decoding_is_kept_if_it_is_quicker() -> None:
    """Guesses are tried again, each time later."""
    pace = Pace()
    trial = SETTLING + TIMED
    assert come(pace, TIMED + trial, 1.2, 1.0) == TIMED
    assert come(pace, AGAIN, 1.2, 1.0) == 0
    assert come(pace, AGAIN, 1.2, 1.0) == trial
    assert come(pace, 32 * AGAIN, 1.2, 1.0) <= 6 * trial


def test_guesses_are_kept_if_they_are_quicker() -> None:
    pace = Pace()
    trial = SETTLING + TIMED
    assert come(pace, AGAIN, 0.9, 1.0) == AGAIN - trial
    assert come(pace, 32 * AGAIN, 0.9, 1.0) >= 32 * AGAIN - 6 * trial


def test_what_changes_is_noticed() -> None:
    pace = Pace()
    come(pace, 4 * AGAIN, 1.2, 1.0)
    assert not pace.guesses
    come(pace, 4 * AGAIN, 0.2, 1.0)
    assert pace.guesses
    assert come(pace, 50 * AGAIN, 0.2, 1.0) == 50 * AGAIN, "no more doubt"


def test_tokens_that_come_together_are_timed_together() -> None:
    pace = Pace()
    for _ in range(TIMED // 4):
        assert pace.guesses
        pace.learn(4, 6.0, 1.0)
    assert not pace.guesses, "1.5 seconds each"


def test_what_the_draft_missed_is_read_before_it_is_judged() -> None:
    """The first tokens after a change take much longer: no fault of the guesses."""
    pace = Pace()
    come(pace, TIMED + SETTLING + TIMED, 1.2, 1.0)
    assert not pace.guesses
    while not pace.guesses:
        pace.learn(1, 1.0, 1.0)
    come(pace, SETTLING, 500.0, 1.0)
    come(pace, TIMED, 0.3, 1.0)
    assert pace.guesses


def test_a_link_that_stands_still_once_is_no_reason_for_doubt() -> None:
    pace = Pace()
    come(pace, 100, 0.2, 1.0)
    pace.learn(1, 60.0, 1.0)
    assert come(pace, 1000, 0.2, 1.0) == 1000
