"""A ring of the bundled pair in this process: real nodes and models, each a thread, as slow as
small boards are."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import psutil
from msgspec import structs
from support.keys import OWN
from support.nodes import HOST, NodeRing, NodeThread
from support.torch_rings import BASE, CONTEXT, DRAFT, tokenizer

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.backends.torch_backend import TorchBlock, TorchHead
from edgespec.config import Timing
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.drafting.grower import TreeGrower
from edgespec.drafting.independent import IndependentGuesser
from edgespec.machines.effects import (
    RunBlock,
)
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.planning.partition import split_layers
from edgespec.ring.health import home_status
from edgespec.ring.member import MemberMachine
from edgespec.ring.membership import MembershipMachine
from edgespec.runtime.coordinator_node import CoordinatorNode
from edgespec.runtime.stage_node import StageNode
from edgespec.types.tensor import Tensor
from edgespec.wire.messages import Assign, Connect, Health, Join

PATIENT = Timing(beat=0.25, silence=60.0, answer_silence=60.0, client_silence=60.0, retry=0.2)


class SlowTorchBlock(TorchBlock):
    """Real layers that take longer: `delay` seconds, and `each` more for every row."""

    delay = 0.12
    each = 0.004

    def run(self, job: RunBlock, stop: Callable[[], bool]) -> Tensor | None:
        """The layers, later; a block of which nothing is wanted any more ends early."""
        until = time.monotonic() + self.delay + self.each * len(job.rows)
        while time.monotonic() < until:
            if stop():
                return None
            time.sleep(0.002)
        return super().run(job, stop)


class TorchNodeRing(NodeRing):
    """A NodeRing of the bundled pair, whose stages have names."""

    def __init__(self, stages: int = 3) -> None:
        super().__init__(stages, timing=PATIENT, recovery=60.0)
        self._checkpoint = Checkpoint(BASE)
        self._split = split_layers(self._checkpoint.layers, stages)

    def start_coordinator(self) -> NodeThread:
        """D0."""
        draft = TreeGrower(IndependentGuesser(Checkpoint(DRAFT), "float32"))
        places = [
            Assign(s, self.stages, a, b, str(BASE), "pair", "float32", "none", CONTEXT, 7, "key")
            for s, (a, b) in enumerate(self._split, start=1)
        ]
        ring = CoordinatorSettings(self.stages, CONTEXT, draft.name, recovery=60.0)
        self.machine = CoordinatorMachine(ring, tokenizer())
        home = Connect("", self.transport.data_port, OWN.public)
        self.membership = MembershipMachine(
            *(places, home, self.timing, self.machine.load),
            live=self.machine.live,
            here=lambda: home_status("desk", health()),
            plain=self.machine.learnt.plain_speed,
            about=partial(structs.replace, draft=draft.name),
        )
        head = TorchHead(OutputHead(self._checkpoint, "float32"))
        node = CoordinatorNode(
            self.transport,
            CoordinatorCompute(head, draft),
            self.machine,
            self.membership,
            self.keys,
        )
        self.threads[0] = NodeThread(node)
        return self.threads[0]

    def stage_node(self, stage: int, wait: float = 10.0, who: object = None) -> StageNode:
        """A stage that is not running yet."""
        self._pid += 1
        key = self.keys.add(f"board-{stage} {self._pid}")
        transport = ZmqTransport.stage(self.address, key, HOST)
        join = Join(stage, f"board-{stage}", self._pid, HOST, transport.data_port, key.own.public)

        def load(
            assign: Assign, progress: Callable[[str], None], stop: Callable[[], bool]
        ) -> StageCompute:
            block = Block(self._checkpoint, assign.first, assign.end, "float32")
            return StageCompute(SlowTorchBlock(block))

        member = MemberMachine(join, str(self.address), 60.0, self.timing)
        return StageNode(transport, member, self.address, load, device=health)


def health() -> Health:
    """How this machine is."""
    memory = psutil.virtual_memory()
    return Health(0.0, 0.0, memory.total, memory.available, 0.0, False, "")
