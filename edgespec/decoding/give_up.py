"""Give up: which requests end when the coordinator machine raised, or could not do what it wanted.

That is a bug, and one request's if it can be: the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from edgespec.decoding.effects import SendRing
from edgespec.decoding.events import Drafted, HeadDone, PromptEncoded, SegmentArrived
from edgespec.decoding.request import Request
from edgespec.machines.effects import Effect, SendPeer
from edgespec.machines.events import ComputeFailed, Event, MessageArrived
from edgespec.wire.client_messages import Failed, Submit
from edgespec.wire.messages import CloseRequest, Fault, Message, Retain
from edgespec.wire.snapshots import StageActivity, Subscribe


def harmless(
    cause: Event | Effect, reason: str, requests: Iterable[Request]
) -> list[Effect] | None:
    """What a failure comes to that touches none of the open `requests`; None if it may."""
    match cause:
        case MessageArrived(_, Subscribe() | StageActivity()):
            return []
        case MessageArrived(peer, Submit(tag=tag) as submit):
            if not _asked_by(peer, submit, requests):
                return [SendPeer(peer, Failed(tag, reason))]  # it was not even admitted
    return None


def ending(
    cause: Event | Effect,
    at: Request | None,
    requests: Sequence[Request],
    known: Set[Request],
    before: Mapping[Request, int],
) -> list[Request]:
    """Those of `requests` that have to end: `at`, whose turn it was, or those that the cause
    concerns; those that are neither live nor waiting any more (`known`); those of which a token
    is lost that was taken since `before`, when each had so many. Empty if nothing tells."""
    concerned = _concerned(cause, requests) if at is None else {at.number}
    return [
        request
        for request in requests
        if request not in known
        or request.number in concerned
        or len(request.answer.token_ids) != before.get(request, len(request.answer.token_ids))
    ]


def _concerned(cause: Event | Effect, requests: Iterable[Request]) -> set[int]:
    """The numbers of the requests that an event or an effect is about."""
    match cause:
        case SegmentArrived(segment) | SendRing(segment):
            return {part.request for part in segment.parts}
        case HeadDone(request=number) | Drafted(request=number) | PromptEncoded(request=number):
            return {number}
        case ComputeFailed(request=number) | MessageArrived(_, Fault(request=number)):
            return {number}
        case SendPeer(_, CloseRequest(number) | Retain(number)):  # to a stage
            return {number}
        case MessageArrived(peer, message) | SendPeer(peer, message):
            return _asked_by(peer, message, requests)
    return set()


def _asked_by(peer: bytes, message: Message, requests: Iterable[Request]) -> set[int]:
    """The request that a message between the coordinator and a client is about."""
    tag = getattr(message, "tag", None)
    return {r.number for r in requests if (r.peer, r.tag) == (peer, tag)}
