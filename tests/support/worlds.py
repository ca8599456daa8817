"""Small simulated rings with known durations, and scenarios in which nothing goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from support.event_log import EventLog
from support.faults import Fault
from support.faulty_world import FaultyWorld
from support.scenario import Scenario, ScenarioRequest, Setting
from support.spans import Span, keeping

from edgespec.backends.charged_time import LoopTime
from edgespec.backends.compute import FIRST
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.grower import TreeGrower
from edgespec.machines.effects import (
    Effect,
    RunBlock,
)
from edgespec.machines.events import Event
from edgespec.sim.durations import Durations
from edgespec.sim.links import LinkSpec, Network
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.sim.toy_model import FakeBlock, FakeHead
from edgespec.sim.world import CoordinatorParts, StageParts
from edgespec.types.draft_pass import DraftPass, DraftWork
from edgespec.wire.client_messages import Submit
from edgespec.wire.messages import Message
from edgespec.wire.segment import Segment


@dataclass
class FixedDurations:
    """The same time for every block of a stage, and for every run of the head; nothing else."""

    stages: Sequence[float]
    head: float = 0.0
    draft_row: float = 0.0
    layers: int = 1
    segment_bytes: int = 0
    loop: LoopTime | None = None
    works: list[tuple[DraftWork, ...]] = field(default_factory=list)

    def coordinator(self, effect: Effect, done: Event | None, work: tuple[DraftWork, ...]) -> float:
        """The head's time, or the draft's rows."""
        self.works.append(work)
        if isinstance(effect, FIRST):
            return self.head
        return self.draft_row * sum(one.rows for one in work if isinstance(one, DraftPass))

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        """Blocks cost, all else is free."""
        return self.stages[number - 1] if isinstance(effect, RunBlock) else 0.0

    def parts(self, number: int, effect: Effect) -> Sequence[float]:
        """Layers of any stage; a draft has one."""
        return (1.0,) * (self.layers if number else 1)

    def message_bytes(self, message: Message, encoded: int) -> int:
        """Segments are as large as the test says, control messages weigh nothing."""
        return self.segment_bytes if isinstance(message, Segment) else 0


@dataclass(frozen=True)
class _Node:
    """One node's part of fixed durations."""

    of: FixedDurations
    number: int
    draft: TreeGrower | None

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """As they say."""
        if self.number:
            return self.of.stage(self.number, effect, done)
        return self.of.coordinator(effect, done, self.draft.take_work() if self.draft else ())

    def parts(self, effect: Effect) -> Sequence[float]:
        """As they say."""
        return self.of.parts(self.number, effect)


def toy_world(
    durations: FixedDurations | Durations,
    link: LinkSpec | None = None,
    control: LinkSpec | None = None,
    *,
    faults: Sequence[Fault] = (),
    draft: TreeGrower | None = None,
    prefill_chunk: int = 8,
    row_limits: Sequence[int] = (),
    log: EventLog | None = None,
    spans: list[Span] | None = None,
    network: Network | None = None,
    recovery: float = 60.0,
    with_stage: int = 0,
    told: bool = True,
    live: int = 1,
) -> FaultyWorld:
    """A ring of toy stages: as many as there are fixed durations, or as the network has. `told`:
    whether the coordinator knows of `with_stage`. `spans`: gets what the nodes ran. `live`:
    requests at once."""
    if network is None:
        assert isinstance(durations, FixedDurations)
        network = Network.even(len(durations.stages), link or LinkSpec(), control)
    count = len(network.to_stages)

    def stages() -> list[StageParts]:
        limits = row_limits or [1000] * count
        return [
            StageParts(
                StageMachine(is_first=at == 0, is_last=at == count - 1, row_limit=limits[at]),
                FakeBlock(at),
            )
            for at in range(count)
        ]

    if isinstance(durations, FixedDurations):
        nodes = [_Node(durations, number, draft) for number in range(count + 1)]
        durations = Durations(nodes, durations.loop, durations.message_bytes)
    ring = CoordinatorSettings(
        *(count, 2000, "oracle" if draft else "", prefill_chunk),
        recovery=recovery,
        own_stage=with_stage if told else 0,
        live=live,
    )
    kind = FaultyWorld
    if spans is not None:
        kind = type("SpanWorld", (FaultyWorld,), {"worker_kind": keeping(spans)})
    return kind(
        CoordinatorMachine(ring, ToyCodec()),
        CoordinatorParts(FakeHead(VOCABULARY), draft),
        stages,
        durations,
        network,
        faults=faults,
        log=log,
        with_stage=with_stage,
    )


def submit(
    tag: int = 0, prompt: str = "abc", limit: int = 3, policy: str = "autoregressive"
) -> Submit:
    """A request with everything that these tests do not care about filled in."""
    return Submit(tag, prompt, limit, 0.0, 0, 1.0, 0.0, 0, (), policy)


CALM_ASK = ScenarioRequest(
    tag=0,
    at=0.0,
    cancel_at=None,
    prompt="hello",
    max_new_tokens=16,
    seed=1,
    stop=(),
    policy="flowspec",
    settings=(
        Setting("nodes", 10),
        Setting("depth", 3),
        Setting("width", 3),
        Setting("longest", 2),
        Setting("merge_nodes", 7),
        Setting("merge_depth", 3),
    ),
)

CALM = Scenario(
    seed=7,
    accuracy=0.7,
    eos_ids=(),
    prefill_chunk=2,
    context_length=2000,
    head_pace=0.01,
    draft_pace=0.01,
    stage_paces=(0.01, 0.02, 0.01),
    layers=(4, 4, 4),
    network=Network.even(3, LinkSpec(latency=0.005)),
    faults=(),
    asks=(CALM_ASK,),
)
"""Three stages, one request, and nothing that goes wrong."""
