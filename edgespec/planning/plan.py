"""Plan: a model's layers over the devices at hand, by predicted speed and within their memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from edgespec.config import HEAD_ON_COORDINATOR, HEAD_ON_LAST_STAGE, QUANTISATIONS
from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.cost_model import NO_DRAFT
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
    """A ring. `left_out`: the devices that have no part in it, each with the reason.

    `with_stage`: the stage that is on the coordinator's own board, 0: none. `why_idle`: why that
    board has no layers, "" if it has. `seconds`: of a token by the formula of docs/planning.md, by
    which rings of one problem are compared; it tells no speed.
    """

    problem: Problem
    nodes: tuple[PlannedNode, ...]
    with_stage: int
    left_out: tuple[tuple[Device, str], ...]
    why_idle: str
    seconds: float

    @property
    def is_alone(self) -> bool:
        """Whether the coordinator's board is the whole ring."""
        return self.with_stage == len(self.split) == 1

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
    made = [one for each in asked if each.fits() and (one := _planned(each)) is not None]
    if not made:
        raise CapacityError(refusal(asked[0]))
    return min(made, key=lambda one: one.seconds * (LEAST_GAIN if one.problem.head_last else 1.0))


def candidates(
    problem: Problem, heads: Sequence[str] = (HEAD_ON_COORDINATOR,), needs_draft: bool = True
) -> tuple[Plan, ...]:
    """The plans of which one may well be the fastest, which the formula does not tell: its own;
    that with layers on the coordinator's board too, if it has none; and the boards, one of a kind
    and two at most, that can be the whole ring, with the draft if they have room for it.

    `needs_draft`: whether a ring of several boards is refused if it has no room for the draft.
    Raises as `plan`.
    """
    alone = sorted(_alone(problem), key=lambda one: one.trip_seconds(problem.context // 2))
    plain = replace(problem, model=replace(problem.model, draft=NO_DRAFT, sources=""))
    try:
        ring = plan(problem, heads)
    except CapacityError:
        if needs_draft or not problem.model.draft.name:
            raise
        ring = plan(plain, heads)
    found = [ring]
    if not ring.with_stage and (own := _planned(ring.problem, len(problem.others))) is not None:
        found.append(own)
    here = ring.nodes[0].device
    found += [one for one in alone[:2] if not (ring.is_alone and one.nodes[0].device == here)]
    return tuple(found)


def _planned(problem: Problem, must: int = -1) -> Plan | None:
    """The fastest ring with the head where the problem has it, and with boards[must] in it."""
    layout = _layout(problem, must)
    if layout is None:
        return None
    needs = problem.needs
    own = len(problem.others)
    need = needs.coordinator(beside_stage=own in layout.order)
    nodes = [PlannedNode(0, problem.coordinator, 0, 0, need)]
    for stage, (index, count) in enumerate(zip(layout.order, layout.split, strict=True), 1):
        first = nodes[-1].end
        need = needs.stage(count, last=stage == len(layout.order))
        nodes.append(PlannedNode(stage, problem.boards[index], first, first + count, need))
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


@lru_cache(maxsize=64)  # the same is asked for a reason, and for another way
def _layout(problem: Problem, must: int = -1) -> Layout | None:
    layers = problem.model.of.layers
    weights = problem.weights
    boards, links = problem.candidates, problem.links()
    bound = problem.model.of.bound
    return fastest(layers, boards, links, weights.step, weights.trip, must, bound)


def _seconds(problem: Problem, layout: Layout) -> float:
    """Seconds a token: what the layout decides, and what D0 adds whatever it is."""
    weights = problem.weights
    loop = trip_loop_seconds(problem.coordinator.profile, len(layout.order), problem.head_last)
    decided = weights.step * layout.slowest + weights.trip * (layout.trip + loop) + layout.price
    return decided + problem.fixed_seconds()


def _why_not(problem: Problem, layout: Layout, index: int) -> str:
    """Why boards[index] has no layers in the layout."""
    if problem.candidates[index].most == 0:
        need, room = problem.needs.stage(1).total, max(0, problem.room(index))
        return f"not one layer fits: it needs {gib(need)}, has {gib(room)}"
    with_it = _layout(problem, must=index)
    if with_it is None:
        return "there are not enough layers for it"
    slower = (_seconds(problem, with_it) - _seconds(problem, layout)) * 1e3
    return f"no faster with it: {slower:+.2f} ms a token by the formula"


def _alone(problem: Problem) -> Iterator[Plan]:
    """The boards that could be the whole ring, one of each kind."""
    devices = problem.coordinator, *problem.others
    kinds = {device.profile: device for device in reversed(devices)}
    plain = replace(problem.model, draft=NO_DRAFT, sources="")
    for device in kinds.values():
        others = tuple(other for other in devices if other is not device)
        for model in (problem.model, plain):
            single = replace(problem, model=model, coordinator=device, others=(), head_last=False)
            if single.fits() and (made := _planned(single)) is not None:
                left_out = tuple((other, "slower with it") for other in others)
                yield replace(made, left_out=left_out)
                break
