"""Effects of the block receiver."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgespec.errors import EdgespecError
from edgespec.wire.block_messages import BlockOffer, BlockRequest, PieceRequest


@dataclass(frozen=True, slots=True)
class AskSender:
    """Send this to the sender."""

    message: BlockRequest | PieceRequest


@dataclass(frozen=True, slots=True)
class OpenPart:
    """Open the part file of this block and read it: `part_read` …, `part_ended`."""

    offer: BlockOffer


@dataclass(frozen=True, slots=True)
class Write:
    """Write to the part file, whose length is `offset`."""

    offset: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Truncate:
    """Cut the part file down to this length."""

    size: int


@dataclass(frozen=True, slots=True)
class Complete:
    """The part file is whole and verified: it may take its name."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The transfer ends with this error."""

    error: EdgespecError


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """Show the user: bytes `done` of `total`, `rate` in bytes a second, seconds `left`.

    `total` is 0 until the block is offered. `left` is infinite while nothing arrives.
    """

    text: str
    done: int = 0
    total: int = 0
    rate: float = 0.0
    left: float = math.inf


ReceiverEffect = AskSender | OpenPart | Write | Truncate | Complete | GiveUp | TransferProgress
