"""Damage: what a loss of power or a failing disk makes of a file."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from support.cases import case

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "zeros": lambda whole: bytes(len(whole)),
    "zeros from the middle on": lambda whole: whole[: len(whole) // 2].ljust(len(whole), b"\0"),
    "noise": lambda whole: random.Random(1).randbytes(len(whole)),
}
LIKELIEST = ("zeros from the middle on",)


def damaged(file: Path, ways: Collection[str] = tuple(DAMAGES)) -> Iterator[str]:
    """Damage a file in these ways, one after the other, by name; at last it is whole again.

    What is done with the damaged file is a named case.
    """
    whole = file.read_bytes()
    for name in ways:
        with case(file, name):
            file.write_bytes(DAMAGES[name](whole))
            yield name
    file.write_bytes(whole)
