"""A head in the middle of a draft: real models in one worker, and what the trace says of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import write_checkpoint

from edgespec.backends.compute import CoordinatorCompute
from edgespec.backends.emulated import Emulated
from edgespec.backends.torch_backend import TorchHead
from edgespec.decoding.effects import Draft, OpenDraft, RunHead
from edgespec.decoding.events import Drafted, HeadDone
from edgespec.drafting.grower import TreeGrower
from edgespec.drafting.independent import IndependentGuesser
from edgespec.machines.effects import Effect
from edgespec.machines.events import Event
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch
from edgespec.policy.base import Grow
from edgespec.runtime.trace import Trace
from edgespec.runtime.worker import Worker
from edgespec.tree.ledger import Rows
from edgespec.verify.sampling import Sampling

PATIENCE_S = 60.0
SAMPLING = Sampling(temperature=1.0, seed=3)
DRAFT = Draft(1, 1, Grow(3, 3, 9), (5, 1, 30, 2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2))


def head() -> RunHead:
    ids = np.arange(2)
    hidden = from_torch(torch.randn((2, 32), generator=torch.Generator().manual_seed(1)))
    return RunHead(2, 1, hidden, Rows(ids, ids - 1, np.array([4, -1]), ids), SAMPLING)


class Played:
    """One draft by a real worker, with a head that is asked for before its `layer`-th layer."""

    def __init__(self, model: Checkpoint, layer: int, trace: Trace | None = None) -> None:
        guesser = IndependentGuesser(model)
        compute = CoordinatorCompute(TorchHead(OutputHead(model)), TreeGrower(guesser))
        self.layers = 0
        self.threads: set[int] = set()
        self._perform, self._layer = compute.perform, layer
        self.worker = Worker(self.perform if trace is None else trace.around(self.perform))
        self.worker.start()
        for effect in (OpenDraft(1, SAMPLING), DRAFT):
            self.worker.submit(effect)
        self.events: list[Event] = []
        limit = time.monotonic() + PATIENCE_S
        while len(self.events) < 2 and time.monotonic() < limit:
            self.events += [event for _, event in self.worker.timed_events()]
            time.sleep(0.001)
        self.worker.stop(PATIENCE_S)

    def perform(self, effect: Effect, stop: Callable[[], bool]) -> Event | None:
        """Submit the head between two calls of the draft, or behind it."""
        self.threads.add(threading.get_ident())

        def between() -> bool:
            self.layers += 1
            if self.layers == self._layer:
                self.worker.submit(head())
            return stop()

        if not isinstance(effect, Draft):
            return self._perform(effect, stop)
        event = self._perform(effect, between)
        if not self._layer:
            self.worker.submit(head())
        return event


def told(event: Event) -> list[list[float]]:
    """Everything that an event says, in exact numbers."""
    if isinstance(event, HeadDone):
        choice = event.choice
        return [array.tolist() for array in (choice.rows, choice.tokens, choice.margins)]
    assert isinstance(event, Drafted)
    guesses = event.guesses
    return [array.tolist() for array in (guesses.parents, guesses.tokens, guesses.scores)]


def test_a_head_in_the_middle_of_a_draft_is_done_first_and_changes_nothing(
    model: Checkpoint,
) -> None:
    behind = Played(model, 0)
    drafted, done = behind.events
    assert isinstance(drafted, Drafted)
    assert behind.layers == 3 * (1 + 1), "three passes of two small layers and a matrix"
    for layer in (1, 4, 6):
        played = Played(model, layer)
        first, second = played.events
        assert (told(first), told(second)) == (told(done), told(drafted))
        assert played.layers == behind.layers
        assert len(played.threads) == 1, "the models belong to one thread"


def spans(path: Path) -> list[tuple[str, float, float, float]]:
    """Kind, start, end and delay of every span, as they lie in time."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [(entry["kind"], entry["start"], entry["end"], entry["late"]) for entry in entries]
    return sorted(found, key=lambda span: span[1:])


def test_a_trace_has_a_span_for_each_stretch_of_the_draft(
    model: Checkpoint, tmp_path: Path
) -> None:
    trace = Trace(str(tmp_path / "trace"))
    Played(model, 4, trace)
    trace.file.close()
    found = spans(tmp_path / "trace")
    assert [kind for kind, *_ in found] == ["OpenDraft", "Draft", "RunHead", "Draft"]
    assert all(one[2] <= two[1] for one, two in pairwise(found))


class Prices:
    """A draft of four parts of 10 ms, a head of 5 ms."""

    def seconds(self, effect: Effect, done: Event | None) -> float:
        """Charged."""
        return 0.04 if isinstance(effect, Draft) else 0.005

    def parts(self, effect: Effect) -> tuple[float, ...]:
        """Alike."""
        return (1.0,) * 4


def test_an_emulated_trace_has_the_charged_stretches(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path / "trace"))

    def perform(effect: Effect, stop: Callable[[], bool]) -> Event | None:
        if isinstance(effect, Draft):
            for asked in (0.015, 0.021):
                worker.submit(head(), at=began + asked)
        return None

    worker = Worker(perform)
    emulated = Emulated(perform, Prices(), worker)
    began = emulated.free_at
    worker.perform = trace.around(emulated.perform, emulated)
    worker.ended_at = lambda: emulated.free_at
    worker.submit(DRAFT, at=began)
    worker.submit(OpenDraft(2, SAMPLING), at=began)
    worker.start()
    limit = time.monotonic() + PATIENCE_S
    while time.monotonic() < limit and len(spans(tmp_path / "trace")) < 5:
        time.sleep(0.01)
    worker.stop(PATIENCE_S)
    trace.file.close()
    expected = [
        ("Draft", 0.0, 0.02),
        ("RunHead", 0.02, 0.025),
        ("RunHead", 0.025, 0.03),
        ("Draft", 0.03, 0.05),
        ("OpenDraft", 0.05, 0.055),
    ]
    assert [
        (kind, start - began, end - began) for kind, start, end, _ in spans(tmp_path / "trace")
    ] == [(kind, pytest.approx(start), pytest.approx(end)) for kind, start, end in expected]
