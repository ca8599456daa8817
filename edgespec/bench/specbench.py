"""Spec-Bench: answers in the form that its evaluation scripts read."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.bench.harness import BenchAnswer


def answer_lines(
    answers: Sequence[BenchAnswer], policy: str, model_id: str, at: float
) -> list[dict[str, object]]:
    """One object a prompt, with all its turns; `at`: seconds since 1970.

    A decoding step is a verification. Spec-Bench's scripts take means of `accept_lengths`; here
    they are in ascending order, not in the order of the steps. `token_ids` is ours: the tokens of
    every turn.
    """
    lines: list[dict[str, object]] = []
    mine = [answer for answer in answers if answer.policy == policy]
    for number in dict.fromkeys(answer.number for answer in mine):
        turns = [answer for answer in mine if answer.number == number]
        prompt = turns[0].prompt
        ends = [answer.finished for answer in turns]
        lengths = [_accept_lengths(end.accepted_histogram) for end in ends]
        choice = {
            "index": 0,
            "turns": [end.text for end in ends],
            "decoding_steps": [len(of_turn) for of_turn in lengths],
            "new_tokens": [end.new_tokens for end in ends],
            "wall_time": [end.seconds for end in ends],
            "accept_lengths": [length for of_turn in lengths for length in of_turn],
            "token_ids": [list(end.token_ids) for end in ends],
        }
        lines.append(
            {
                "question_id": int(prompt) if prompt.isdecimal() else prompt,
                "category": turns[0].category,
                "model_id": model_id,
                "choices": [choice],
                "tstamp": at,
            }
        )
    return lines


def _accept_lengths(histogram: Sequence[int]) -> list[int]:
    return [length for length, times in enumerate(histogram) for _ in range(times)]
