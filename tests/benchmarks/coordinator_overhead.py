"""CPU time that the coordinator spends on one result outside the models; run by name.

    python tests/benchmarks/coordinator_overhead.py [--nodes 128] [--json]

A live tree of 128 nodes, of which full segments are on the ring; one of them returns. Timed is all
that lies between its bytes and the bytes of what is sent in turn: decode, look up the live rows,
record and walk, prune, make and encode the retained set and the client's tokens, merge a fresh
draft of 64 nodes, choose and encode the next segment; and a stage's mask for that segment, which
lies on the same path. Ends with status 1 if the median is over the limit.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from support.segments import one_part

from edgespec.decoding.admission import Ring
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import (
    Draft,
    EncodePrompt,
    RunHead,
    SendRing,
)
from edgespec.decoding.events import (
    Drafted,
    HeadDone,
    SegmentArrived,
)
from edgespec.machines.effects import (
    Effect,
    SendPeer,
    SendStages,
)
from edgespec.machines.events import (
    MessageArrived,
    RingUp,
)
from edgespec.policy.flowspec import FlowSpec
from edgespec.policy.registry import POLICIES
from edgespec.tree.drafted import FROM_ROOT, DraftedTree
from edgespec.tree.ledger import RowLedger, Rows
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice
from edgespec.wire.client_messages import Submit
from edgespec.wire.codec import decode, encode
from edgespec.wire.segment import Segment

LIMIT_MS = 1.0
STAGES = 4
HIDDEN_SIZE = 2048
FRESH_NODES = 64
SEGMENT_ROWS = 16
POLICY = "flowspec_bench"
STEPS = (
    "decode the result",
    "look up its live rows",
    "record, walk, prune, retain",
    "encode retained set and tokens",
    "merge a fresh draft, choose",
    "encode the next segment",
    "mask of a stage",
)


class _Letters:
    """A tokenizer and text stream that cost nothing: the text is the models' business."""

    eos_ids = frozenset[int]()

    def check_length(self, text: str, most: int) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def stream(self) -> _Letters:
        return self

    def push(self, token: int) -> str:
        return "x"

    def flush(self) -> str:
        return ""


def drafted(nodes: int, width: int, rng: np.random.Generator) -> DraftedTree:
    """A random tree whose first 16 guesses are best, and all others below the last of these.

    The first segment (the root and 15 rows) can only verify the root; if its target token is the
    16th guess, nearly all of the tree lives on.
    """
    best = SEGMENT_ROWS
    parents, scores = [FROM_ROOT] * best, [-0.1 * (i + 1) for i in range(best)]
    children: dict[int, int] = {}
    while len(parents) < nodes:
        parent = int(rng.integers(max(best, len(parents) - 24), len(parents) + 1))
        parent = best - 1 if parent == len(parents) else parent
        if children.get(parent, 0) >= width:
            continue
        children[parent] = children.get(parent, 0) + 1
        parents.append(parent)
        scores.append(min(scores[parent], scores[best - 1]) - float(rng.exponential(0.5)))
    rank: dict[int, int] = {}
    tokens = []
    for parent in parents:
        rank[parent] = rank.get(parent, -1) + 1
        tokens.append(1000 + rank[parent])
    return DraftedTree(np.array(parents), np.array(tokens), np.array(scores))


def back(segment: Segment) -> Segment:
    """The segment as the last stage returns it."""
    part = segment.parts[0]
    first = len(part.ids) - part.want
    rows = part.want
    return one_part(
        part.request,
        segment.header.seq,
        part.epoch,
        part.committed,
        part.reserve,
        part.want,
        part.ids[first:],
        part.parents[first:],
        part.positions[first:],
        np.zeros(0, np.int64),
        Tensor("float16", (rows, HIDDEN_SIZE), bytes(2 * rows * HIDDEN_SIZE)),
    )


def choice(*tokens: int) -> Choice:
    """What the head says."""
    return Choice(np.arange(len(tokens)), np.array(tokens), np.ones(len(tokens)))


