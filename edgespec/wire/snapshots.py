"""Snapshots: what subscribed clients are shown of running requests, and how they subscribe.

A Subscribe counts for some seconds. While one counts, the stages send their runs and the
coordinator its tree; otherwise nothing is collected. Times are ages at the moment of sending, so
that no two machines need the same clock.
"""

from __future__ import annotations

from edgespec.types.record import Finite, Numbers, Record, Seconds, Some, Text, Whole
from edgespec.wire.messages import Message, require

MOST_NODES = 120
"""Nodes of a tree that a Snapshot holds at most."""

MOST_RUNS = 200
"""Runs that a Snapshot or a StageActivity holds at most."""

MOST_CHOSEN = 8
"""Requests that a Subscribe names at most."""

MOST_SEGMENTS = 64
"""Segments that a Snapshot holds at most."""


class Subscribe(Message, tag=48, frozen=True):
    """A client wants Snapshots for so many seconds from now on, 0: no longer; of the oldest running
    request, and of those with these numbers."""

    seconds: Seconds
    requests: Numbers = ()

    def check(self) -> None:
        require(len(self.requests) <= MOST_CHOSEN, "too many requests")


class SubscribeActivity(Message, tag=9, frozen=True):
    """The coordinator wants the stages' runs for so many seconds; answered by StageActivity."""

    seconds: Seconds


class StageRun(Record, frozen=True):
    """A segment that a stage computed: `rows` in `seconds`, which ended `ago` seconds ago.

    `wasted`: how many of the rows were pruned by the time that it ended. `stage` is 0 in a stage's
    own message; the coordinator fills it in.
    """

    stage: Whole
    request: Whole
    seq: Whole
    ago: Seconds
    seconds: Seconds
    rows: Whole
    wasted: Whole

    def check(self) -> None:
        require(self.wasted <= self.rows, "more rows are wasted than there are")


class StageActivity(Message, tag=27, frozen=True):
    """The runs of a stage since its last StageActivity, oldest first."""

    runs: Some[StageRun]

    def check(self) -> None:
        require(len(self.runs) <= MOST_RUNS, "too many runs")
        for run in self.runs:
            run.check()


class SnapshotNode(Record, frozen=True):
    """A token of the draft tree.

    `state`: "waiting" (to be sent), "sent" (on the ring), "accepted" (committed) or "pruned"
    (out of the tree). `probability`: of the path to it, as the draft has it, from the root that was
    there when it was last in the tree. `source`: "prompt" or "model" (the base model's own token,
    not guessed by a draft), or what guessed it: "levels" (the draft model grew the tree level by
    level) or "expansion" (it was asked for the children of chosen nodes). `sent`: whether its row
    went round the ring, so that with "pruned" it was wasted.
    """

    id: int
    parent: int
    text: Text
    state: Text
    probability: Finite
    source: Text
    sent: bool


class SnapshotSegment(Record, frozen=True):
    """A segment on the ring: its rows, and how many of them are pruned already."""

    seq: int
    rows: int
    dead: int


class Snapshot(Message, tag=49, frozen=True):
    """What a running request looks like now; sent to each client that subscribed.

    `state`: "idle", "reading" (the prompt), "answering" or "paused" (the ring is lost). `request`:
    its number, which a lost ring changes, 0 if none runs. `tokens` are committed, made in `trips`
    round the ring, the prompt's being one. `root`: the newest committed node. `nodes`: the newest
    accepted ones and all that hangs from them, by id. `runs`: the stages' newest since the last
    Snapshot, oldest first. `place`: how many older requests are open.
    """

    state: Text
    request: int
    policy: Text
    tokens: int
    trips: Finite
    root: int
    nodes: Some[SnapshotNode]
    segments: Some[SnapshotSegment]
    runs: Some[StageRun]
    place: int = 0

    def check(self) -> None:
        require(len(self.runs) <= MOST_RUNS, "too many runs")
        for run in self.runs:
            run.check()
