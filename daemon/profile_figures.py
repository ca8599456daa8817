"""Profile figures: from the times of a layer to the figures of a profile, with their origins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgespec.daemon.bandwidths import CACHE_ROWS, Rate
from edgespec.daemon.layer_times import SEEN, TINY, LayerTimes, Shape
from edgespec.daemon.profile_fit import Fit, anyway
from edgespec.daemon.timing import shown
from edgespec.planning.cost_model import GROUP, packed_bytes
from edgespec.planning.profile import Figure, RowTable

SIXTEEN_BIT = "none"
"""The quantisation of matrices in 16 bits."""


def tidy(value: float) -> float:
    """Four significant digits, more than a measurement deserves; whole if they are."""
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded >= 1 and rounded.is_integer() else rounded


def row_table(seconds: Iterable[float], origin: str) -> RowTable:
    """A table of tidy numbers."""
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
        """The table of a quantisation."""
        one = self.times[name]
        copies = (
            f"{one.depth} layers at a time" if one.depth > 1 else f"{one.copies} copies by turns"
        )
        raised = ", ".join(map(str, self.fit.raised[name]))
        origin = (
            f"{self.conditions}: a layer of {self.shape.name} with random weights, {called(name)}, "
            f"{one.stored} bytes, {copies}, without layer_seconds; passes at 1 row: "
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
        """The fixed cost of a layer."""
        few, many = TINY
        tiny = self.times[self.chosen].tiny
        slope, _ = anyway(self.times[self.chosen])
        origin = (
            f"{self.conditions}: 1 row through blocks of {few} and of {many} layers like those of "
            f"{self.shape.name} with tiny matrices, {self.chosen}: the difference of the fastest "
            f"runs, divided by {many - few} ({few}: {tiny[few]}; {many}: {tiny[many]})"
        )
        if self.fit.layer_seconds < slope:
            origin += f"; {shown(slope)} a layer, lowered to " + (
                "what the measured layers leave when their bytes have been read at "
                "memory_bandwidth, as the two overlap"
                if self.overlaps
                else "half of the fastest measured layer"
            )
        return Figure(tidy(self.fit.layer_seconds), origin)

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
