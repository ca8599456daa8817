"""A time of day that jumps, by hours, in every Python process that has this folder on its path.

Python imports it at its start. So behaves the clock of a board that the network sets long after the
start, and a person then sets back. Waits and limits have to follow time.monotonic, which goes on.
"""

import os
import random
import sys
import time

MOST_S = 6 * 3600.0
USUAL_CALLS = 5
"""Between two jumps."""

DATES = ("access_store.py", "test_first_steps.py", "test_token.py")
"""Files that ask for the date of tokens, which a jump rightly ends: for them there are none."""

_random = random.Random(f"{os.environ.get('EDGESPEC_CLOCK_SEED')} {os.getpid()}")
_real, _real_ns = time.time, time.time_ns
_ahead = round(_random.uniform(-MOST_S, MOST_S))


def _jumped() -> int:
    """By how many seconds the clock is ahead now."""
    global _ahead
    if sys._getframe(2).f_code.co_filename.endswith(DATES):
        return 0
    if _random.random() < 1 / USUAL_CALLS:
        _ahead = round(_random.uniform(-MOST_S, MOST_S))
    return _ahead


time.time = lambda: _real() + _jumped()
time.time_ns = lambda: _real_ns() + _jumped() * 1_000_000_000
