"""A request's figures: trips, accepted histogram; the answer's text."""

from __future__ import annotations

from fractions import Fraction

import pytest

from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.answer import Answer, RequestStats
from edgespec.decoding.flights import RingClock
from edgespec.errors import ConfigError
from edgespec.sim.toy import ToyCodec, text_of


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_plain_decoding_costs_one_trip_a_token(stages: int) -> None:
    clock = RingClock(stages)
    for _ in range(10):
        clock.result(clock.enter())
    assert clock.now == 10


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_round_of_one_segment_more_than_stages_costs_two_trips(stages: int) -> None:
    clock = RingClock(stages)
    for rounds in range(1, 5):
        for entered in [clock.enter() for _ in range(stages + 1)]:
            clock.result(entered)
        assert clock.now == 2 * rounds


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_a_full_pipeline_gives_a_result_a_step(stages: int) -> None:
    clock = RingClock(stages)
    flying = [clock.enter() for _ in range(stages)]
    for _ in range(20 * stages):
        clock.result(flying.pop(0))
        flying.append(clock.enter())
    assert clock.now == 1 + Fraction(20 * stages - 1, stages)


@pytest.mark.parametrize(
    ("sources", "has"),
    [((), False), (("ngram",), False), (("dspark",), False), (("ngram", "dspark"), True)],
)
def test_free_guesses_are_timed_apart_where_there_are_others(
    sources: tuple[str, ...], has: bool
) -> None:
    """All that a source alone says is free, or none of it: there is nothing more to time."""
    assert CoordinatorSettings(2, 64, "draft", sources=sources).has_free_guesses is has


def test_histogram() -> None:
    stats = RequestStats()
    assert stats.histogram() == ()
    stats.accepted_per_step.update([0, 0, 3])
    assert stats.histogram() == (2, 0, 0, 1)


def letters(answer: Answer, *tokens: int) -> list[str]:
    """What each token adds."""
    return [answer.push(token) for token in tokens]


def test_an_end_token_belongs_to_the_tokens_and_gives_no_text() -> None:
    answer = Answer(ToyCodec(frozenset({9})), (), 10)
    # 3 is held back by the stream until the answer's end.
    assert letters(answer, 1, 3, 9) == [text_of(1), "", text_of(3)]
    assert (answer.finish_reason, answer.token_ids) == ("stop", [1, 3, 9])


def test_what_could_become_a_stop_string_is_held_back_and_given_at_the_end() -> None:
    stop = text_of(1) + text_of(2) + text_of(4)
    answer = Answer(ToyCodec(), (stop,), 3)
    assert letters(answer, 1, 2, 5) == ["", "", text_of(1) + text_of(2) + text_of(5)]
    assert answer.finish_reason == "length"
    stopped = Answer(ToyCodec(), (stop,), 9)
    assert letters(stopped, 7, 1, 2, 4) == [text_of(7), "", "", ""]
    assert (stopped.finish_reason, stopped.text) == ("stop", text_of(7))
    at_end = Answer(ToyCodec(frozenset({9})), (stop,), 9)
    assert letters(at_end, 1, 2, 9) == ["", "", text_of(1) + text_of(2)]
    assert at_end.finish_reason == "stop"


def test_a_stop_string_that_ends_with_the_last_token_counts_as_one() -> None:
    answer = Answer(ToyCodec(), (text_of(1) + text_of(3),), 2)
    assert letters(answer, 1, 3) == ["", ""]
    assert (answer.finish_reason, answer.text) == ("stop", "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError):
        Answer(ToyCodec(), ("",), 5)
