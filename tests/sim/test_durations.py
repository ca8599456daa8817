"""Durations: the cost model's figures reach the right node and link; random times keep bounds."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from support.campaign import RandomDurations
from support.segments import changed, one_part, run_block
from support.worlds import submit, toy_world

from edgespec.daemon.profiles import profile_named
from edgespec.decoding.effects import Draft, OpenCache, RunHead
from edgespec.decoding.events import HeadDone
from edgespec.errors import ConfigError
from edgespec.machines.effects import Effect
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.costs import LinkCosts, ring_costs
from edgespec.policy.base import Deepen, Grow
from edgespec.sim.durations import (
    Jitter,
    charged_durations,
    jittered,
    network_of,
)
from edgespec.sim.links import LinkSpec
from edgespec.tree.ledger import Rows
from edgespec.types.draft_pass import DraftPass
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice, Sampling
from edgespec.wire.messages import CloseRequest
from edgespec.wire.segment import Segment, StageTime, Verdict

NANO, NX = profile_named("jetson-orin-nano-8gb"), profile_named("jetson-orin-nx-16gb")
COSTS = ring_costs([NX, NX, NANO, NANO, NANO], cost_model_named("llama-2-7b"))
IDS = np.arange(3, dtype=np.int64)
BLOCK = run_block(1, 1, Rows(IDS, IDS - 1, IDS, IDS), None, 5, np.tri(3, dtype=np.bool_))
HIDDEN = Tensor("uint64", (3, 1), bytes(24))
HEAD = RunHead(1, 1, HIDDEN, Rows(IDS, IDS, IDS, IDS), Sampling())


class Worked:
    """A draft source that did so many passes each time."""

    def __init__(self, *passes: int) -> None:
        self.passes = passes

    def take_work(self) -> tuple[DraftPass, ...]:
        """All of them."""
        return tuple(DraftPass(rows, "independent") for rows in self.passes)


def segment(hidden: Tensor | None) -> Segment:
    tokens = IDS if hidden is None else IDS[:0]
    return one_part(1, 1, 0, False, 0, 3, IDS, IDS - 1, IDS, tokens, hidden)


def test_every_node_is_charged_its_own_costs() -> None:
    source: Any = Worked(3, 2)
    nodes = charged_durations(COSTS, source).nodes
    for node, stage in zip(nodes[1:], COSTS.stages, strict=True):
        assert node.seconds(BLOCK, None) == stage.block_seconds(3, 8)
        assert node.parts(BLOCK) == (1.0,) * stage.layers
    d0, choice = COSTS.coordinator, Choice(IDS[:2], IDS[:2], np.zeros(2))
    head = nodes[0].seconds(HEAD, HeadDone(1, 1, choice))
    assert head == d0.head_seconds(3) + d0.choose_seconds(2, "greedy")
    draft = nodes[0].seconds(Draft(1, 1, Grow(2, 2, 1), (1, 2, 3)), None)
    # Both shapes come for the first time, and the host takes longer for them than the device.
    assert draft > sum(d0.draft_seconds(rows, 3) for rows in (3, 2))
    assert draft == pytest.approx(2 * d0.launch_seconds(d0.model.draft.layers))
    free = charged_durations(COSTS, source, d0_free=True).nodes
    assert free[0].seconds(HEAD, HeadDone(1, 1, choice)) == 0.0
    assert free[1].seconds(BLOCK, None) == nodes[1].seconds(BLOCK, None)


@pytest.mark.parametrize(
    ("kind", "share", "most", "mean"), [("5%x100ms", 0.05, 0.1, 0.005), ("exp5ms", 1.0, 0.1, 0.005)]
)
def test_jobs_are_late_by_jitter(kind: str, share: float, most: float, mean: float) -> None:
    durations = jittered(charged_durations(COSTS), Jitter.parse(kind), 3)
    usual = COSTS.stages[0].block_seconds(3, 8)
    more = [
        durations.nodes[1].seconds(replace(BLOCK, job=job), None) - usual for job in range(1, 2001)
    ]
    assert sum(late > 1e-9 for late in more) / 2000 == pytest.approx(share, abs=0.02)
    assert max(more) <= most + 1e-9
    assert sum(more) / 2000 == pytest.approx(mean, rel=0.2)
    again = jittered(charged_durations(COSTS), Jitter.parse(kind), 3)
    assert again.nodes[1].seconds(BLOCK, None) - usual == more[0], "the same seed draws the same"


def test_a_block_that_loses_rows_stays_as_late() -> None:
    durations = jittered(charged_durations(COSTS), Jitter.parse("exp5ms"), 0)
    late = durations.nodes[1].seconds(BLOCK, None) - COSTS.stages[0].block_seconds(3, 8)
    assert durations.nodes[2].seconds(BLOCK, None) - COSTS.stages[1].block_seconds(3, 8) != late
    assert durations.nodes[1].seconds(BLOCK, None) - COSTS.stages[0].block_seconds(3, 8) == late


def test_what_takes_no_time_is_never_late() -> None:
    durations = jittered(charged_durations(COSTS, d0_free=True), Jitter.parse("exp5ms"), 0)
    assert durations.nodes[1].seconds(OpenCache(1, 5), None) == 0.0
    assert durations.nodes[0].seconds(HEAD, HeadDone(1, 1, Choice(IDS, IDS, np.zeros(3)))) == 0.0


@pytest.mark.parametrize("text", ["", "5%", "0%x5ms", "101%x5ms", "exp", "exp5", "1.2.3%x4ms"])
def test_other_texts_are_no_jitter(text: str) -> None:
    with pytest.raises(ConfigError, match="no jitter"):
        Jitter.parse(text)


def test_segments_are_charged_as_the_charged_model_s() -> None:
    durations = charged_durations(COSTS)
    assert durations.message_bytes(segment(None), 7) == COSTS.segment_bytes(3, 0)
    assert durations.message_bytes(segment(HIDDEN), 7) == COSTS.segment_bytes(3, 1)
    ran = changed(segment(HIDDEN), cost=(StageTime(3, 0.5),) * 2)
    assert durations.message_bytes(ran, 7) == COSTS.segment_bytes(3, 2)
    assert durations.message_bytes(CloseRequest(1), 7) == 7
    # Where the last stage chooses, tokens travel with the hidden rows, and a verdict comes home.
    tokens = changed(segment(HIDDEN), tokens=IDS)
    assert durations.message_bytes(tokens, 7) == COSTS.segment_bytes(3, 1, tokens=True)
    figures = Tensor("float64", (2, 5), bytes(80))
    verdict = Verdict(IDS[:2], IDS[:2], np.zeros(6, np.int64), figures)
    home = changed(segment(None), cost=(StageTime(3, 0.5),) * 2, verdict=verdict)
    assert durations.message_bytes(home, 7) == COSTS.verdict_bytes(3, 2, 2, 8 + 6)


def test_links_are_those_of_the_costs_and_control_takes_the_slowest_latency() -> None:
    links = (LinkCosts(0.25, 10.0), LinkCosts(0.5, 20.0), *COSTS.links[2:])
    network = network_of(replace(COSTS, links=links))
    assert network.ring[:2] == (LinkSpec(0.25, 10.0), LinkSpec(0.5, 20.0))
    assert network.to_stages == network.from_stages == (LinkSpec(0.5),) * 4


def test_a_loop_that_is_free_is_as_if_the_profile_did_not_know_what_it_takes() -> None:
    unknown = structs.replace(COSTS.coordinator.profile, loop_seconds=None)
    without = replace(COSTS, coordinator=replace(COSTS.coordinator, profile=unknown))
    found = []
    for durations in (charged_durations(COSTS, loop_free=True), charged_durations(without)):
        world = toy_world(durations, network=network_of(COSTS))
        world.submit(submit(limit=4))
        world.run()
        assert world.loop_seconds is None
        found.append([(one.at, one.message) for one in world.replies])
    assert found[0] == found[1]


def test_a_whole_answer_costs_the_sum_of_its_parts() -> None:
    world = toy_world(charged_durations(COSTS), network=network_of(COSTS))
    world.submit(submit(prompt="abc", limit=3))
    world.run()
    at = [reply.at for reply in world.replies[:3]]

    def trip(rows: int, seen: int, returned: int) -> float:
        blocks = sum(stage.block_seconds(rows, seen) for stage in COSTS.stages)
        on_links = list(enumerate(COSTS.links))
        there = COSTS.links[0].seconds(COSTS.segment_bytes(rows, 0))
        between = sum(link.seconds(COSTS.segment_bytes(rows, ran)) for ran, link in on_links[1:-1])
        back = COSTS.links[-1].seconds(COSTS.segment_bytes(returned, len(COSTS.stages)))
        latency = sum(link.latency for link in COSTS.links)
        head = COSTS.coordinator.head_seconds(returned)
        head += COSTS.coordinator.choose_seconds(1, "greedy")
        return blocks + there + between + back + latency + head

    # Its loop: the result and what came of the head, a row that leaves and comes home; nothing
    # leaves behind the last one.
    loop = COSTS.coordinator.profile.loop_seconds
    assert loop is not None
    # The retained set reaches V1 before the segment, which waits for the rest of the gather.
    there = COSTS.links[0].seconds(COSTS.segment_bytes(1, 0))
    wait = COSTS.stages[0].gather_seconds(1) - there
    assert wait > 0
    trips = [
        trip(3, 3, 1) + 2 * loop.event + loop.row,
        trip(1, 4, 1) + 2 * loop.event + 2 * loop.row,
        trip(1, 5, 1) + wait + 2 * loop.event + loop.row,
    ]
    assert at == pytest.approx(np.cumsum(trips).tolist(), rel=1e-12)


@pytest.mark.parametrize("effect", [BLOCK, OpenCache(1, 5)])
def test_random_times_are_within_twice_the_pace(effect: Effect) -> None:
    chance = random.Random(0), 0.0
    durations, other = RandomDurations(*chance, 1.0, 3), RandomDurations(*chance, 0.0, 4)
    times = [durations.seconds(effect, None) for _ in range(500)]
    most = 2.0 if effect is BLOCK else 0.2
    assert 0.0 in times
    assert most * 0.9 < max(times) <= most
    assert other.seconds(effect, None) == 0.0
    assert len(durations.parts(effect)) == (3 if effect is BLOCK else 1)
    assert len(other.parts(BLOCK)) == 4


def test_random_drafts_pay_for_every_pass() -> None:
    source: Any = Worked(3, 3)
    durations = RandomDurations(random.Random(0), 1.0, 0.0, 5, source)
    draft = Draft(1, 1, Deepen(1, 1, 1), ())
    assert durations.seconds(draft, None) == 0.0
    assert len(durations.parts(draft)) == 2 * 5, "passes by layers"
    assert any(durations.seconds(HEAD, None) for _ in range(20))
    durations = RandomDurations(random.Random(0), 0.0, 1.0, 5, source)
    assert durations.seconds(HEAD, None) == 0.0
    source.passes = (3,)
    assert any(durations.seconds(draft, None) for _ in range(20))
    source.passes = ()
    assert durations.seconds(draft, None) == 0.0
