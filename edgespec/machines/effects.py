"""Effects: what a machine wants done; compute is one too, its result comes back as an event."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.machines.events import Hold, PeerGone, RingDown, RingUp
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

    event: RingUp | RingDown | Hold | PeerGone


@dataclass(frozen=True, slots=True)
class RunBlock(Effect):
    """Run the stage's layers over `rows`; comes back as BlockDone.

    `hidden` [R, H] are the incoming rows (None on the first stage, which embeds `rows.tokens`).
    Each row sees all `committed` slots and, of the S slots behind them (the job's own rows are
    the last R), those where `sees` bool [R, S] is true. `aux_layers`: layers whose incoming rows
    are wanted too, those of other stages among them. `prompts` [P, H]: what the first stage puts in
    the place of tokens -1, -2, … (see Segment).
    """

    job: int
    request: int
    rows: Rows
    hidden: Tensor | None
    committed: int
    sees: BoolArray
    aux_layers: Layers = NO_LAYERS
    prompts: Tensor | None = None
