"""Profile figures: from measured passes to the cost of a layer and of its bytes, with origins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import geometric_mean

from edgespec.config import QUANTISATIONS
from edgespec.daemon.bandwidths import CACHE_ROWS, Rate
from edgespec.daemon.kernels import is_four_bit
from edgespec.daemon.layer_times import SEEN, TINY, LayerTimes, Shape
from edgespec.daemon.timing import LEAST_RUNS, Sample, shown
from edgespec.planning.cost_model import GROUP, packed_bytes
from edgespec.planning.operations import USUAL_OPERATIONS, layer_operations
from edgespec.planning.profile import ROWS, Figure, RowTable

SIXTEEN_BIT = "none"
"""The quantisation of matrices in 16 bits."""

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
    layer, few = _a_layer(times.tiny), min(TINY)
    return layer, max(0.0, times.tiny[few].least - few * layer)


def _a_layer(tiny: Mapping[int, Sample]) -> float:
    """The slope of the line through two blocks of tiny layers."""
    few, many = TINY
    return max(0.0, (tiny[many].least - tiny[few].least) / (many - few))


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
        name: geometric_mean([by_layer(times[name])[rows] for rows in SEGMENT_ROWS])
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


def tidy(value: float) -> float:
    """Four significant digits, more than a measurement deserves; whole if they are."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded >= 1 and rounded.is_integer() else rounded


def row_table(seconds: Iterable[float], origin: str) -> RowTable:
    return RowTable.of(map(tidy, seconds), origin)


def called(name: str) -> str:
    """A quantisation's name for users."""
    return "16 bit" if name == SIXTEEN_BIT else name


@dataclass(frozen=True, slots=True)
class ProfileFigures:
    """Makes the figures that follow from the times of a layer.

    `conditions`: the beginning of each origin; `chosen`: the 4-bit quantisation; `overlaps`:
    whether reading weights and launching kernels go on at the same time, as on a GPU.
    """

    conditions: str
    shape: Shape
    times: Mapping[str, LayerTimes]
    fit: Fit
    chosen: str
    overlaps: bool

    def table(self, name: str) -> RowTable:
        one = self.times[name]
        copies = (
            f"{one.depth} layers at a time" if one.depth > 1 else f"{one.copies} copies by turns"
        )
        raised = ", ".join(map(str, self.fit.raised[name]))
        fixed = "layer_seconds" if self.overlaps else "launch_seconds"
        origin = (
            f"{self.conditions}: a layer of {self.shape.name} with random weights, {called(name)}, "
            f"{one.stored} bytes, {copies}, without {fixed}; passes at 1 row: "
            f"{one.passes[1]}, at 64 rows: {one.passes[64]}"
            + (f"; raised to what fewer rows took: {raised} rows" if raised else "")
        )
        return row_table(self.fit.tables[name], origin)

    def four_bit(self) -> RowTable:
        """The chosen quantisation's table, for bytes as cost models count them."""
        one = self.times[self.chosen]
        ratio = one.stored / packed_bytes(one.weights, 4)
        origin = (
            f"{self.chosen}, the fastest of 4 bits over 1 to 16 rows, which segments have, times "
            f"{ratio:.4f}: it stores {8 * one.stored / one.weights:.2f} bits a weight where cost "
            f"models charge {8 * packed_bytes(GROUP, 4) / GROUP:.2f}; "
            f"{self.table(self.chosen).origin}"
        )
        return row_table((seconds * ratio for seconds in self.fit.tables[self.chosen]), origin)

    def layer_seconds(self) -> Figure:
        if not self.overlaps:
            return Figure(0, f"{self.conditions}: launch_seconds has it, on a processor")
        tiny = self.times[self.chosen].tiny
        origin = self._of_tiny(tiny)
        if self.fit.layer_seconds < (slope := _a_layer(tiny)):
            origin += (
                f"; {shown(slope)} a layer, lowered to what the measured layers leave when their "
                "bytes have been read at memory_bandwidth, as the two overlap"
            )
        return Figure(tidy(self.fit.layer_seconds), origin)

    def launch_seconds(self) -> Figure:
        """Of a processor all that a layer costs whatever its size."""
        launched = self.times[self.chosen].launched
        origin, slope = self._of_tiny(launched), _a_layer(launched)
        share = USUAL_OPERATIONS / layer_operations(self.shape.config.model_type)
        if share != 1:
            origin += f"; times {share:.3g}, for a layer of {USUAL_OPERATIONS} operations"
        if self.overlaps:
            return Figure(tidy(share * slope), f"{origin}; until the host had launched it all")
        if self.fit.layer_seconds < slope:
            origin += f"; {shown(slope)} a layer, lowered to half of the fastest measured layer"
        return Figure(tidy(share * self.fit.layer_seconds), origin)

    def _of_tiny(self, tiny: Mapping[int, Sample]) -> str:
        few, many = TINY
        return (
            f"{self.conditions}: 1 row through blocks of {few} and of {many} layers like those of "
            f"{self.shape.name} with tiny matrices, {self.chosen}: the difference of the fastest "
            f"runs, divided by {many - few} ({few}: {tiny[few]}; {many}: {tiny[many]})"
        )

    def copy_bandwidth(self, gather: Rate) -> Figure:
        """The slower one of gathering rows and attending to them, as one figure stands for both."""
        of = self.times[SIXTEEN_BIT]
        more = (of.seen.median - of.passes[1].median) / of.depth
        slowest = gather.per_second
        attention = "attention over cached rows took no time that could be measured"
        if more > 0:
            read = SEEN * self.shape.kv_bytes / more
            slowest = min(slowest, read)
            attention = (
                f"attention of 1 row reads {SEEN} cached rows of a layer of {self.shape.name} at "
                f"{read / 1e9:.3g} GB/s (a pass with them: {of.seen})"
            )
        origin = (
            f"{self.conditions}: the slower one of two: a gather moves cache rows at "
            f"{gather.per_second / 1e9:.3g} GB/s, bytes read and bytes written counted (every "
            f"second of {CACHE_ROWS} rows; {gather.sample}); {attention}"
        )
        return Figure(tidy(slowest), origin)
