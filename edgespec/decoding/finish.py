"""Finish: what a client is told at the good end of its request."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.request import Request
from edgespec.wire.client_messages import Finished

LONGEST_LOOP, LEAST_LOOPED = 64, 48
"""Tokens of what an answer repeats, at most; and of an end that is nothing but that, at least."""


def looped(tokens: Sequence[int]) -> str:
    """A sentence if the answer's end is the same few tokens, four times at least; else ""."""
    for length in range(1, LONGEST_LOOP + 1):
        least = max(LEAST_LOOPED, 4 * length)
        if len(tokens) < least or tokens[-least:-length] != tokens[length - least :]:
            continue
        begin = len(tokens) - least
        while begin and tokens[begin - 1] == tokens[begin - 1 + length]:
            begin -= 1
        return (
            f"from its token {begin + 1} on the answer repeats the same {length} token(s); another "
            "temperature, or a repetition penalty of 1.1, may keep it from that"
        )
    return ""


def finished(
    request: Request, reason: str, ring: CoordinatorSettings, trip: Fraction, now: float
) -> Finished:
    """The request's good end, at `trip` on the ring's clock."""
    stats, answer = request.stats, request.answer
    first = stats.started if stats.first_token is None else stats.first_token
    return Finished(
        tag=request.client.tag,
        text=answer.text,
        token_ids=tuple(answer.token_ids),
        finish_reason=reason,
        policy=request.policy.name,
        draft=ring.draft if request.policy.drafts else "none",
        stages=ring.stages,
        prompt_tokens=len(request.prompt),
        new_tokens=len(answer.token_ids),
        seconds=now - stats.started,
        first_token_seconds=first - stats.started,
        trips=stats.trips(trip),
        accepted_histogram=stats.histogram(),
        rows_sent=stats.rows_sent,
        rows_wasted=stats.rows_sent - stats.rows_used,
        misses=stats.misses,
        smallest_margin=stats.smallest_margin if stats.smallest_margin < float("inf") else 0.0,
        recoveries=request.recoveries,
        cached_tokens=stats.cached,
        sources=stats.of_sources(ring.sources if request.policy.drafts else ()),
        prompt_rows=stats.ppd_rows,
        stop=answer.stop,
        thinks=request.thinks,
        sampled=request.client.sampled,
        looped=looped(answer.token_ids),
    )
