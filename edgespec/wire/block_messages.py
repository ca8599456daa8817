"""Block messages: what goes over the channel on which block files are sent."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.types.tensor import Tensor

# --- block transfer: receiver → sender ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockRequest:
    """Asks for a block file; answered by BlockPreparing, BlockOffer, BlockRefused.

    `number`: as the Assign of the stage has it, counted from 1.
    """

    number: int


@dataclass(frozen=True, slots=True)
class PieceRequest:
    """Asks for `length` bytes of the file with this hash (hex), from `offset` on.

    `have`: how many bytes of the file, from its start, the receiver holds by now, so that the
    sender knows what has arrived. With `length` 0 it says only that.
    """

    sha256: str
    offset: int
    length: int
    have: int


# --- block transfer: sender → receiver ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlockPreparing:
    """The block is not ready yet; the text says how far it is, fit for a user."""

    text: str


@dataclass(frozen=True, slots=True)
class BlockOffer:
    """The block file is ready to be fetched.

    `manifest` and `config`: the texts of manifest.json and config.json of its folder. `size` in
    bytes and `sha256` (hex) are of the whole file. It is hashed in chunks of `chunk_bytes` (the
    last may be shorter) too: `chunk_hashes` uint8 [chunks, 32] are their SHA-256.
    """

    manifest: str
    config: str
    size: int
    sha256: str
    chunk_bytes: int
    chunk_hashes: Tensor


@dataclass(frozen=True, slots=True)
class BlockRefused:
    """There is no such block to be had; the reason is fit for a user."""

    reason: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of the file with this hash (hex), from `offset` on: `data` uint8 [length]."""

    sha256: str
    offset: int
    data: Tensor
