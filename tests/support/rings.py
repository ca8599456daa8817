"""Rings of fake stages: building them, what their answers must be, playing any timing on them."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace

from support.fake_draft import FakeDraft
from support.local_ring import LocalRing, Step
from support.toy_answers import Expected, plain_answer

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.grower import TreeGrower
from edgespec.machines.events import (
    Event,
)
from edgespec.sim.toy import VOCABULARY, ToyCodec
from edgespec.sim.toy_model import FakeBlock, FakeHead
from edgespec.types.usual_sampling import NOTHING_SAID, UsualSampling
from edgespec.wire.client_messages import Failed, Finished, Submit, Tokens
from edgespec.wire.messages import Message, Retain

PLENTY = 100_000


def submit(
    tag: int = 1,
    prompt: str = "hello",
    max_new_tokens: int = 12,
    policy: str = "flowspec",
    seed: int = 0,
    stop: tuple[str, ...] = (),
) -> Submit:
    """A prompt with everything that a test does not care about filled in."""
    return Submit(tag, prompt, max_new_tokens, 0.0, 0, 1.0, 0.0, seed, stop, policy)


class FakeRing:
    """A LocalRing of fake stages whose parts a test can look into."""

    def __init__(
        self,
        stages: int,
        *,
        draft: TreeGrower | None = None,
        accuracy: float = 0.7,
        eos_ids: Collection[int] = frozenset(),
        prefill_chunk: int = 8,
        context_length: int = 2000,
        queue_limit: int = 64,
        row_limit: int = PLENTY,
        kept_rows: int = 0,
        head_last: bool = False,
        live: int = 1,
        usual: UsualSampling = NOTHING_SAID,
    ) -> None:
        """`usual`: what its model publishes."""
        self.stages = stages
        self.codec = ToyCodec(frozenset(eos_ids))
        self.context_length = context_length
        self.draft = draft if draft is not None else FakeDraft(stages, VOCABULARY, accuracy)
        self.head = FakeHead(VOCABULARY)
        self.blocks = [FakeBlock(stage) for stage in range(stages)]
        self.machines = [
            StageMachine(is_first=stage == 0, is_last=stage == stages - 1, row_limit=row_limit)
            for stage in range(stages)
        ]
        self.coordinator = CoordinatorMachine(
            CoordinatorSettings(
                stages,
                context_length,
                "fake",
                prefill_chunk,
                queue_limit,
                kept_rows=kept_rows,
                needs=self.draft.needs,
                sources=self.draft.sources,
                head_last=head_last,
                live=live,
                vocabulary=VOCABULARY,
                usual=usual,
            ),
            self.codec,
        )
        here, last = (None, self.head) if head_last else (self.head, None)
        heads = [None] * (stages - 1) + [last]
        parts = zip(self.machines, self.blocks, heads, strict=True)
        self.ring = LocalRing(
            self.coordinator,
            CoordinatorCompute(here, self.draft),
            [(machine, StageCompute(block, head)) for machine, block, head in parts],
        )

    def tell(self, event: Event) -> None:
        """Hand an event to the coordinator."""
        self.ring.dispatch(0, self.coordinator.handle(event, self.ring.now))

    def take_turns(self, steps: int) -> bool:
        """That many single steps, every place in its turn; False if it ended before."""
        while steps:
            turn = list(self.ring.steps())[:steps]
            if not turn:
                return False
            for step in turn:
                self.ring.take(step)
            steps -= len(turn)
        return True

    def expected(self, ask: Submit) -> Expected:
        """Token ids, text and finish reason of plain decoding on one machine."""
        return plain_answer(self.codec, ask, self.stages, self.context_length)

    def assert_nothing_left(self) -> None:
        """Every machine and backend has forgotten every request, and every credit is back."""
        assert not list(self.ring.steps())
        left = {
            name: value
            for name in ("_requests", "_waiting", "_scheduler", "_flights")
            if (value := getattr(self.coordinator, name))
        }
        assert not left
        assert self.coordinator.idle
        assert self.draft.open_requests == 0  # type: ignore[attr-defined]
        for machine, block in zip(self.machines, self.blocks, strict=True):
            assert machine.ledgers() == {}
            assert not machine._queue
            assert machine._running is None
            assert block.open_requests == 0
        assert not any(node.aborted for node in self.ring.nodes)

    def assert_consistent(self) -> None:
        """Caches hold what the ledgers say; equally long committed regions end in the same row."""
        ends: dict[tuple[int, int], int] = {}
        for number, (machine, block) in enumerate(zip(self.machines, self.blocks, strict=True)):
            for request, ledger in machine.ledgers().items():
                if self.ring.is_quiet(number + 1):
                    assert block.slots(request) == len(ledger)
                end = ends.setdefault((request, ledger.committed), ledger.last_committed)
                assert end == ledger.last_committed


# --- playing any timing -------------------------------------------------------------------------


@dataclass(frozen=True)
class Faults:
    """What may happen to messages on their way: probabilities for each one taken."""

    lose_retain: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0


class Chaos:
    """Lets steps of a ring happen in a random order, some places much slower than others."""

    def __init__(self, fake: FakeRing, rng: random.Random, faults: Faults) -> None:
        self._fake = fake
        self._rng = rng
        self._faults = faults
        self._weights: dict[tuple[str, int], float] = {}
        self.trace: list[str] = []

    def step(self) -> bool:
        """Let one thing happen; False if there is nothing left."""
        steps = list(self._fake.ring.steps())
        if not steps:
            return False
        weights = [self._weight(step) for step in steps]
        step = self._rng.choices(steps, weights)[0]
        lose = repeat = False
        if step.kind == "control" and step.node > 0:
            step, lose = self._control(step)
        if step.kind != "work" and not lose:
            repeat = self._rng.random() < self._faults.repeat
        note = "lost" if lose else "twice" if repeat else ""
        self.trace.append(f"{step.kind} {step.node} {step.index or ''} {note}".strip())
        self._fake.ring.now += 1.0
        self._fake.ring.take(step, repeat=repeat, lose=lose)
        return True

    def _weight(self, step: Step) -> float:
        place = (step.kind, step.node)
        if place not in self._weights:
            self._weights[place] = self._rng.choice((0.02, 1.0, 1.0, 20.0))
        return self._weights[place]

    def _control(self, step: Step) -> tuple[Step, bool]:
        """Retained sets may be late and lost; everything else keeps its order and arrives."""
        waiting = self._fake.ring.waiting_control(step.node)
        index = 0
        if self._rng.random() < self._faults.reorder:
            index = self._rng.randrange(len(waiting))
        if not isinstance(waiting[index], Retain):
            index = next(i for i, m in enumerate(waiting) if not isinstance(m, Retain))
        lose = isinstance(waiting[index], Retain) and self._rng.random() < self._faults.lose_retain
        return replace(step, index=index), lose


def assert_one_end(replies: list[Message], tag: int) -> Finished | Failed:
    """The only terminal reply of a request, with nothing behind it, equal to what was streamed."""
    mine = [r for r in replies if getattr(r, "tag", None) == tag]
    ends = [r for r in mine if isinstance(r, Finished | Failed)]
    assert len(ends) == 1, f"request {tag} has {len(ends)} ends"
    assert mine[-1] is ends[0], f"request {tag} got something behind its end"
    news = [r for r in mine if isinstance(r, Tokens)]
    assert all(n.token_ids for n in news)
    if isinstance(ends[0], Finished):
        assert tuple(t for n in news for t in n.token_ids) == ends[0].token_ids
        assert "".join(n.text for n in news) == ends[0].text
    return ends[0]
