"""Rings of fake stages: building them, what their answers must be, playing any timing on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.backends.compute import CoordinatorCompute, StageCompute
from edgespec.backends.fake import FakeBlock, FakeDraft, FakeHead, toy_next
from edgespec.decoding.admission import Ring
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.base import DraftSource, prompts_of
from edgespec.machines.events import (
    Event,
)
from edgespec.planning.cost_model import DraftPass
from edgespec.runtime.local import LocalRing, Step
from edgespec.tree.drafted import FROM_ROOT, Children, DraftedTree
from edgespec.types.features import NO_FEATURES, Features
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Failed, Finished, Submit, Tokens
from edgespec.wire.messages import Message, Retain

VOCABULARY = 40
PLENTY = 100_000


class HoldingStream:
    """A text stream that holds every third token's text back until the next one, or the end."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> str:
        """The text that this token finished."""
        text, self._held = self._held, ""
        if token % 3 == 0:
            self._held = text_of(token)
            return text
        return text + text_of(token)

    def flush(self) -> str:
        """What was held back."""
        text, self._held = self._held, ""
        return text


@dataclass
class ToyCodec:
    """A tokenizer of one-letter tokens (several tokens share a letter)."""

    eos_ids: Collection[int] = frozenset()

    def check_length(self, text: str, most: int) -> None:
        """Nothing is too long to be looked at."""

    def encode(self, text: str) -> Sequence[int]:
        """One token a character; blanks give none."""
        return [ord(c) % VOCABULARY for c in text if c != " "]

    def encode_chat(self, messages: Sequence[Mapping[str, str]], most: int) -> Sequence[int]:
        """All that was said, in one."""
        return self.encode("".join(one["content"] for one in messages))

    def token(self, token: int) -> tuple[str, bytes | None]:
        """Its letter."""
        return text_of(token), text_of(token).encode()

    def stream(self) -> HoldingStream:
        """A fresh stream."""
        return HoldingStream()


