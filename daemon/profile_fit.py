"""Profile fit: from measured passes to the fixed cost of a layer and the cost of its bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from edgespec.config import QUANTISATIONS
from edgespec.daemon.kernels import is_four_bit
from edgespec.daemon.layer_times import TINY, LayerTimes
from edgespec.daemon.timing import LEAST_RUNS
from edgespec.planning.profile import ROWS

SEGMENT_ROWS = (1, 2, 4, 8, 16)
"""Rows that segments have, prompts aside: policies send at most 16 at a time."""
AS_FAST = 1.05
"""A 4-bit quantisation that is slower by less than this factor is as good: of such ones the first
of QUANTISATIONS is taken, so that no noise decides."""

BUSY = 1.5
"""Median over fastest run, above which something else has disturbed a measurement."""

_LEAST = 1e-9  # seconds; below what any clock tells


@dataclass(frozen=True, slots=True)
class Fit:
    """`layer_seconds`: what every layer costs, whatever its size. `tables`: by quantisation, the
    seconds at each of ROWS for 10^9 bytes as packed. `raised`: the rows at which a table was
    raised to what fewer rows took.
    """

    layer_seconds: float
    tables: Mapping[str, tuple[float, ...]]
    raised: Mapping[str, tuple[int, ...]]


def anyway(times: LayerTimes) -> tuple[float, float]:
    """What each layer and each pass cost apart from matrices: the slope and the rest of the line
    through the two blocks of tiny layers, in seconds.

    Their fastest runs count: such short runs suffer most from whatever else the device does, and
    what is subtracted from other times must not be more than it can be.
    """
    few, many = TINY
    layer = max(0.0, (times.tiny[many].least - times.tiny[few].least) / (many - few))
    return layer, max(0.0, times.tiny[few].least - few * layer)


def by_layer(times: LayerTimes) -> dict[int, float]:
    """Seconds of one layer by rows: of a pass without what it costs once, divided by its layers.

    What it costs once is less than a layer costs, so never more than half of the pass.
    """
    _, once = anyway(times)
    return {
        rows: max(_LEAST, (sample.median - min(once, sample.median / 2)) / times.depth)
        for rows, sample in times.passes.items()
    }


def fit(times: Mapping[str, LayerTimes], chosen: str, bandwidth: float | None) -> Fit:
    """Split the time of a layer into `layer_seconds` and what goes by bytes.

    `layer_seconds` is that of tiny layers of the quantisation `chosen`, but never more than half of
    any layer's time. On a GPU (`bandwidth` given) launching and reading go on at the same time, and
    adding them up would charge more than was measured: there it is never more than what is left
    when the layer's bytes have been read at `bandwidth`. Both parts together give back every time
    that was measured, unless a table had to be raised.
    """
    layers = {name: by_layer(one) for name, one in times.items()}
    left = [
        seconds - times[name].stored / bandwidth if bandwidth else seconds / 2
        for name, column in layers.items()
        for seconds in column.values()
    ]
    fixed = max(0.0, min(anyway(times[chosen])[0], *left))
    tables, raised = {}, {}
    for name, column in layers.items():
        plain = [(column[rows] - fixed) * 1e9 / times[name].stored for rows in ROWS]
        tables[name] = tuple(accumulate(plain, max))
        pairs = zip(ROWS, plain, tables[name], strict=True)
        raised[name] = tuple(rows for rows, before, after in pairs if after > before)
    return Fit(fixed, tables, raised)


def best_four_bit(times: Mapping[str, LayerTimes]) -> str:
    """The 4-bit quantisation with the least geometric mean of a layer's times over SEGMENT_ROWS,
    or the first one that is less than AS_FAST times as slow; "" if there is none."""
    means = {
        name: _geometric_mean([by_layer(times[name])[rows] for rows in SEGMENT_ROWS])
        for name in QUANTISATIONS
        if name in times and is_four_bit(name)
    }
    limit = AS_FAST * min(means.values(), default=0.0)
    return next((name for name, mean in means.items() if mean <= limit), "")


def doubts(times: Mapping[str, LayerTimes]) -> list[str]:
    """Why these times may be wrong, and what to do."""
    samples = [sample for one in times.values() for sample in one.passes.values()]
    found = []
    ratio = max(sample.median / sample.least for sample in samples)
    if ratio > BUSY:
        found.append(
            f"some passes took {ratio:.1f} times as long as the fastest of their kind: something "
            "else ran here; end it and measure again, or take more --seconds"
        )
    if any(len(sample.seconds) < LEAST_RUNS for sample in samples):
        found.append(f"there was no time for {LEAST_RUNS} runs of every pass; take more --seconds")
    return found


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
