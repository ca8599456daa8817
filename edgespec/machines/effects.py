"""Effects: what a machine wants done; compute is one too, its result comes back as an event."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import reduce

from edgespec.machines.events import Hold, PeerGone, RingDown, RingProgress, RingUp
from edgespec.tree.ledger import BoolArray, Rows
from edgespec.types.tensor import NO_LAYERS, Layers, Tensor
from edgespec.wire.messages import Message


class Effect:
    """Base of all effects: each room has its own."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SendStages(Effect):
    """Send a control message to every stage."""

    message: Message


@dataclass(frozen=True, slots=True)
class SendCoordinator(Effect):
    """Send a control message to the coordinator (from a stage)."""

    message: Message


@dataclass(frozen=True, slots=True)
class SendPeer(Effect):
    """Send a control message to one peer (by the address that its messages come from)."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Forward(Effect):
    """Hand an event to the node's other machine."""

    event: RingUp | RingDown | RingProgress | Hold | PeerGone


@dataclass(frozen=True, slots=True)
class BlockPart:
    """The rows of one request that a block computes.

    Each row sees all `committed` slots of the request's cache and, of the S slots after them (the
    last ones are the part's own rows), those where `sees` bool [len(rows), S] is true.
    """

    request: int
    rows: Rows
    committed: int
    sees: BoolArray

    @property
    def slots(self) -> int:
        """Slots of the request's cache that are taken once the part is computed."""
        return self.committed + int(self.sees.shape[1])


@dataclass(frozen=True, slots=True)
class RunBlock(Effect):
    """Run the stage's layers over the rows of all parts; comes back as BlockDone.

    `hidden` [R, H] are the incoming rows, stacked over the parts (None on the first stage, which
    embeds the rows' tokens). `aux_layers`: layers whose incoming rows are wanted too, those of
    other stages among them. `ppd_tokens` [P, H]: what the first stage puts in the place of tokens
    -1, -2, … (see Segment).
    """

    job: int
    parts: tuple[BlockPart, ...]
    hidden: Tensor | None
    aux_layers: Layers = NO_LAYERS
    ppd_tokens: Tensor | None = None

    @property
    def request(self) -> int:
        """The first part's: names the job where one number has to."""
        return self.parts[0].request

    @property
    def rows(self) -> Rows:
        """The rows of all parts."""
        return reduce(Rows.joined, (part.rows for part in self.parts))

    @property
    def slots(self) -> int:
        """Slots of all caches that it works on, once it is done (see BlockPart)."""
        return sum(part.slots for part in self.parts)

    def without(self, requests: Collection[int | None]) -> RunBlock:
        """What is left to compute without the parts of those requests; hidden rows are left out."""
        left = tuple(part for part in self.parts if part.request not in requests)
        return replace(self, parts=left, hidden=None)
