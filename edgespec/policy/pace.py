"""Pace: whether an answer comes sooner with guesses than by plain decoding, timed where in doubt.

What is learnt of steps and passes is learnt while guesses compete with the stages for cores and
links, so that it does not tell what the ring would do without them. Where tokens come hardly faster
than rows go round, both ways are timed in turn, and the quicker one is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TIMED = 32
"""Tokens over which each way is timed."""
DOUBT = 0.8
"""Of the time of a plain token, as estimated, what a token takes with guesses to be in doubt."""
AGAIN = 256
"""Tokens until the other way is timed again; doubled each time, up to 8 times."""
SETTLING = 2
"""Times that tokens come after a change that are not timed: a draft first reads what it missed."""
STALL = 8
"""Plain tokens' time that one wait counts for at most: a link that stands still for seconds says
nothing of guesses."""


@dataclass(slots=True)
class Pace:
    """Of answers to one request at a time. `guesses`: whether guesses are made now."""

    guesses: bool = True
    # Seconds of a token with and without guesses: half of it is what was timed last.
    _each: dict[bool, float] = field(default_factory=dict)
    _settling: int = 0
    _tokens: int = 0
    _seconds: float = 0.0
    _trial: bool = False
    _left: int = 0
    _trials: int = 0

    def learn(self, tokens: int, seconds: float, plain: float) -> None:
        """So many tokens came `seconds` after the one before them; `plain`: what one would take by
        plain decoding, as far as that can be estimated."""
        if self._settling:
            self._settling -= 1
            return
        self._tokens += tokens
        self._seconds += min(seconds, STALL * plain)
        if self._tokens < TIMED:
            return
        each = self._seconds / self._tokens
        each = self._each[self.guesses] = (each + self._each.get(self.guesses, each)) / 2
        self._left -= self._tokens
        self._tokens, self._seconds = 0, 0.0
        before = self.guesses
        if self._trial:
            self._trial, self.guesses = False, self._each[True] <= self._each[False]
            self._left = AGAIN << min(self._trials, 3)
            self._trials += 1
        elif self._left <= 0 and (not self.guesses or each > DOUBT * plain):
            self._trial, self.guesses = True, not self.guesses
        self._settling = SETTLING * (self.guesses != before)
