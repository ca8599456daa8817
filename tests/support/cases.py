"""Many small cases in one test: a failure still names its case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """One case of a loop: if it fails, the report of the test says which one it was."""
    try:
        yield
    except BaseException:
        print("the case that failed:", *what)
        raise