def prepared(nodes: int) -> tuple[CoordinatorMachine, list[bytes], list[Segment]]:
    """A machine with `nodes` live nodes, the first result's frames, all segments on the ring."""
    rng = np.random.default_rng(0)
    POLICIES[POLICY] = FlowSpec(nodes=nodes, name=POLICY)
    machine = CoordinatorMachine(Ring(STAGES, 8192, "bench"), _Letters())
    submit = Submit(1, "x" * 60, 1000, 0.0, 0, 1.0, 0.0, 0, (), POLICY)
    machine.handle(RingUp(), 0.0)
    asked = the(machine.handle(MessageArrived(b"client", submit), 0.0), EncodePrompt)
    effects = machine.handle(machine.encode(asked), 0.0)
    prefill, reading = the(effects, SendRing), the(effects, Draft)
    machine.handle(Drafted(reading.job, reading.request, DraftedTree.empty()), 0.0)
    head = the(machine.handle(SegmentArrived(back(prefill.segment)), 0.0), RunHead)
    growing = the(machine.handle(HeadDone(head.job, head.request, choice(7)), 0.0), Draft)
    effects = machine.handle(
        Drafted(growing.job, growing.request, drafted(nodes - 1, 10, rng)), 0.0
    )
    flying = [e.segment for e in effects if isinstance(e, SendRing)]
    return machine, encode(back(flying[0])), flying


def the(effects: list[Effect], kind: type[Effect]) -> object:
    """The first effect of a kind."""
    return next(e for e in effects if isinstance(e, kind))


def stage_ledger(flying: list[Segment]) -> RowLedger:
    """A stage that holds the prompt and every row on the ring."""
    ledger = RowLedger()
    prompt = np.arange(60, dtype=np.int64)
    ledger.commit(Rows(prompt, prompt - 1, prompt, prompt))
    for segment in flying:
        ledger.append(segment.parts[0].rows())
    return ledger


def measure(nodes: int, repeats: int) -> tuple[dict[str, list[float]], list[int]]:
    """Microseconds of every step, once for each repeat; the tree's size before, walked, merged."""
    rng = np.random.default_rng(1)
    base, frames, flying = prepared(nodes)
    ledger = stage_ledger(flying)
    fresh = drafted(FRESH_NODES, 10, rng)
    spent: dict[str, list[float]] = {step: [] for step in STEPS}

    @contextmanager
    def timed(step: str) -> Iterator[None]:
        started = time.thread_time_ns()
        yield
        spent[step].append((time.thread_time_ns() - started) / 1e3)

    sizes: list[int] = []
    for _ in range(repeats):
        machine, stage = copy.deepcopy(base), copy.deepcopy(ledger)
        with timed(STEPS[0]):
            segment = decode(frames)
        with timed(STEPS[1]):
            effects = machine.handle(SegmentArrived(segment), 0.0)
        job = the(effects, RunHead)
        target_tokens = choice(999 + SEGMENT_ROWS, 1)
        with timed(STEPS[2]):
            effects = machine.handle(HeadDone(job.job, job.request, target_tokens), 0.0)
        walked = live(machine)
        news = [e.message for e in effects if isinstance(e, SendStages | SendPeer)]
        with timed(STEPS[3]):
            for message in news:
                encode(message)
        growing = the(effects, Draft)
        with timed(STEPS[4]):
            effects = machine.handle(Drafted(growing.job, growing.request, fresh), 0.0)
        sizes = [nodes, walked, live(machine)]
        following = the(effects, SendRing).segment
        with timed(STEPS[5]):
            encode(following)
        sent = following.parts[0]
        rows = Rows(sent.ids, sent.parents, sent.tokens, sent.positions)
        with timed(STEPS[6]):
            stage.append(rows)
    return spent, sizes


def live(machine: CoordinatorMachine) -> int:
    """How many nodes the tree has."""
    request = machine.accepts(1)
    assert request is not None
    assert request.tree is not None
    return len(request.tree)


def main(arguments: list[str]) -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=128, help="live nodes of the tree")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--limit-ms", type=float, default=LIMIT_MS)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    measure(options.nodes, 20)  # warm up
    spent, sizes = measure(options.nodes, options.repeats)
    totals = [sum(each) for each in zip(*spent.values(), strict=True)]
    medians = {step: statistics.median(times) for step, times in {**spent, "total": totals}.items()}
    tails = {
        step: statistics.quantiles(times, n=20)[-1]
        for step, times in {**spent, "total": totals}.items()
    }
    good = medians["total"] < options.limit_ms * 1e3
    if options.json:
        figures = {step: {"median": medians[step], "p95": tails[step]} for step in medians}
        print(json.dumps({"nodes": sizes, "unit": "us", "good": good, "steps": figures}))
    else:
        print(f"{'microseconds of CPU time':34}{'median':>8}{'p95':>8}")
        for step in medians:
            print(f"{step:34}{medians[step]:8.0f}{tails[step]:8.0f}")
        print(f"live nodes: {sizes[0]}, after the walk {sizes[1]}, with the fresh draft {sizes[2]}")
        print(f"limit {options.limit_ms * 1e3:.0f}: {'kept' if good else 'EXCEEDED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
