"""Finish: what an answered request leaves to its client, and to the next turn."""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.decoding import drafts
from edgespec.decoding.prefix_cache import CachedPrefix
from edgespec.decoding.request import Request
from edgespec.machines.effects import Effect, SendStages
from edgespec.wire.client_messages import Finished


def finished(
    request: Request, reason: str, stages: int, draft: str, sources: tuple[str, ...], now: float
) -> Finished:
    """The request's good end; `sources`: the names of the draft source's members."""
    stats, answer = request.stats, request.answer
    first = stats.started if stats.first_token is None else stats.first_token
    return Finished(
        tag=request.tag,
        text=answer.text,
        token_ids=tuple(answer.token_ids),
        finish_reason=reason,
        policy=request.policy.name,
        draft=draft if request.policy.drafts else "none",
        stages=stages,
        prompt_tokens=len(request.prompt),
        new_tokens=len(answer.token_ids),
        seconds=now - stats.started,
        first_token_seconds=first - stats.started,
        trips=stats.trips(request.flights.clock.now),
        accepted_histogram=stats.histogram(),
        rows_sent=stats.rows_sent,
        rows_wasted=stats.rows_sent - stats.rows_used,
        misses=stats.misses,
        smallest_margin=stats.smallest_margin if stats.smallest_margin < float("inf") else 0.0,
        recoveries=request.recoveries,
        cached_tokens=stats.cached,
        sources=stats.of_sources(sources if request.policy.drafts else ()),
        prompt_rows=stats.ppd_rows,
    )


def cached_prefix(request: Request) -> CachedPrefix:
    """What every stage holds of a request whose first token is there: the rows of all committed
    tokens but the last, which was not run, or is not back."""
    ids = (*range(len(request.prefix)), *request.retains.rows)
    return CachedPrefix(request.context[: len(ids)], ids, request.asker)


def live_prefixes(requests: Iterable[Request]) -> dict[int, CachedPrefix]:
    """What others can begin with of live requests: of those whose prompts were read."""
    begun = (r for r in requests if r.tree is not None and not r.opening)
    return {request.number: cached_prefix(request) for request in begun}


def whole(request: Request) -> list[int]:
    """The request's number, with that of the one that ends with it, if no stage knows that yet."""
    reused = request.prefix.reused
    unknown = reused is not None and reused.ends and not request.turn
    return [request.number, reused.request] if reused and unknown else [request.number]


def last_effects(request: Request) -> list[Effect]:
    """Drop the guesses of an answered request, and have the draft source read what it lacks."""
    assert request.tree is not None
    effects: list[Effect] = [SendStages(request.retains.last(request.tree.newest))]
    if request.hidden is not None:  # the rest of its rows, which do not come again
        effects.append(drafts.last_reading(request))
    return effects
