"""Layout: which devices make the fastest ring, in which order, with how many layers; exactly.

The problem. A ring starts at D0, goes to a first device, then to any further ones in the order in
which they are listed, and back. Free to choose: the first device, which others take part, and how
many layers each has, at least one and at most as many as fit it. Where there is no way from one
device to another, that link takes for ever. Minimise

    slowest_weight × slowest + trip_weight × trip + price

where `trip` adds up, over the devices, layers × seconds a layer, and over the links; `slowest` is
the largest of layers × seconds a layer (of a wide segment) and of the links' times for it; `price`
adds up layers × price a layer. The
last device may have something of its own to do, and less room: its `End` is part of all three. It
has at least the last `bound` layers, of models of which these have to be together.

The way. If no step may take longer than T, the rest of the sum is least on a shortest path: its
state is (first device, last device so far, layers placed so far). T = infinity gives the cheapest
layout of all, whose slowest step is T1; the next T is the largest step that any layout can have
below T1, and so on down. Of all these the best is the optimum: a layout with slowest step S is a
candidate wherever T >= S, and between two looked-at values of T the cheapest one stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from operator import attrgetter

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_EVEN = 1.0 + 1e-12  # two ways to compute the same step differ by rounding


@dataclass(frozen=True, slots=True)
class End:
    """What a device has besides its layers if it is the last one, in seconds of trip, step and
    price; and how many layers fit it then."""

    most: int
    trip: float
    step: float
    price: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One device: how many layers fit it, seconds a layer.

    `trip`: of one row; `step`: of a wide segment. `price`: seconds that a layer on this device
    adds to the sum, beside these. `end`: None if its being the last makes no difference. `closes`:
    there is no way from it to another device.
    """

    most: int
    trip: float
    step: float
    price: float = 0.0
    end: End | None = None
    closes: bool = False

    def step_of(self, layers: int, last: bool) -> float:
        return layers * self.step + (self.end.step if last and self.end else 0.0)

    def fitting(self, last: bool) -> int:
        """How many layers fit it, as the last device or another."""
        return self.end.most if last and self.end else self.most


