"""Work for processes: what they run must be importable by name, which test files are not."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.errors import EdgespecError


def half(number: int, news: Callable[[int], None]) -> int:
    """Half of an even number; an odd one is an error, and 66 ends the process."""
    if number % 2:
        raise EdgespecError(f"{number} is odd")
    if number == 66:
        raise SystemExit
    news(1)
    return number // 2
