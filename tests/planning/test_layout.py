"""Layout: optimal against brute force over all subsets, first devices and splits."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from edgespec.planning.layout import Candidate, End, Layout, LinkTimes, fastest, fits, measured

CASES = 200
WEIGHTS = ((0.15, 0.1), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0))


def splits(most: Sequence[int], layers: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each of these devices 1 to `most` layers."""
    if len(most) == 1:
        if 1 <= layers <= most[0]:
            yield (layers,)
        return
    for count in range(1, min(most[0], layers - 1) + 1):
        for rest in splits(most[1:], layers - count):
            yield (count, *rest)


def all_layouts(
    layers: int, devices: Sequence[Candidate], links: LinkTimes, bound: int
) -> Iterator[Layout]:
    """Every subset of the devices, every first one, every split that leaves the last `bound` layers
    together."""
    for size in range(1, len(devices) + 1):
        for chosen in itertools.combinations(range(len(devices)), size):
            for first in chosen:
                order = (first, *(index for index in chosen if index != first))
                most = [devices[i].fitting(at == size - 1) for at, i in enumerate(order)]
                for split in splits(most, layers):
                    if split[-1] < bound:
                        continue
                    layout = measured(order, split, devices, links)
                    if layout.trip < np.inf:
                        yield layout


def random_case(seed: int) -> tuple[int, list[Candidate], LinkTimes]:
    """A small ring with uneven memory, speeds and links; some devices are alike."""
    rng = random.Random(seed)
    count, layers = rng.randint(1, 4), rng.randint(1, 8)
    devices = []
    for _ in range(count):
        most = rng.randint(0, 6)
        trip = rng.choice([1.0, 1.0, 2.0, rng.uniform(0.1, 3.0)])
        step = trip * rng.choice([1.0, 1.1, 3.0])
        devices.append(Candidate(most, trip, step, rng.choice([0.0, 0.0, 0.5])))

    def matrix(most: Sequence[float]) -> np.ndarray:
        size = range(count + 1)
        return np.array([[rng.uniform(0, rng.choice(most)) for _ in size] for _ in size])

    links = LinkTimes(matrix([0.1, 3.0]), matrix([0.1, 5.0]))
    if rng.random() < 0.3:  # from the last device the ring goes home
        links.trip[-1, 1:] = links.step[-1, 1:] = np.inf
        devices[-1] = replace(devices[-1], closes=True)
    if rng.random() < 0.5:  # the last one has something else to do, and less room
        devices = [replace(one, end=random_end(rng, one)) for one in devices]
    return layers, devices, links


def random_end(rng: random.Random, device: Candidate) -> End:
    """What that device has to do, and has room for, if it is the last one."""
    most = max(0, device.most - rng.randint(0, 2))
    times = (rng.choice([0.0, 1.0, 4.0]), rng.choice([0.0, 1.0, 4.0]), rng.choice([0.0, 0.5]))
    return End(most, *times)


@pytest.mark.parametrize("first_seed", range(0, CASES, 50))
def test_it_is_the_best_of_all_layouts(first_seed: int) -> None:
    solved = 0
    for seed in range(first_seed, first_seed + 50):
        layers, devices, links = random_case(seed)
        # Where some layers are bound, to be the last device makes a difference.
        bound = random.Random(seed).randint(0, layers) if all(one.end for one in devices) else 0
        every = list(all_layouts(layers, devices, links, bound))
        assert fits(layers, devices, bound) == bool(every), f"seed {seed}"
        for slowest, trip in WEIGHTS:

            def seconds(layout: Layout, a: float = slowest, b: float = trip) -> float:
                return a * layout.slowest + b * layout.trip + layout.price

            for must in range(-1, len(devices)):
                allowed = [layout for layout in every if must < 0 or must in layout.order]
                found = fastest(layers, devices, links, slowest, trip, must, bound)
                if not allowed:
                    assert found is None, f"seed {seed}, must {must}"
                    continue
                assert found is not None, f"seed {seed}, must {must}"
                where = f"seed {seed}, weights {slowest}, {trip}, must {must}: {found}"
                assert found == measured(found.order, found.split, devices, links), where
                assert (found.order, found.split) in {(x.order, x.split) for x in allowed}, where
                best = min(map(seconds, allowed))
                assert seconds(found) == pytest.approx(best, rel=1e-9), where
                solved += 1
    print(f"seeds {first_seed} to {first_seed + 49}: {solved} problems solved as by brute force")
    assert solved > 100


def test_a_slow_device_is_left_out_and_a_thin_link_avoided() -> None:
    quick, slow = Candidate(8, 1.0, 1.0), Candidate(8, 9.0, 9.0)
    free = LinkTimes(np.zeros((4, 4)), np.zeros((4, 4)))
    found = fastest(8, [slow, quick, quick], free, 1.0, 1.0)
    assert found is not None
    assert (found.order, found.split) == ((1, 2), (4, 4))
    thin = LinkTimes(np.zeros((4, 4)), np.zeros((4, 4)))
    thin.step[2, 3] = 99.0
    found = fastest(8, [slow, quick, quick], thin, 1.0, 1.0)
    assert found is not None
    assert found.order == (2, 1)  # the other way round


def test_alike_devices_share_evenly() -> None:
    devices = [Candidate(9, 1.0, 1.0)] * 6
    found = fastest(40, devices, LinkTimes(np.zeros((7, 7)), np.zeros((7, 7))), 1.0, 1.0)
    assert found is not None
    assert sorted(found.split) == [6, 6, 7, 7, 7, 7]


def test_sixteen_mixed_devices_take_seconds() -> None:
    rng = random.Random(5)
    devices = []
    for _ in range(16):
        most, trip = rng.randint(4, 30), rng.uniform(0.2, 3.0)
        devices.append(Candidate(most, trip, trip * rng.uniform(1, 2)))
    size = (17, 17)
    chance = np.random.default_rng(5)
    links = LinkTimes(chance.uniform(0, 0.1, size), chance.uniform(0, 0.5, size))
    for slowest, trip in (*WEIGHTS, (1.0, 0.01)):
        start = time.process_time()
        found = fastest(80, devices, links, slowest, trip)
        took = time.process_time() - start
        print(f"weights {slowest}, {trip}: {took:.2f} s")
        assert found is not None
        assert sum(found.split) == 80
        assert took < 10  # of this process alone
