"""Emulation: from profiles to the costs that each node of a ring is charged."""

from __future__ import annotations

from functools import partial

from edgespec.backends.charged_time import loop_of
from edgespec.backends.timed import CoordinatorDurations, StageDurations, segment_bytes
from edgespec.config import Emulation
from edgespec.daemon.profiles import fitted_model, profile_named, ring_of
from edgespec.drafting.grower import TreeGrower
from edgespec.errors import CapacityError, ConfigError
from edgespec.net.emulated_link import LinkPace
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import RingCosts, ring_costs
from edgespec.runtime.instrumentation import NodePace


def emulated_costs(emulation: Emulation, stages: int, head_last: bool = False) -> RingCosts:
    """The costs of a ring of so many stages; `head_last`: the last one has the output head.

    Raises ConfigError for profiles that cannot be read or are not one for each device, for an
    unknown cost model, and for one that does not fit the devices.
    """
    profiles = [profile_named(name) for name in ring_of(emulation.profiles, stages)]
    model = emulation.cost_model or fitted_model(profiles)
    try:
        return ring_costs(profiles, cost_model_named(model), head_last=head_last)
    except CapacityError as problem:
        raise ConfigError(str(problem)) from None


def check_profiles(emulation: Emulation) -> None:
    """Raises ConfigError for mistakes that do not depend on the number of stages."""
    for name in emulation.profiles:
        profile_named(name)
    if emulation.cost_model:
        cost_model_named(emulation.cost_model)


def coordinator_pace(costs: RingCosts, draft: TreeGrower | None) -> NodePace:
    """Costs of the coordinator, with its loop's."""
    loop = loop_of(costs.coordinator.profile)
    durations = CoordinatorDurations(costs.coordinator, draft, loop)
    return NodePace(durations, _links(costs, 0), loop)


def stage_pace(costs: RingCosts, stage: int) -> NodePace:
    """Costs of a stage, counted from 1."""
    return NodePace(StageDurations(costs.stages[stage - 1]), _links(costs, stage))


def described(costs: RingCosts) -> str:
    """A line that marks all times as emulated."""
    names = [node.profile.name for node in (costs.coordinator, *costs.stages)]
    devices = names[0] if len(set(names)) == 1 else ", ".join(names)
    return f"times are emulated: {costs.coordinator.model.name} on {devices}"


def _links(costs: RingCosts, node: int) -> LinkPace:
    control = max(link.latency for link in costs.links)
    return LinkPace(costs.links[node], control, partial(segment_bytes, costs))
