"""Queue: the requests that wait, how many of them one asker may have, and the order of their start.

Askers take turns, one request each; the requests of one asker start in the order in which they
came. An asker may have no more requests waiting than places are free, so that there is always one
for somebody else: whoever asks alone gets half of the places, the second one half of the rest.
"""

from __future__ import annotations

from collections import deque

from edgespec.decoding.request import Request
from edgespec.errors import QueueFull


class RequestQueue:
    """Requests that wait. `has_changed`: since whoever tells them of it set it back."""

    def __init__(self, limit: int) -> None:
        """`limit`: requests that may wait."""
        self._limit = limit
        self._first: Request | None = None  # it had begun
        # In the order of their turns. Whose turn it was last comes first until the next one begins:
        # what it asks meanwhile is behind all others.
        self._askers: dict[str, deque[Request]] = {}
        self._served: str | None = None
        self.has_changed = False

    def __len__(self) -> int:
        return sum(map(len, self._askers.values())) + (self._first is not None)

    def check_room(self, asker: str, begins: bool) -> None:
        """Raise QueueFull if this asker cannot have one more request waiting.

        `begins`: whether the first one begins as soon as its prompt is encoded, and so waits for
        nobody.
        """
        waiting = self.in_order()[begins:]
        own, free = sum(r.asker == asker for r in waiting), self._limit - len(waiting)
        if free <= 0:
            raise QueueFull(f"{len(waiting)} requests are waiting already; try again later")
        if own >= free:
            raise QueueFull(
                f"{own} requests of yours are waiting already, and the {free} place(s) that are "
                "free are for others; try again later"
            )

    def add(self, request: Request) -> None:
        """A request came."""
        self.has_changed = True
        self._askers.setdefault(request.asker, deque()).append(request)

    def put_back(self, request: Request) -> None:
        """A request that had begun waits again, in front of all others."""
        self.has_changed = True
        assert self._first is None, "there is one at a time that has begun"
        self._first = request

    def next(self) -> Request:
        """Take out the request that begins now. There must be one."""
        self.has_changed = True
        if self._first is not None:
            request, self._first = self._first, None
            return request
        if self._served is not None:
            served = self._askers.pop(self._served)
            if served:
                self._askers[self._served] = served
        self._served = next(iter(self._askers))
        return self._askers[self._served].popleft()

    def remove(self, request: Request) -> None:
        """A request waits no more."""
        self.has_changed = True
        if request is self._first:
            self._first = None
            return
        waiting = self._askers[request.asker]
        waiting.remove(request)
        if not waiting and request.asker != self._served:
            del self._askers[request.asker]

    def in_order(self) -> list[Request]:
        """All of them as they would begin if nobody else asked."""
        turns = [waiting for asker, waiting in self._askers.items() if asker != self._served]
        turns += [self._askers[self._served]] if self._served is not None else []
        longest = max(map(len, turns), default=0)
        rounds = [waiting[n] for n in range(longest) for waiting in turns if n < len(waiting)]
        return [*([self._first] if self._first else []), *rounds]
