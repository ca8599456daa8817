"""What an object keeps alive: counted by type, to see whether it grows with what was asked."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Collection
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)
"""Of a program, not of an object: what these refer to is left out."""
_VALUES = (int, float, str, bytes, NoneType)


def alive(*roots: Any, without: Collection[Any] = ()) -> Counter[str]:
    """How many objects can be reached from the roots, by the names of their types; numbers, texts
    and what can be reached by way of others (`without`) are left out."""
    seen, left = {id(one): one for one in (*roots, *without)}, list(roots)
    while left:
        for found in gc.get_referents(left.pop()):
            if id(found) not in seen and not isinstance(found, (*_SHARED, *_VALUES)):
                seen[id(found)] = found
                left.append(found)
    return Counter(type(one).__name__ for one in seen.values())
