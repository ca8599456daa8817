"""Queue: the requests that wait: the order of their start, their prompts, what clients are told.

Askers take turns, one request each; the requests of one asker start in the order in which they
came. An asker may have no more requests waiting than places are free, so that there is always one
for another asker: a single asker gets half of the places, the second one half of the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from edgespec.decoding.effects import EncodePrompt
from edgespec.decoding.request import Request
from edgespec.errors import QueueFull
from edgespec.machines.effects import Effect


class RequestQueue:
    """Requests that wait, the encoding of their prompts, and what their clients are told.

    `has_changed`: their order has, or what they wait for, since `tell` was called.
    """

    def __init__(self, limit: int, longest_prompt: int) -> None:
        """`limit`: requests that may wait; `longest_prompt`: tokens of the longest prompt that can
        be answered."""
        self._limit = limit
        self._longest_prompt = longest_prompt
        self._first: deque[Request] = deque()  # those that had begun
        # In the order of their turns. Whose turn it was last comes first until the next one begins:
        # what it asks meanwhile comes after all others.
        self._askers: dict[str, deque[Request]] = {}
        self._served: str | None = None
        # The request whose prompt is being encoded: of those without a grammar, and with one.
        self._encoding: dict[bool, int] = {}
        self._turns = 0
        self._turn: dict[str, int] = {}  # in which a prompt of each asker was encoded last
        self.has_changed = False

    def __len__(self) -> int:
        return sum(map(len, self._askers.values())) + len(self._first)

    def check_room(self, asker: str, begins: int) -> None:
        """Raise QueueFull if this asker cannot have one more request waiting.

        `begins`: how many of the first ones begin as soon as their prompts are encoded, and so wait
        for no other.
        """
        if begins > len(self):
            return
        waiting = self.in_order()[begins:]
        own, free = sum(r.client.asker == asker for r in waiting), self._limit - len(waiting)
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
        self._askers.setdefault(request.client.asker, deque()).append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Requests that had begun wait again, in that order, in front of all others."""
        self.has_changed = True
        self._first.extendleft(reversed(requests))

    def take(self, request: Request) -> Request:
        """Take out a request, which begins now: it was its asker's turn."""
        self.has_changed = True
        if request in self._first:
            self._first.remove(request)
            return request
        if self._served is not None:
            served = self._askers.pop(self._served)
            if served:
                self._askers[self._served] = served
        self._served = request.client.asker
        self._askers[request.client.asker].remove(request)
        return request

    def remove(self, request: Request) -> None:
        """A request waits no more."""
        self.has_changed = True
        if request in self._first:
            self._first.remove(request)
            return
        waiting = self._askers[request.client.asker]
        waiting.remove(request)
        if not waiting and request.client.asker != self._served:
            del self._askers[request.client.asker]

    def in_order(self) -> list[Request]:
        """All of them as they would begin if no other request came."""
        turns = [waiting for asker, waiting in self._askers.items() if asker != self._served]
        turns += [self._askers[self._served]] if self._served is not None else []
        longest = max(map(len, turns), default=0)
        rounds = [waiting[n] for n in range(longest) for waiting in turns if n < len(waiting)]
        return [*self._first, *rounds]

    # --- their prompts ------------------------------------------------------------------------

    def is_encoding(self, request: int) -> bool:
        """Whether the prompt of that request is being encoded."""
        return request in self._encoding.values()

    def encoded(self, request: int) -> None:
        """The prompt of that request is encoded, or cannot be."""
        if self.is_encoding(request):
            self._encoding = {k: r for k, r in self._encoding.items() if r != request}
            self.has_changed = True  # it may have to wait for rows

    def encode_next(self) -> list[Effect]:
        """Have one prompt without a grammar and one with it encoded at a time, in the order of the
        queue; so a prompt that is cancelled before its turn costs nothing. To compile a grammar may
        take seconds, for which no other prompt waits."""
        effects: list[Effect] = []
        for has_grammar in (False, True):
            if has_grammar not in self._encoding:
                effects += self._encode_one(has_grammar)
        return effects

    def _encode_one(self, has_grammar: bool) -> list[Effect]:
        in_order = self.in_order()
        asks = [r for r in in_order if r.asked and bool(r.asked.grammar) == has_grammar]
        if not asks:
            return []
        # Askers take turns here too: those whose requests fail, or who leave, never begin.
        request = min(asks, key=lambda r: self._turn.get(r.client.asker, 0))
        self._turns += 1
        known = {r.client.asker: self._turn.get(r.client.asker, 0) for r in in_order}
        self._turn = {**known, request.client.asker: self._turns}
        self._encoding[has_grammar] = request.number
        assert request.asked is not None
        return [EncodePrompt(request.number, request.asked, self._longest_prompt)]

    def first(self) -> Request | None:
        """The one that begins next, if its prompt is encoded; those whose grammar is not compiled
        are passed over."""
        in_order = self.in_order()
        first = next((r for r in in_order if not (r.asked and r.asked.grammar)), None)
        return None if first is None or first.asked else first

    # --- what they are told -------------------------------------------------------------------

    def mark_changed(self) -> None:
        """What they wait for has changed, though not their order."""
        self.has_changed = True

    def tell(self, missing: str, running: int, most: int) -> list[Effect]:
        """Say to each request why it waits, unless it was told so: for what is `missing`, or for
        those before it, `running` ones included, of which there may be so many at once."""
        self.has_changed = False
        effects: list[Effect] = []
        for place, request in enumerate(self.in_order(), running):
            # Else it waits for its prompt's encoding alone.
            if missing or place >= most or (place and not request.asked):
                effects += request.client.notify(
                    missing or f"waiting behind {place} other request(s)"
                )
        return effects
