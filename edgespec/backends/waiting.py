"""Waiting: what a worker has still to do, and which of it comes next, together."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf

from edgespec.backends.compute import FIRST
from edgespec.backends.jobs import Drafts, ReadPart, RunHeads
from edgespec.decoding.effects import CloseDraft, Draft, OpenDraft, RunHead
from edgespec.drafting.base import PASS_ROWS
from edgespec.machines.effects import Effect
from edgespec.policy.base import Expand, Grow


class Waiting:
    """Effects that wait: heads before all others, each kind in the order in which it was added.

    Heads that wait together are one job. So are drafts of one kind: those of other requests that
    wait behind the first one, if nothing of their own request waits between. Neither has more than
    PASS_ROWS rows. A draft that has a longer text to read reads a part of it, and the rest after
    all that waits then, so that no other waits longer than for one part.
    """

    def __init__(self) -> None:
        # With when the cause of each happened.
        self._heads: deque[tuple[float, Effect]] = deque()
        self._others: deque[tuple[float, Effect]] = deque()
        self._read: dict[int, int] = {}  # tokens that a request's drafts had to read so far

    def __bool__(self) -> bool:
        return bool(self._heads or self._others)

    @property
    def first(self) -> tuple[float, Effect]:
        """What comes first of it, and when its cause happened; there must be something."""
        return (self._heads or self._others)[0]

    @property
    def head_at(self) -> float | None:
        """When the cause happened of the head that waits longest; None if none does."""
        return self._heads[0][0] if self._heads else None

    def __iter__(self) -> Iterator[Effect]:
        return (effect for _, effect in (*self._heads, *self._others))

    def add(self, effect: Effect, at: float = 0.0) -> None:
        """`at`: when its cause happened."""
        (self._heads if isinstance(effect, FIRST) else self._others).append((at, effect))

    def clear(self) -> None:
        self._heads.clear()
        self._others.clear()

    def take(self, free_at: float = inf) -> tuple[float, Effect]:
        """The next job, and when the cause of its first effect happened; there must be one.

        `free_at`: when the device is free for it: what was asked for later does not join.
        """
        if self._heads:
            return self._take_heads(free_at)
        at, effect = self._others.popleft()
        match effect:
            case OpenDraft(request, base=base, rows=rows, ends=ends):
                self._read[request] = min(self._read.get(base, 0), rows)
                if ends:
                    self._read.pop(base, None)
            case CloseDraft(request):
                self._read.pop(request, None)
            case Draft():
                if self._unread(effect) > PASS_ROWS and not effect.features.rows:
                    return at, self._part(at, effect)
                return at, self._joined(effect, max(at, free_at))
        return at, effect

    def _take_heads(self, free_at: float) -> tuple[float, Effect]:
        at, first = self._heads.popleft()
        if not isinstance(first, RunHead):
            return at, first
        joined, rows, later = [first], len(first.rows), deque[tuple[float, Effect]]()
        for when, head in self._heads:
            if isinstance(head, RunHead) and not later and when <= max(at, free_at):
                rows += len(head.rows)
                if rows <= PASS_ROWS:
                    joined.append(head)
                    continue
            later.append((when, head))
        self._heads = later
        return at, RunHeads(tuple(joined)) if len(joined) > 1 else first

    # --- drafts -------------------------------------------------------------------------------

    def _unread(self, draft: Draft) -> int:
        """How many tokens it has to read first."""
        known = self._read.get(draft.request, 0)
        return draft.features.rows or max(len(draft.context) - known, 0)

    def _rows(self, draft: Draft) -> int:
        """Rows that it needs at a time."""
        plan = draft.plan
        asked = len(draft.paths) if isinstance(plan, Expand) else plan.width
        return self._unread(draft) + (0 if _kind(draft) is None else asked)

    def _part(self, at: float, draft: Draft) -> ReadPart:
        """The first part of what it has to read; it waits for the rest behind all others."""
        request = draft.request
        end = self._read[request] = self._read.get(request, 0) + PASS_ROWS
        places = (n for n, (_, other) in enumerate(self._others) if request in _named(other))
        self._others.insert(next(places, len(self._others)), (at, draft))
        return ReadPart(request, draft.context, end)

    def _joined(self, first: Draft, start: float) -> Effect:
        """The draft with all that can share its passes."""
        joined, rows = [first], self._rows(first)
        kind = _kind(first)
        barred, later = {first.request}, deque[tuple[float, Effect]]()
        for at, effect in self._others:
            if isinstance(effect, Draft) and effect.request not in barred and at <= start:
                more, own = self._rows(effect), _kind(effect)
                if rows + more <= PASS_ROWS and kind in (None, own):
                    joined.append(effect)
                    rows, kind = rows + more, own
                    barred.add(effect.request)
                    continue
            barred |= _named(effect)
            later.append((at, effect))
        self._others = later
        for draft in joined:
            self._read[draft.request] = max(self._read.get(draft.request, 0), len(draft.context))
        return Drafts(tuple(joined)) if len(joined) > 1 else first


def _kind(draft: Draft) -> type[Expand | Grow] | None:
    """What it does: guess one level, or grow a tree by several; None: only read, which no guess
    that is asked for before has to wait for."""
    plan = draft.plan
    if isinstance(plan, Expand):
        return Expand
    return None if isinstance(plan, Grow) and plan.depth == 0 else Grow


def _named(effect: Effect) -> set[int]:
    """The requests that an effect names."""
    named = {getattr(effect, "request", -1)}
    return named | {effect.base} if isinstance(effect, OpenDraft) else named
