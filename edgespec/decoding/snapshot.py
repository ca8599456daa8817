"""Snapshot: what subscribers see of running requests; costs nothing without subscribers.

The coordinator machine's `SnapshotKeeper` has a look at what happens anyway, and changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter

from edgespec.decoding.answer import TextCodec
from edgespec.decoding.flights import Flights
from edgespec.decoding.request import Request
from edgespec.decoding.stage_stats import LONGEST_WATCH_S, aged
from edgespec.machines.effects import Effect, SendPeer, SendStages
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.node import Advance, TreeNode
from edgespec.wire.snapshots import (
    MOST_NODES,
    MOST_RUNS,
    MOST_SEGMENTS,
    Snapshot,
    SnapshotNode,
    SnapshotSegment,
    StageRun,
    Subscribe,
    SubscribeActivity,
)

SNAPSHOT_S = 1 / 8
"""Seconds between two snapshots."""

MOST_WATCHERS = 8
"""Further ones see nothing: a page's visitors share one subscription."""

TRUNK, LEFT = 12, 32
"""Accepted and pruned nodes that a snapshot still shows."""

TEXT_CHARS = 40
"""Characters of a token that are shown."""

MOST_TEXTS = 8_192
"""Tokens whose texts are remembered."""


@dataclass(slots=True)
class _Trail:
    """What is shown of a request beside its tree: nodes that left it, and the newest tokens that
    were no guesses."""

    trunk: deque[SnapshotNode] = field(default_factory=lambda: deque(maxlen=TRUNK))
    pruned: deque[SnapshotNode] = field(default_factory=lambda: deque(maxlen=LEFT))
    unguessed: deque[int] = field(default_factory=lambda: deque(maxlen=TRUNK + 1))

    def grow(
        self,
        accepted: Iterable[SnapshotNode],
        pruned: Iterable[SnapshotNode],
        missed: Iterable[int],
    ) -> None:
        """A walk has passed these nodes, and left those; a new root that was no guess."""
        self.trunk.extend(accepted)
        self.pruned.extend(pruned)
        self.unguessed.extend(missed)


