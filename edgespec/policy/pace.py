"""Pace: whether an answer comes sooner with guesses than by plain decoding, timed where in doubt.

What is learnt of steps and passes is learnt while guesses compete with the stages for cores and
links, so that it does not tell what the ring would do without them. So tokens are timed, of each
request by itself, as one text is much harder to guess than another: where they come hardly faster
than rows go round, all ways are timed in turn, and the quickest one is kept for a while. What plain
decoding takes is the ring's, and known to the next request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

TIMED = 16
"""Tokens over which each way is timed."""
DOUBT = 0.8
"""Of the time of a plain token, as estimated, what a token takes with guesses to be in doubt."""
AGAIN = 64
"""Tokens until all ways are timed again; doubled each time, up to 8 times."""
OLD = 1024
"""Tokens after which it is not known any more what plain decoding takes."""
SETTLING = 2
"""Times that tokens come after a change that are not timed: a draft first reads what it missed."""
STALL = 8
"""Plain tokens' time that one wait counts for at most: a link that stands still for seconds says
nothing of guesses."""


class Way(IntEnum):
    """What is guessed: nothing, what takes no pass of a model, or all that there is."""

    PLAIN = 0
    FREE = 1
    ALL = 2


@dataclass(slots=True)
class PlainTime:
    """Of one ring: what a token takes by plain decoding, in seconds; 0: not known."""

    seconds: float = 0.0
    age: int = 0

    def timed(self, each: float) -> None:
        """It took that, over some tokens."""
        self.seconds, self.age = (each + (self.seconds or each)) / 2, 0

    def passed(self, tokens: int) -> None:
        """So many tokens came, in whatever way."""
        self.age += tokens
        if self.age > OLD:
            self.seconds = 0.0


@dataclass(slots=True)
class Pace:
    """Of one request, as long as it is alone. `way`: what is guessed now; `free`: whether something
    can be guessed without the passes that all takes."""

    plain: PlainTime = field(default_factory=PlainTime)
    way: Way = Way.ALL
    free: bool = False
    _each: dict[Way, float] = field(default_factory=dict)  # seconds of a token, timed last
    _to_time: list[Way] = field(default_factory=list)
    _settling: int = 0
    _tokens: int = 0
    _seconds: float = 0.0
    _left: int = 0
    _rounds: int = 0

    def learn(self, tokens: int, seconds: float, plain: float) -> None:
        """So many tokens came `seconds` after the one before them; `plain`: what one would take by
        plain decoding, as far as that can be estimated."""
        self.plain.passed(tokens)
        if self._settling:
            self._settling -= 1
            return
        self._tokens += tokens
        self._seconds += min(seconds, STALL * plain)
        if self._tokens < TIMED:
            return
        before, each = self.way, self._seconds / self._tokens
        self._each[before] = each
        if before is Way.PLAIN:
            self.plain.timed(each)
        self._left -= self._tokens
        self._tokens, self._seconds = 0, 0.0
        if self._to_time:
            self.way = self._to_time.pop()
        elif len(self._each) > 1:
            self.way = min(sorted(self._each, reverse=True), key=self._each.__getitem__)
            self._each.clear()
            self._left = AGAIN << min(self._rounds, 3)
            self._rounds += 1
        elif self._left <= 0 and before is not Way.ALL:
            self.way = Way.ALL
            self._each.clear()
            self._to_time = [before]
        elif self._left <= 0 and each > (self.plain.seconds or DOUBT * plain):
            ways = [Way.PLAIN, Way.FREE] if self.free else [Way.PLAIN]
            self.way, self._to_time = ways.pop(), ways
        self._settling = SETTLING * (self.way != before)
