"""Fields: the bounds of values in messages, which the codec checks in all that it reads."""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta

LARGEST = sys.float_info.max

Whole = Annotated[int, Meta(ge=0)]
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0.0, le=LARGEST)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]*$", min_length=64, max_length=64)]


def require(condition: bool, problem: str) -> None:
    """Raise ValueError if fields of a message do not fit each other."""
    if not condition:
        raise ValueError(problem)
