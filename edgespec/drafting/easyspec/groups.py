"""Layer groups: which layers of a draft model run their attention on one and the same input."""

from __future__ import annotations

from itertools import pairwise

USUAL_SIZE = 4
"""Layers of a group, the best of most models tried (EasySpec §4.1)."""

_FIRST_SIZE = 3  # no group after layer 0 is longer (EasySpec Appendix B)


def layer_groups(layers: int, size: int = USUAL_SIZE) -> tuple[tuple[int, int], ...]:
    """Groups [first, end) of all layers in order, as EasySpec's Appendix B has them.

    The first and the last layer are alone: what enters the first, an embedding, stands for nothing
    else. The next group has three layers at most, those after it `size`, and what is left is one.
    """
    bounds = [0, 1]
    while bounds[-1] < layers - 1:
        longest = min(size, _FIRST_SIZE) if len(bounds) == 2 else size
        bounds.append(min(bounds[-1] + longest, layers - 1))
    if layers > 1:
        bounds.append(layers)
    return tuple(pairwise(bounds))
