"""Plan: a model's layers over the devices at hand, by predicted speed and within their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from edgespec.config import QUANTISATIONS
from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.costs import NodeCosts, RingCosts, ring_costs
from edgespec.planning.layout import Layout, fastest
from edgespec.planning.memory import Device, Need, gib
from edgespec.planning.problem import SEGMENT_ROWS, Problem
from edgespec.planning.refusal import refusal

DRAFT_ROWS = 8
"""Rows of the draft pass that counts into D0's step."""

CHOSEN_ROWS = 3
"""Rows of a segment that are looked at, in D0's step: those that were right, and one."""

STEP_WEIGHT, TRIP_WEIGHT, COORDINATOR_WEIGHT = 0.15, 0.10, 0.61
"""Seconds a token with a draft, by the slowest step, the trip and D0's step (docs/planning.md)."""


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

    `seconds`: predicted for one token, at half the context, by the formula of docs/planning.md.
    """

    problem: Problem
    nodes: tuple[PlannedNode, ...]
    left_out: tuple[tuple[Device, str], ...]
    seconds: float

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of V1 … VN."""
        return tuple(node.layers for node in self.nodes[1:])

    @property
    def with_stage(self) -> int:
        """The stage that is on the coordinator's own device; 0: none."""
        own = self.problem.coordinator
        return next((node.stage for node in self.nodes[1:] if node.device is own), 0)

    @cached_property
    def costs(self) -> RingCosts:
        profiles = [node.device.profile for node in self.nodes]
        return ring_costs(profiles, self.problem.model.costs, self.split)

    def trip_seconds(self, seen: int) -> float:
        """One row round the ring and through the head: a token of plain decoding.

        `seen`: cached rows that it attends to.
        """
        costs = self.costs
        links = sum(
            link.latency + link.seconds(costs.segment_bytes(1, number))
            for number, link in enumerate(costs.links)
        )
        stages = sum(stage.block_seconds(1, seen) for stage in costs.stages)
        return stages + links + _head_seconds(costs.coordinator, 1, 1)


def plan(problem: Problem) -> Plan:
    """The fastest ring for it (layout.py says which problem is solved, exactly).

    Raises ConfigError if a device cannot run the quantisation, and CapacityError, with what is
    short where and with ways out, if the model does not fit.
    """
    _check_quantisation(problem)
    if not problem.fits():
        raise CapacityError(refusal(problem))
    layout = _layout(problem)
    assert layout is not None, "it fits"
    needs = problem.needs
    nodes = [PlannedNode(0, problem.coordinator, 0, 0, needs.coordinator())]
    for stage, (index, count) in enumerate(zip(layout.order, layout.split, strict=True), 1):
        first = nodes[-1].end
        need = needs.stage(count, first=stage == 1)
        nodes.append(PlannedNode(stage, problem.others[index], first, first + count, need))
    return Plan(problem, tuple(nodes), tuple(_left_out(problem, layout)), _seconds(problem, layout))


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


def _weights(problem: Problem) -> tuple[float, float]:
    """Without a draft a token costs one trip; whatever the slowest step is."""
    return (STEP_WEIGHT, TRIP_WEIGHT) if problem.model.draft.layers else (0.0, 1.0)


def _layout(problem: Problem, must: int = -1) -> Layout | None:
    layers = problem.model.of.layers
    return fastest(layers, problem.candidates, problem.links(), *_weights(problem), must)


def _seconds(problem: Problem, layout: Layout) -> float:
    """Seconds a token: what the layout decides, and what D0 adds whatever it is."""
    node = NodeCosts(problem.coordinator.profile, problem.model.costs, 0)
    step_weight, trip_weight = _weights(problem)
    seconds = step_weight * layout.slowest + trip_weight * (layout.trip + _head_seconds(node, 1, 1))
    if problem.model.draft.layers:
        seconds += COORDINATOR_WEIGHT * coordinator_step(node, problem.context // 2)
    return seconds


def coordinator_step(node: NodeCosts, seen: int) -> float:
    """D0's step at temperature 0: a segment's head and choice, a draft pass and its ranking."""
    draft = node.draft_seconds(DRAFT_ROWS, seen) + node.rank_seconds(DRAFT_ROWS, "greedy")
    return _head_seconds(node, SEGMENT_ROWS, CHOSEN_ROWS) + draft


def _head_seconds(node: NodeCosts, rows: int, chosen: int) -> float:
    """The output head over `rows` rows, and taking the tokens after `chosen` of them."""
    return node.head_seconds(rows) + node.choose_seconds(chosen, "greedy")


def _left_out(problem: Problem, layout: Layout) -> Iterator[tuple[Device, str]]:
    """The devices that are not in the layout, and why not."""
    for index, device in enumerate(problem.others):
        if index in layout.order:
            continue
        candidate = problem.candidates[index]
        if candidate.most == 0:
            need = problem.needs.stage(1, first=False).total
            yield device, f"not one layer fits: it needs {gib(need)}, has {gib(device.memory)}"
            continue
        with_it = _layout(problem, must=index)
        if with_it is None:
            yield device, "there are not enough layers for it"
            continue
        slower = (_seconds(problem, with_it) - _seconds(problem, layout)) * 1e3
        yield device, f"no faster with it: {slower:+.2f} ms a token"
