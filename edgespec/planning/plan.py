"""Plan: a model's layers over the devices at hand, by predicted speed and within their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from edgespec.config import HEAD_ON_COORDINATOR, HEAD_ON_LAST_STAGE, QUANTISATIONS
from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.costs import RingCosts, ring_costs
from edgespec.planning.layout import Layout, fastest
from edgespec.planning.memory import Device, Need, gib
from edgespec.planning.problem import Problem, head_seconds, trip_loop_seconds
from edgespec.planning.refusal import refusal

LEAST_GAIN = 1.01
"""By so much must the last stage be the better place for the head: the formula is no finer."""


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """The part of a device: stage 0 is D0. `first`, `end`: its layers; `need`: its memory."""

    stage: int
    device: Device
    first: int
    end: int
    need: Need

    @property
    def layers(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Plan:
    """The fastest ring. `left_out`: the devices that have no part in it, each with the reason.

    `with_stage`: the stage that is on the coordinator's own board, 0: none. `why_idle`: why that
    board has no layers, "" if it has. `seconds`: predicted for one token, at half the context, by
    the formula of docs/planning.md. `alone`: the same of each board that can hold the whole model,
    with head and draft, by itself. `elsewhere`: the seconds with the output head in the other
    place, None if that was not asked for, or does not fit.
    """

    problem: Problem
    nodes: tuple[PlannedNode, ...]
    with_stage: int
    left_out: tuple[tuple[Device, str], ...]
    why_idle: str
    seconds: float
    alone: tuple[tuple[Device, float], ...]
    elsewhere: float | None = None

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of V1 … VN."""
        return tuple(node.layers for node in self.nodes[1:])

    @cached_property
    def costs(self) -> RingCosts:
        profiles = [node.device.profile for node in self.nodes]
        costs = self.problem.model.costs
        last = self.problem.head_last
        return ring_costs(profiles, costs, self.split, None, self.with_stage, last)

    def trip_seconds(self, seen: int) -> float:
        """One row round the ring and through the head: a token of plain decoding.

        `seen`: cached rows that it attends to.
        """
        costs, last = self.costs, self.problem.head_last
        nbytes = [costs.segment_bytes(1, ran, last) for ran in range(len(costs.links))]
        if last:
            nbytes[-1] = costs.verdict_bytes(1, len(costs.stages), 1)
        links = sum(
            link.latency + link.seconds(size)
            for link, size in zip(costs.links, nbytes, strict=True)
        )
        stages = sum(stage.block_seconds(1, seen) for stage in costs.stages)
        head = head_seconds(costs.stages[-1] if last else costs.coordinator, 1, 1)
        loop = trip_loop_seconds(costs.coordinator.profile, len(costs.stages), last)
        return stages + links + head + loop


def plan(problem: Problem, heads: Sequence[str] = (HEAD_ON_COORDINATOR,)) -> Plan:
    """The fastest ring for it (layout.py says which problem is solved, exactly), with the output
    head in the best of the places `heads`; on the coordinator if the last stage is not clearly
    better.

    Raises ConfigError if a device cannot run the quantisation, and CapacityError, with what is
    short where and with ways out, if the model does not fit.
    """
    _check_quantisation(problem)
    asked = [replace(problem, head_last=head == HEAD_ON_LAST_STAGE) for head in heads]
    made = [_planned(one) for one in asked if one.fits()]
    if not made:
        raise CapacityError(refusal(asked[0]))
    made.sort(key=lambda one: one.seconds * (LEAST_GAIN if one.problem.head_last else 1.0))
    return replace(made[0], elsewhere=made[1].seconds if made[1:] else None)


def _planned(problem: Problem) -> Plan:
    """The fastest ring with the head where the problem has it."""
    layout = _layout(problem)
    assert layout is not None, "it fits"
    needs = problem.needs
    nodes = [PlannedNode(0, problem.coordinator, 0, 0, needs.coordinator())]
    for stage, (index, count) in enumerate(zip(layout.order, layout.split, strict=True), 1):
        first = nodes[-1].end
        need = needs.stage(count, first=stage == 1, last=stage == len(layout.order))
        nodes.append(PlannedNode(stage, problem.boards[index], first, first + count, need))
    own = len(problem.others)
    return Plan(
        problem=problem,
        nodes=tuple(nodes),
        with_stage=len(layout.order) if own in layout.order else 0,
        left_out=tuple(
            (device, _why_not(problem, layout, index))
            for index, device in enumerate(problem.others)
            if index not in layout.order
        ),
        why_idle="" if own in layout.order else _why_not(problem, layout, own),
        seconds=_seconds(problem, layout),
        alone=tuple(_alone(problem)),
    )


def _check_quantisation(problem: Problem) -> None:
    name = problem.model.quantisation.name
    for device in problem.others:
        if name in device.profile.unusable:
            unusable = set[str]().union(*(one.profile.unusable for one in problem.others))
            usable = [other for other in QUANTISATIONS if other not in unusable]
            raise ConfigError(
                f"{device.name} cannot run {name} ({device.profile.unusable[name]}); leave it out"
                + (f", or choose --quant {' or '.join(usable)}" if usable else "")
            )


def _layout(problem: Problem, must: int = -1) -> Layout | None:
    layers = problem.model.of.layers
    weights = problem.weights
    boards, links = problem.candidates, problem.links()
    return fastest(layers, boards, links, weights.step, weights.trip, must)


def _seconds(problem: Problem, layout: Layout) -> float:
    """Seconds a token: what the layout decides, and what D0 adds whatever it is."""
    weights = problem.weights
    loop = trip_loop_seconds(problem.coordinator.profile, len(layout.order), problem.head_last)
    decided = weights.step * layout.slowest + weights.trip * (layout.trip + loop) + layout.price
    return decided + problem.fixed_seconds()


def _why_not(problem: Problem, layout: Layout, index: int) -> str:
    """Why boards[index] has no layers in the layout."""
    if problem.candidates[index].most == 0:
        need, room = problem.needs.stage(1, first=False).total, max(0, problem.room(index))
        return f"not one layer fits: it needs {gib(need)}, has {gib(room)}"
    with_it = _layout(problem, must=index)
    if with_it is None:
        return "there are not enough layers for it"
    slower = (_seconds(problem, with_it) - _seconds(problem, layout)) * 1e3
    return f"no faster with it: {slower:+.2f} ms a token"


def _alone(problem: Problem) -> Iterator[tuple[Device, float]]:
    """Boards that could be the whole ring, and the seconds of a token that each then takes."""
    for device in (problem.coordinator, *problem.others):
        single = replace(problem, coordinator=device, others=(), head_last=False)
        if single.fits() and (layout := _layout(single)) is not None:
            yield device, _seconds(single, layout)