class SnapshotKeeper:
    """The subscribers, and what they see."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._texts: dict[int, str] = {}
        self._watchers: dict[bytes, float] = {}  # until when
        self.is_watched = False
        self._chosen: dict[bytes, tuple[int, ...]] = {}  # requests beside the oldest
        self._observed = self._next = float("-inf")
        self._news = False  # something that no watcher was told of, while no request runs
        self._runs: deque[tuple[float, StageRun]] = deque(maxlen=MOST_RUNS)
        self._trails: dict[int, _Trail] = {}  # by the requests' numbers
        self._last = 0  # the request that was walked last: it is shown when it is over, too

    # --- subscribers --------------------------------------------------------------------------

    def watch(self, peer: bytes, asked: Subscribe, now: float) -> list[Effect]:
        """Show this peer snapshots for so many seconds; 0 ends it."""
        self._drop_late(now)
        seconds = asked.seconds
        if seconds <= 0:
            self.forget(peer)
        elif peer in self._watchers or len(self._watchers) < MOST_WATCHERS:
            self._news = self._news or peer not in self._watchers
            self._watchers[peer] = now + min(seconds, LONGEST_WATCH_S)
            self.is_watched = True
            self._chosen[peer] = asked.requests
        else:
            return []
        wanted = max(self._watchers.values(), default=now)
        # Not for every renewal: a client that renews without end must not flood the stages.
        return self.observe(now) if wanted > self._observed + LONGEST_WATCH_S / 8 else []

    def forget(self, peer: bytes) -> None:
        """This peer is gone."""
        self._watchers.pop(peer, None)
        self._chosen.pop(peer, None)
        self.is_watched = bool(self._watchers)

    def observe(self, now: float) -> list[Effect]:
        """Have the stages report their runs while there are subscribers; those of a new ring
        too."""
        until = max(self._watchers.values(), default=now)
        if until <= now:
            return []
        self._observed = until
        return [SendStages(SubscribeActivity(until - now))]

    def _drop_late(self, now: float) -> None:
        for peer in [peer for peer, until in self._watchers.items() if until <= now]:
            self.forget(peer)
        if not self._watchers:
            self._trails.clear()

    # --- what happens -------------------------------------------------------------------------

    def ran(self, runs: Iterable[StageRun], now: float) -> None:
        """A stage tells its runs."""
        if self._watchers:
            self._news = True
            self._runs += [(now - run.ago, run) for run in runs]

    def ended(self) -> None:
        """A request is over, or paused: that is shown though nothing else happens."""
        self._news = True

    def walked(self, request: int, prefix: int, tree: DraftTree, step: Advance) -> None:
        """The tree of a request with so long a prefix was walked: for subscribers, keep what left
        the tree with it."""
        self._last = request
        trail = self._trails.setdefault(request, _Trail())
        before = step.before
        if before is None:
            return
        passed, score = frozenset(step.passed), before[step.passed[0]].score
        gone: list[TreeNode] = []
        accepted: list[SnapshotNode] = []
        is_over = False
        for node in map(before.__getitem__, sorted(before.ids)):
            if node.id in passed:
                # The token that ends an answer is none of its text, and nothing comes after it.
                is_over = is_over or node.token in self._codec.eos_ids
                if not is_over:
                    accepted.append(self._node(trail, prefix, node, "accepted", score))
            elif node.id not in tree and (node.sent or node.parent in passed):
                gone.append(node)  # what was never sent, far from the answer, is of no interest
        pruned = [self._node(trail, prefix, node, "pruned", score) for node in gone[-LEFT:]]
        trail.grow(accepted, pruned, [tree.root] if step.missed else [])

    # --- what is shown ------------------------------------------------------------------------

    def deadline(self, is_busy: bool) -> float | None:
        """When the next snapshot is due, if there are subscribers."""
        return self._next if self._watchers and (is_busy or self._news) else None

    def show(
        self, requests: Sequence[Request], flights: Flights, paused: bool, now: float
    ) -> list[Effect]:
        """Snapshots for every subscriber, if it is time for them: of the oldest request, and of
        those that it has chosen; of none if none runs."""
        if not self._watchers or now < self._next or not (requests or self._news):
            return []
        self._drop_late(now)
        self._next, self._news = now + SNAPSHOT_S, False
        numbers = {self._last, *(request.number for request in requests)}
        self._trails = {n: trail for n, trail in self._trails.items() if n in numbers}
        made: dict[int, Snapshot] = {}
        effects: list[Effect] = []
        for peer in self._watchers:
            chosen = self._chosen[peer]
            for place, request in enumerate(requests or [None]):
                if place == 0 or (request is not None and request.number in chosen):
                    if place not in made:
                        made[place] = self._snapshot(request, flights, paused, place, now)
                    effects.append(SendPeer(peer, made[place]))
        self._runs.clear()
        return effects

    def _snapshot(
        self, request: Request | None, flights: Flights, paused: bool, place: int, now: float
    ) -> Snapshot:
        tree = None if request is None or paused else request.tree
        return Snapshot(
            state="paused" if paused else _state(request),
            request=request.number if request else 0,
            policy=request.policy.name if request else "",
            tokens=len(request.answer.token_ids) if request else 0,
            trips=request.stats.answer_trips if request else 0.0,
            root=tree.root if tree else -1,
            nodes=self._nodes(request, tree),
            segments=_segments(tree, request.number if request else self._last, flights),
            runs=aged(self._runs, now),
            place=place,
        )

    def _nodes(self, request: Request | None, tree: DraftTree | None) -> tuple[SnapshotNode, ...]:
        """The tree's best, what was accepted before its root, and what was pruned last."""
        live: list[SnapshotNode] = []
        trail = self._trails.get(request.number if request else self._last, _Trail())
        if request is not None and tree is not None:
            score = tree[tree.root].score
            # A parent stands in front of its children; scores that were refreshed apart may leave
            # a child above it all the same, which is then not drawn.
            nodes = (tree[i] for i in tree.ids)
            for node in nlargest(MOST_NODES - TRUNK - LEFT, nodes, key=attrgetter("score")):
                state = "sent" if node.sent else "waiting"
                state = "accepted" if node.id == tree.root else state
                prefix = len(request.outbox.prefix)
                live.append(self._node(trail, prefix, node, state, score))
        room = MOST_NODES - len(live) - len(trail.trunk)
        pruned = list(trail.pruned)[-room:] if room > 0 else []
        return tuple(sorted([*trail.trunk, *live, *pruned], key=lambda node: node.id))

    def _node(
        self, trail: _Trail, prefix: int, node: TreeNode, state: str, score: float
    ) -> SnapshotNode:
        """`score`: the root's."""
        probability = min(math.exp(node.score - score), 1.0) if node.score < score else 1.0
        if node.id < prefix:
            source = "prompt"
        elif node.id in trail.unguessed:
            source = "model"
        else:
            source = "levels" if node.drafted is None else "expansion"
        text = self._text(node.token)
        return SnapshotNode(node.id, node.parent, text, state, probability, source, node.sent)

    def _text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            if len(self._texts) >= MOST_TEXTS:
                self._texts.clear()
            text = self._texts[token] = self._codec.token(token)[0][:TEXT_CHARS]
        return text


def _state(request: Request | None) -> str:
    if request is None:
        return "idle"
    return "reading" if request.opening else "answering"


def _segments(
    tree: DraftTree | None, request: int, flights: Flights
) -> tuple[SnapshotSegment, ...]:
    """What is on the ring, the newest last; rows of a request that is over are all dead."""
    found = []
    for seq, flight in list(flights.flying.items())[-MOST_SEGMENTS:]:
        dead = 0
        for one in flight.parts:
            if tree is None or one.request != request:
                dead += 0 if one.committed and one.request == request else one.rows
            elif not one.committed:
                dead += sum(i not in tree for i in one.wanted)
        found.append(SnapshotSegment(seq, flight.rows, dead))
    return tuple(found)
