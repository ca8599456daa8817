"""Messages: what nodes say to each other, as records with bounded types.

On the data ring only `Segment` travels. Block files have a channel of their own, between a node
that holds one and a node that wants it. All others use the control channel, between the
coordinator and one stage or one client. Every message about a request carries its id, so that
several requests may be interleaved without changing the protocol.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgespec.config import MOST_STAGES
from edgespec.tree.ledger import RetainSet
from edgespec.types.record import Finite, Record, Text, Whole

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]*\Z", min_length=64, max_length=64)]
Celsius = Annotated[float, Meta(gt=-1000.0, lt=1000.0)]

SHORTEST_S, LONGEST_S = 1e-9, 1e9
"""Seconds of what a stage says that it did, if it says any: quotients of them are finite too."""

NO_RING = 0
"""The number of an Assign's ring that is only planned."""

MOST_ASSIGNS = 1 << 20
"""Numbers of Assigns that are this far apart are not of one run of a coordinator."""


def require(condition: bool, problem: str) -> None:
    """In `check` of a message or a record in one: raise ValueError if its fields do not fit."""
    if not condition:
        raise ValueError(problem)


class Message(Record, frozen=True):
    """The base of all messages; each has a tag, by which it travels."""


# --- coordinator → stages -----------------------------------------------------------------------


class Retain(Message, tag=2, frozen=True):
    """Which rows of a request to keep; it overtakes data, being on the control channel."""

    request: int
    keep: RetainSet


class CloseRequest(Message, tag=3, frozen=True):
    """The request is over (finished, cancelled or failed): free all that it holds."""

    request: int


class Assign(Message, tag=4, frozen=True):
    """Answer to Join: what this stage runs, layers `first` to `end` - 1 of the model.

    `model` is the folder's path on the coordinator; `fingerprint` tells whether a folder on the
    stage holds the same model. `quantisation` names how the block's matrices are held. A stage
    that has neither the model nor the block asks for it at `blocks_port` of the coordinator.
    `ring` numbers the coordinator's rings, of which every loss of a stage begins a new one: a stage
    that holds the block already forgets all that it had of the ring before, and is ready for this
    one. `ring_key` is the secret of this ring's members. `block_number`: what the block is called
    on the block channel. `head`: how the last stage holds the output head, as a quantisation's
    name; "" for a stage that has none. `rows`: cache rows of all requests together, guesses beyond
    what is planned not counted. `cache_dtype`: of keys and values; "": `dtype`.

    `number`: that of this assignment. Whatever answers it names it, so that no answer to an earlier
    one counts for this. It goes up while a coordinator runs, from a start of its own: what is lower
    than another by less than MOST_ASSIGNS is older.

    With `ring` NO_RING it is a place to prepare for: the block is fetched onto the disk, beside one
    that runs.
    """

    stage: int
    stages: int
    first: int
    end: int
    model: Text
    fingerprint: Text
    dtype: Text
    quantisation: Text
    context_length: int
    blocks_port: int
    ring_key: Text
    ring: int = 1
    block_number: int = 0
    head: Text = ""
    rows: int = 0
    number: int = 0
    cache_dtype: Text = ""

    def check(self) -> None:
        require(1 <= self.stage <= self.stages <= MOST_STAGES, "a stage that no ring has")
        require(0 <= self.first < self.end, "layers that no model has")
        require(self.rows >= 0 and self.context_length > 0, "rows or a context that cannot be")
        require(0 < self.blocks_port < 1 << 16, "a port that cannot be")
        require(self.block_number >= 0, "a number that no block has")

    @property
    def block(self) -> tuple[str, int, int, str, str, str, str]:
        """What tells the block that is to be loaded from all others."""
        held = self.quantisation, self.dtype, self.head, self.cache_dtype
        return self.fingerprint, self.first, self.end, *held


class StandBy(Message, tag=8, frozen=True):
    """All places are taken: the stage is a spare, which gets the place of a lost one.

    The text says why, fit for a user. `number`: as that of an Assign.
    """

    text: Text
    number: int = 0


class Connect(Message, tag=5, frozen=True):
    """Every stage is ready: push what you compute to this TCP address.

    An empty host means the coordinator, by the name that the stage knows it by. `key`: the public
    key that the node there has to prove. `number`: of the stage's Assign.
    """

    host: Text
    port: int
    key: Text
    number: int = 0