@dataclass(frozen=True, slots=True)
class Layout:
    """A ring: devices by index, first to last, and the layers of each; seconds."""

    order: tuple[int, ...]
    split: tuple[int, ...]
    slowest: float
    trip: float
    price: float


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Seconds between nodes: 0 is D0, 1 … M the devices. [M + 1, M + 1], from row to column.

    `trip`: of one row, with the way; `step`: how long a wide segment keeps the link busy.
    """

    trip: Floats
    step: Floats


def fits(layers: int, devices: Sequence[Candidate], bound: int = 0) -> bool:
    """Whether any ring of these devices holds so many layers."""
    if any(device.fitting(True) >= layers for device in devices):
        return True
    for first, last in permutations(range(len(devices)), 2):
        ends = devices[first].most, devices[last].fitting(True)
        between = sum(devices[i].most for i in range(last) if i != first)
        enough = ends[0] >= 1 and layers > 1 and sum(ends) + between >= layers
        enough &= ends[1] >= max(1, bound) and layers > bound
        if enough and not devices[first].closes:
            return True
    return False


def measured(
    order: Sequence[int], split: Sequence[int], devices: Sequence[Candidate], links: LinkTimes
) -> Layout:
    """The layout of this order and split, with its times."""
    nodes = [0, *(device + 1 for device in order), 0]
    hops = list(pairwise(nodes))
    shares = [(devices[device], count) for device, count in zip(order, split, strict=True)]
    end, last = shares[-1][0].end, len(shares) - 1
    return Layout(
        order=tuple(order),
        split=tuple(split),
        slowest=max(
            *(device.step_of(count, at == last) for at, (device, count) in enumerate(shares)),
            *(float(links.step[hop]) for hop in hops),
        ),
        trip=sum(count * device.trip for device, count in shares)
        + sum(float(links.trip[hop]) for hop in hops)
        + (end.trip if end else 0.0),
        price=sum(count * device.price for device, count in shares) + (end.price if end else 0.0),
    )


def fastest(
    layers: int,
    devices: Sequence[Candidate],
    links: LinkTimes,
    slowest_weight: float,
    trip_weight: float,
    must: int = -1,
    bound: int = 0,
) -> Layout | None:
    """The best layout; None if there is none. `must`: the index of a device that takes part.

    Weights are not negative. Takes about M³ × layers² steps in numpy for each T that is looked at.
    """
    search = _Search(layers, devices, links, trip_weight, must, bound)
    steps = _possible_steps(layers, devices, links)
    best: Layout | None = None
    limit = np.inf

    def without_slowest(layout: Layout) -> float:
        return trip_weight * layout.trip + layout.price

    def seconds(layout: Layout) -> float:
        return slowest_weight * layout.slowest + without_slowest(layout)

    while (layout := search.cheapest(limit)) is not None:
        if best is None or seconds(layout) < seconds(best):
            best = layout
        # From here on this only grows: nothing that follows can be better than this bound.
        if not slowest_weight or without_slowest(layout) >= seconds(best):
            break
        below = int(np.searchsorted(steps, layout.slowest / _EVEN / _EVEN)) - 1
        if below < 0:
            break
        limit = float(steps[below])
    return best and _evened(best, devices, links)


def _evened(layout: Layout, devices: Sequence[Candidate], links: LinkTimes) -> Layout:
    """As good, with layers spread evenly over devices of the same speed.

    Nothing grows if one of two such devices gives a layer to the other one that has at least two
    fewer; the fuller one has more room then.
    """
    split = list(layout.split)
    last = len(split) - 1
    most = [devices[index].fitting(stage == last) for stage, index in enumerate(layout.order)]
    alike_in = attrgetter("trip", "step", "price")
    # The last device is like no other one if it has more to do than its layers.
    speeds = [
        (*alike_in(devices[index]), stage == last and devices[index].end is not None)
        for stage, index in enumerate(layout.order)
    ]
    moved = True
    while moved:
        moved = False
        for few in range(len(split)):
            alike = [stage for stage, speed in enumerate(speeds) if speed == speeds[few]]
            many = max(alike, key=split.__getitem__)
            if split[many] - split[few] > 1 and split[few] < most[few]:
                split[many] -= 1
                split[few] += 1
                moved = True
    for stage, speed in enumerate(speeds):
        # The first device holds the embedding too: where one has to have more, it is another.
        if speed == speeds[0] and split[0] - split[stage] == 1 and split[stage] < most[stage]:
            split[0], split[stage] = split[0] - 1, split[stage] + 1
    return measured(layout.order, split, devices, links)


def _possible_steps(layers: int, devices: Sequence[Candidate], links: LinkTimes) -> Floats:
    """Every value that the slowest step of a layout can have, in ascending order."""
    counts = np.arange(1, layers + 1)
    of_devices = [
        own + counts * device.step
        for device in devices
        for own in {device.step_of(0, False), device.step_of(0, True)}
    ]
    return np.unique(np.concatenate([*of_devices, links.step.ravel()]))


class _Search:
    """Shortest paths over (first device, last device, layers placed).

    A table holds seconds of the sum [first, place, layers + 1]; place 0: the first device is the
    last one so far; place 1 + j: device j is.
    """

    def __init__(
        self,
        layers: int,
        devices: Sequence[Candidate],
        links: LinkTimes,
        trip_weight: float,
        must: int,
        bound: int,
    ) -> None:
        self._layers = layers
        # So many are placed by devices that are not the last one, or all by the last.
        self._apart = slice(layers - bound + 1, layers)
        self._devices = devices
        self._links = links
        self._trip_weight = trip_weight
        self._a_layer = [trip_weight * device.trip + device.price for device in devices]
        hops, self._busy = _hops(len(devices), links, must)
        self._hops, self._into = _times(trip_weight, hops), _times(trip_weight, links.trip[0])

    def cheapest(self, limit: float) -> Layout | None:
        """The layout of the least sum, but for `slowest`, in which no step is above `limit`."""
        count = len(self._devices)
        hops = np.where(self._busy <= limit * _EVEN, self._hops, np.inf)
        table = np.full((count, count + 1, self._layers + 1), np.inf)
        for first, device in enumerate(self._devices):
            if self._links.step[0, first + 1] <= limit * _EVEN:
                most = self._most(device.most, device, limit)
                placed = np.arange(1, most + 1)
                table[first, 0, 1 : most + 1] = (
                    self._into[first + 1] + self._a_layer[first] * placed
                )
        table[:, :, self._apart] = np.inf
        for index, device in enumerate(self._devices):
            before = table[:, : index + 1] + hops[:, : index + 1, index, None]
            most = self._most(device.most, device, limit)
            table[:, index + 1] = _placed(before.min(axis=1), most, self._a_layer[index])
            table[:, index + 1, self._apart] = np.inf
        ends = self._ends(table, hops, limit) + hops[:, :, count]
        first, place = divmod(int(ends.argmin()), count + 1)
        if not np.isfinite(ends[first, place]):
            return None
        return self._trace(table[first], hops[first], first, place, limit)

    def _ends(self, table: Floats, hops: Floats, limit: float) -> Floats:
        """Seconds [first, place] of all layers, with the last device at that place."""
        ends: Floats = table[:, :, self._layers].copy()
        for index, device in enumerate(self._devices):
            if device.end is None:
                continue
            extra = self._trip_weight * device.end.trip + device.end.price
            alone = self._layers * self._a_layer[index] + self._into[index + 1] + extra
            most = self._most(device.end.most, device, limit, last=True)
            reached = self._links.step[0, index + 1] <= limit * _EVEN
            ends[index, 0] = alone if reached and most >= self._layers else np.inf
            before = table[:, : index + 1] + hops[:, : index + 1, index, None]
            placed = _placed(before.min(axis=1), most, self._a_layer[index])
            ends[:, index + 1] = placed[:, self._layers] + extra
        return ends

    def _trace(self, table: Floats, hops: Floats, first: int, place: int, limit: float) -> Layout:
        """Walk back from the last device at `place`; `table` and `hops` are those of `first`."""
        order: list[int] = []
        split: list[int] = []
        left, last = self._layers, True
        while place:
            device = self._devices[place - 1]
            most = min(left - 1, self._most(device.fitting(last), device, limit, last=last))
            last = False
            counts = np.arange(1, most + 1)
            before = table[:place, left - counts] + hops[:place, place - 1, None]
            costs = before + self._a_layer[place - 1] * counts
            previous, more = divmod(int(costs.argmin()), costs.shape[1])
            order.append(place - 1)
            split.append(more + 1)
            left -= more + 1
            place = previous
        order.append(first)
        split.append(left)
        return measured(order[::-1], split[::-1], self._devices, self._links)

    def _most(self, fitting: int, device: Candidate, limit: float, *, last: bool = False) -> int:
        """Layers that fit, and with which its step is no longer than `limit`."""
        most = min(fitting, self._layers)
        if limit * _EVEN >= device.step_of(most, last):
            return most
        return max(0, int((limit * _EVEN - device.step_of(0, last)) / device.step))


def _times(weight: float, seconds: Floats) -> Floats:
    """Of what takes for ever, no weight is small enough."""
    return np.multiply(weight, seconds, out=np.full_like(seconds, np.inf), where=seconds < np.inf)


def _placed(before: Floats, most: int, seconds: float) -> Floats:
    """Seconds [first, layers + 1] with one device more, that has 1 to `most` layers."""
    firsts, width = before.shape
    if most < 1:
        return np.full_like(before, np.inf)
    # The share costs `seconds` a layer, so the cheapest way to L is L × seconds and the least of
    # (before - layers × seconds) over the `most` entries in front of L: a minimum in a window.
    along = seconds * np.arange(width)
    padded = np.concatenate([np.full((firsts, most), np.inf), before - along], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, most, axis=1)[:, :width]
    placed: Floats = windows.min(axis=2) + along
    return placed


def _hops(count: int, links: LinkTimes, must: int) -> tuple[Floats, Floats]:
    """Seconds of a trip, and of a step, [first, from place, to]; to `count` is D0.

    Infinite where the ring cannot go: back to the first device, against the list's order, past
    the device that must take part.
    """
    hops = np.full((count, count + 1, count + 1), np.inf)
    busy = np.zeros_like(hops)
    for first in range(count):
        for place in range(count + 1):
            here = first if place == 0 else place - 1
            if place and here == first:
                continue
            for to in range(place, count + 1):
                passes_by = must not in (-1, first) and place <= must < to
                if to == first or passes_by:
                    continue
                node = 0 if to == count else to + 1
                hops[first, place, to] = links.trip[here + 1, node]
                busy[first, place, to] = links.step[here + 1, node]
    return hops, busy
