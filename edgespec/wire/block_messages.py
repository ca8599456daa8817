"""Block messages: what goes over the channel on which block files are sent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from edgespec.types.record import Text, Whole
from edgespec.types.tensor import Tensor
from edgespec.wire.messages import Message, Sha256, require

SMALLEST_CHUNK, LARGEST_CHUNK = 64 << 10, 4 << 20
"""Bytes of a chunk of a block file, whose bounds are multiples of CHUNK_STEP."""

CHUNK_STEP = 4096

MOST_CHUNKS = 1 << 17
"""Of a block file: 128 GiB in chunks of 1 MiB, whose hashes take 4 MiB."""

HASH_BYTES = 32
"""Of a SHA-256."""

HEAD_NUMBER = 0
"""What the output matrix is called on the block channel."""

# --- block transfer: receiver → sender ------------------------------------------------------------


class BlockRequest(Message, tag=60, frozen=True):
    """Asks for a block file; answered by BlockPreparing, BlockOffer, BlockRefused.

    `number`: as the Assign of the stage has it, counted from 1; or HEAD_NUMBER.
    """

    number: int


class PieceRequest(Message, tag=61, frozen=True):
    """Asks for `length` bytes of the file with this hash (hex), from `offset` on.

    `have`: how many bytes of the file, from its start, the receiver holds by now, so that the
    sender knows what has arrived. With `length` 0 it says only that.
    """

    sha256: Sha256
    offset: Whole
    length: Annotated[int, Meta(ge=0, le=LARGEST_CHUNK)]
    have: Whole


# --- block transfer: sender → receiver ------------------------------------------------------------


class BlockPreparing(Message, tag=62, frozen=True):
    """The block is not ready yet; the text says how far it is, fit for a user."""

    text: Text


class BlockOffer(Message, tag=63, frozen=True):
    """The block file is ready to be fetched.

    `manifest` and `config`: the texts of manifest.json and config.json of its folder. `size` in
    bytes and `sha256` (hex) are of the whole file. It is hashed in chunks of `chunk_bytes` (the
    last may be shorter) too: `chunk_hashes` uint8 [chunks, 32] are their SHA-256.
    """

    manifest: Text
    config: Text
    size: Annotated[int, Meta(gt=0)]
    sha256: Sha256
    chunk_bytes: Annotated[int, Meta(ge=SMALLEST_CHUNK, le=LARGEST_CHUNK, multiple_of=CHUNK_STEP)]
    chunk_hashes: Tensor

    def check(self) -> None:
        chunks, hashes = -(-self.size // self.chunk_bytes), self.chunk_hashes
        require(chunks <= MOST_CHUNKS, "the block file is too large")
        fits = hashes.dtype == "uint8" and hashes.shape == (chunks, HASH_BYTES)
        require(fits, "the hashes are not those of a file of that size")


class BlockRefused(Message, tag=64, frozen=True):
    """There is no such block to be had; the reason is fit for a user."""

    reason: Text


class Piece(Message, tag=65, frozen=True):
    """Bytes of the file with this hash (hex), from `offset` on: `data` uint8 [length]."""

    sha256: Sha256
    offset: Whole
    data: Tensor

    def check(self) -> None:
        require(self.data.dtype == "uint8" and len(self.data.shape) == 1, "the data is no bytes")
        require(0 < len(self.data.data) <= LARGEST_CHUNK, "the data's length is bad")
