"""Masking: segments that wait until grammars have said what may come behind their rows."""

from __future__ import annotations

from collections.abc import Container, Mapping

from msgspec.structs import replace

from edgespec.decoding.effects import FindMasks, SendRing
from edgespec.decoding.events import Masks, MasksFound
from edgespec.decoding.request import Request
from edgespec.errors import ConfigError, EdgespecError
from edgespec.machines.effects import Effect
from edgespec.tree.ledger import IntArray
from edgespec.verify.rules import Answer, Grammar
from edgespec.wire.segment import Part, Segment

Ends = list[tuple[Request, str]]
"""Requests that cannot go on, and why."""


class Masking:
    """The segments of a ring whose last stage chooses, on their way to it. They leave in order: one
    that needs nothing waits for those that left before it."""

    def __init__(self) -> None:
        self.waiting: dict[int, Segment] = {}
        """By their numbers; those of an earlier ring may be among them."""

    def send(self, segment: Segment, live: Mapping[int, Request], flying: Container[int]) -> Effect:
        """A segment leaves, or waits for masks; `flying`: the numbers of those that are on the
        ring, or wait for that: others were of an earlier one."""
        asked = tuple(one for part in segment.parts if (one := _asked(live[part.request], part)))
        self.waiting = {seq: one for seq, one in self.waiting.items() if seq in flying}
        if not asked and not self.waiting:
            return SendRing(segment)
        self.waiting[segment.header.seq] = segment
        return FindMasks(segment.header.seq, asked)

    def take(
        self, event: MasksFound, live: Mapping[int, Request], flying: Container[int]
    ) -> tuple[list[Effect], Ends]:
        """The masks of a segment are known: it leaves with them. Comes with the requests whose
        grammars cannot go on, and why: their rows are for nobody."""
        segment = self.waiting.pop(event.seq, None)
        failed: Ends = []
        if segment is None or event.seq not in flying:
            return [], failed
        found, parts = dict(event.found), []
        for part in segment.parts:
            masks, request = found.get(part.request), live.get(part.request)
            if masks is not None and request is not None:
                try:
                    part = _masked(request, part, masks)
                except EdgespecError as problem:
                    failed.append((request, str(problem)))
            parts.append(part)
        return [SendRing(replace(segment, parts=tuple(parts)))], failed


def _chosen(request: Request, part: Part) -> IntArray:
    """Those of a part's rows behind which a token is chosen, if the walk comes there."""
    last = len(request.outbox.prefix) - 1
    return part.ids[part.ids == last] if part.committed else part.ids


def _masked(request: Request, part: Part, masks: Masks) -> Part:
    """The part, with what may come behind its rows. Raises EdgespecError if the grammar failed, or
    that is too much."""
    if isinstance(masks, str):
        raise ConfigError(masks)
    allowed = request.outbox.masks.allowed(_chosen(request, part), masks)
    assert request.choosing is not None
    choosing = part.choosing or replace(request.choosing, rules=None)
    return replace(part, choosing=replace(choosing, allowed=allowed))


def _asked(request: Request, part: Part) -> tuple[int, Grammar, tuple[Answer, ...]] | None:
    """What FindMasks says of a part; None if no grammar is asked."""
    rules, tree = request.rules, request.tree
    if rules is None or rules.grammar is None or tree is None:
        return None
    answer = request.answer.token_ids
    paths = tree.paths(_chosen(request, part).tolist())
    return request.number, rules.grammar, tuple((*answer, *path) for path in paths)