class Refuse(Message, tag=6, frozen=True):
    """The peer may not do what it asked for; the reason is fit for its user."""

    reason: Text


class Goodbye(Message, tag=7, frozen=True):
    """The sender is leaving in good order; the reason is fit for a user. `unloads`: a stage is to
    give its block up."""

    reason: Text
    unloads: bool = False


# --- stage → coordinator ------------------------------------------------------------------------


class Join(Message, tag=20, frozen=True):
    """A stage asks for its place; `host` and `port` are the TCP address of its data socket.

    `stage` 0: any place that is free, or else that of a spare. `key`: its public key, which its
    data socket proves. `memory`: bytes that it has for a block, 0 if it does not know.
    """

    stage: int
    name: Text
    pid: int
    host: Text
    port: int
    key: Text
    memory: int = 0


class Health(Message, tag=26, frozen=True):
    """How a device is. `temperature`: of its hottest part in °C, and `limit`, at which it slows
    down; 0: unknown. `memory` and `free`: bytes that it has, and that are not used. `busy`: the
    share of the time since the last Health in which its stage computed. `throttled`: whether it
    says that it runs slower than it could; the text says why, fit for a user.

    Of its latest blocks, 0 if it computed none: `slowdown` is how many times as long as its best
    ones of that size they took, `one_row` and `few_rows` the median seconds of those of one row,
    and of 2 to 16.
    """

    temperature: Celsius
    limit: Celsius
    memory: Whole
    free: Whole
    busy: Annotated[float, Meta(ge=0.0, le=1.0)]
    throttled: bool
    text: Text
    slowdown: Finite = 0.0
    one_row: Finite = 0.0
    few_rows: Finite = 0.0

    def check(self) -> None:
        require(self.free <= self.memory, "more memory is free than there is")
        times = (self.slowdown, self.one_row, self.few_rows)
        fits = all(t == 0.0 or SHORTEST_S <= t <= LONGEST_S for t in times)
        require(fits, "a time that cannot be")


class Loading(Message, tag=21, frozen=True):
    """How far a stage's block is, in words for a person: "loading 3 of 10 layers"."""

    text: Text


class Ready(Message, tag=22, frozen=True):
    """The stage has the block of its Assign of that `number` in memory, and holds nothing of an
    earlier ring; of an Assign for NO_RING: it is prepared."""

    seconds: Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
    number: int = 0


class Connected(Message, tag=28, frozen=True):
    """The connection that the Connect of that `number` asked for stands."""

    number: int


ALL_REQUESTS, THIS_RING = -1, -2
"""Request numbers of a Fault."""


class Fault(Message, tag=23, frozen=True):
    """A stage cannot go on with a request. With ALL_REQUESTS it cannot go on in its place, with
    THIS_RING it can in another ring: segments of this one were lost or are wrong; `number` is then
    that of its Assign. `invalid`: what the request asks for cannot be done."""

    request: int
    reason: Text
    number: int = 0
    invalid: bool = False


class Credit(Message, tag=25, frozen=True):
    """The first stage has handed on the segment of that `seq`: it is free for the next one."""

    seq: int


class Heartbeat(Message, tag=24, frozen=True):
    """Still alive; both ways. One with a `number` above 0 is sent back at once, so that the
    coordinator learns how long a message takes to a stage and back. `silence`: seconds without a
    message for which its sender, a coordinator, is not to be given up; 0: as usual. A stage says
    how many segments it `holds`, and the number of the one that it `passed` on last in this ring;
    -1: none. `rests`: a coordinator's ring has nothing to do, and is seldom heard."""

    number: int = 0
    silence: Finite = 0.0
    holds: int = 0
    passed: int = -1
    rests: bool = False


# --- holders of a token, and devices that leave → coordinator -------------------------------------


class Enrol(Message, tag=30, frozen=True):
    """Sent over a connection that showed a token: admit `key` to the cluster as `name`."""

    key: Text
    name: Text


class Enrolled(Message, tag=31, frozen=True):
    """Answer to Enrol: the key is admitted. `name`: what the cluster calls its holder."""

    name: Text


class Leave(Message, tag=32, frozen=True):
    """A device asks that its own key be forgotten; answered by Goodbye."""


class Removed(Message, tag=33, frozen=True):
    """Answer to a key that is no longer admitted; the reason is fit for a user."""

    reason: Text