def text_of(token: int) -> str:
    """The text of a token that ends no answer."""
    return chr(ord("a") + token % 10)


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
        draft: DraftSource | None = None,
        accuracy: float = 0.7,
        eos_ids: Collection[int] = frozenset(),
        prefill_chunk: int = 8,
        context_length: int = 2000,
        queue_limit: int = 64,
        row_limit: int = PLENTY,
        kept_rows: int = 0,
    ) -> None:
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
            Ring(
                stages,
                context_length,
                "fake",
                prefill_chunk,
                queue_limit,
                kept_rows=kept_rows,
                needs=self.draft.needs,
                prompts=prompts_of(self.draft),
                sources=self.draft.sources,
            ),
            self.codec,
        )
        self.ring = LocalRing(
            self.coordinator,
            CoordinatorCompute(self.head, self.draft),
            [(m, StageCompute(b)) for m, b in zip(self.machines, self.blocks, strict=True)],
        )

    def tell(self, event: Event) -> None:
        """Hand an event to the coordinator."""
        self.ring._dispatch(0, self.coordinator.handle(event, self.ring.now))

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

    def expected(self, ask: Submit) -> Finished:
        """Token ids, text and finish reason of plain decoding on one machine."""
        return plain_answer(self.codec, ask, self.stages, self.context_length)

    def assert_nothing_left(self) -> None:
        """Every machine and backend has forgotten every request, and every credit is back."""
        assert not list(self.ring.steps())
        left = {
            name: value
            for name in ("_requests", "_waiting", "_active", "_flying", "_head_jobs")
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
        assert not any(node.aborted for node in self.ring._nodes)

    def assert_consistent(self) -> None:
        """Caches hold what the ledgers say; equally long committed regions end in the same row."""
        ends: dict[tuple[int, int], int] = {}
        for number, (machine, block) in enumerate(zip(self.machines, self.blocks, strict=True)):
            for request, ledger in machine.ledgers().items():
                if self.ring.is_quiet(number + 1):
                    assert block.slots(request) == len(ledger)
                end = ends.setdefault((request, ledger.committed), ledger.last_committed)
                assert end == ledger.last_committed


def plain_answer(codec: ToyCodec, ask: Submit, stages: int, context_length: int) -> Finished:
    """The answer by plain autoregressive decoding, written down without the code under test."""
    prompt = list(codec.encode(ask.prompt))
    tokens: list[int] = []
    text = ""
    reason = ""
    limit = min(ask.max_new_tokens, context_length - len(prompt))
    while not reason:
        token = toy_next(prompt + tokens, stages, VOCABULARY, ask.seed)
        tokens.append(token)
        at_end = token in codec.eos_ids
        text += "" if at_end else text_of(token)
        # Text that the stream holds back cannot stop an answer yet.
        visible = text[:-1] if token % 3 == 0 and not at_end and len(tokens) < limit else text
        ends = [visible.index(s) + len(s) for s in ask.stop if s in visible]
        if ends:
            first = min(ends)
            starts = [first - len(s) for s in ask.stop if visible[:first].endswith(s)]
            text, reason = text[: min(starts)], "stop"
        elif at_end:
            reason = "stop"
        elif len(tokens) == limit:
            reason = "length"
    return _bare_finished(ask.tag, text, tuple(tokens), reason)


def _bare_finished(tag: int, text: str, tokens: tuple[int, ...], reason: str) -> Finished:
    return Finished(tag, text, tokens, reason, "", "", 0, 0, len(tokens), 0, 0, 0, (), 0, 0, 0, 0)


class OracleDraft:
    """A cheap draft source: random trees that contain the true answer as often as it likes.

    It is told the answers beforehand. `accuracy`: the share of levels whose true token is among
    the guesses. Scores are drawn from few values, so that ties are common.
    """

    name = "oracle"
    sources = ("oracle",)
    needs: frozenset[str] = frozenset()

    def __init__(self, rng: random.Random, accuracy: float) -> None:
        self._rng = rng
        self._accuracy = accuracy
        self._answers: list[tuple[int, ...]] = []
        self._trees: dict[int, _Growing] = {}
        self._open: set[int] = set()
        self._work: list[int] = []

    @property
    def open_requests(self) -> int:
        """How many requests are held."""
        return len(self._open | set(self._trees))

    def tell(self, whole: Sequence[int]) -> None:
        """A prompt with its answer."""
        self._answers.append(tuple(whole))

    def open(self, request: int, sampling: Sampling) -> None:
        """Start a request."""
        assert request not in self._open
        self._open.add(request)

    def inherit(self, request: int, base: int, rows: int) -> None:
        """Nothing: it reads whole contexts."""

    def close(self, request: int) -> None:
        """Free the request."""
        self._open.discard(request)
        self._trees.pop(request, None)

    def refresh(
        self,
        request: int,
        context: Sequence[int],
        depth: int,
        width: int,
        features: Features = NO_FEATURES,
    ) -> DraftedTree:
        """A fresh tree."""
        assert request in self._open
        self._trees[request] = _Growing(tuple(context))
        return self.deepen(request, depth, width)

    def deepen(self, request: int, levels: int, width: int) -> DraftedTree:
        """The last tree with more levels."""
        tree = self._trees[request]
        for _ in range(levels):
            self._charge(len(tree.frontier))
            tree.grow(width, self._rng, lambda path: self._guesses(path, width))
        return tree.drafted()

    def expand(
        self,
        request: int,
        context: Sequence[int],
        paths: Sequence[Sequence[int]],
        width: int,
        features: Features = NO_FEATURES,
    ) -> Children:
        """Other random guesses at every call, scored as those of the trees."""
        assert request in self._open
        self._charge(len(paths))
        parents: list[int] = []
        tokens: list[int] = []
        scores: list[float] = []
        for index, path in enumerate(paths):
            guesses = self._guesses((*context, *path), width)
            guesses.sort(key=lambda guess: -guess[1])
            parents += [index] * len(guesses)
            tokens += [token for token, _ in guesses]
            scores += [score for _, score in guesses]
        return Children(
            np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
        )

    def take_work(self) -> tuple[DraftPass, ...]:
        """The passes that a model with a cache of the right context would have run."""
        work, self._work = self._work, []
        return tuple(DraftPass(rows, self.name) for rows in work)

    def _charge(self, rows: int) -> None:
        if rows:
            self._work.append(rows)

    def _guesses(self, path: tuple[int, ...], width: int) -> list[tuple[int, float]]:
        """Some tokens behind a path with their own scores, in no order."""
        guesses = self._rng.sample(range(VOCABULARY), self._rng.randint(1, min(width, 3)))
        right = next((a[len(path)] for a in self._answers if a[: len(path)] == path != a), None)
        if right is not None and right not in guesses and self._rng.random() < self._accuracy:
            guesses[self._rng.randrange(len(guesses))] = right
        return [(token, 0.0 - self._rng.choice((0.0, 0.5, 1.0))) for token in guesses]


@dataclass
class _Growing:
    context: tuple[int, ...]
    paths: list[tuple[int, ...]] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [FROM_ROOT])

    def grow(
        self,
        width: int,
        rng: random.Random,
        guesses: Callable[[tuple[int, ...]], list[tuple[int, float]]],
    ) -> None:
        level: list[int] = []
        for at in self.frontier:
            path = self.context if at == FROM_ROOT else self.paths[at]
            score = 0.0 if at == FROM_ROOT else self.scores[at]
            for token, own in guesses(path):
                level.append(len(self.paths))
                self.paths.append((*path, token))
                self.parents.append(at)
                self.scores.append(score + own)
        rng.shuffle(level)
        self.frontier = sorted(level, key=lambda i: -self.scores[i])[:width]

    def drafted(self) -> DraftedTree:
        return DraftedTree(
            np.array(self.parents, np.int64),
            np.array([path[-1] for path in self.paths], np.int64),
            np.array(self.scores, np.float64),
        )


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
