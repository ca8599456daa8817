"""Block fetch: a block from the cache, a model on this machine, or the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgespec.config import Address, Quantisation
from edgespec.daemon.blocks import BlockKey, BlockLibrary
from edgespec.daemon.ring_model import Say
from edgespec.errors import ModelError, RemoteProtocolError
from edgespec.model.block_folder import CONFIG, BlockFolder, put_file, require_room
from edgespec.model.loader import fingerprint
from edgespec.model.manifest import Manifest, manifest_of
from edgespec.model.source import TensorSource
from edgespec.model.sources import open_source
from edgespec.net.block_transfer import fetch_block
from edgespec.net.keys import Identity
from edgespec.wire.block_messages import HEAD_NUMBER, BlockOffer
from edgespec.wire.messages import Assign

SILENCE_S = 60.0
"""Seconds without a byte after which a transfer is given up."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The block that this stage was assigned, or with `head` the output head.

    `coordinator`: its address, to be used with the keys of `identity`. `say` reports progress.
    `stop()`: whether the block is no longer needed. `left_free`: bytes of the disk that are not for
    a block that has to be transferred.
    """

    assign: Assign
    coordinator: Address
    identity: Identity
    say: Say
    stop: Callable[[], bool]
    head: bool = False
    left_free: int = 0

    @property
    def key(self) -> BlockKey:
        assign = self.assign
        if self.head:
            return BlockKey.of_head(assign.fingerprint, Quantisation.parse(assign.head))
        quantisation = Quantisation.parse(assign.quantisation)
        return BlockKey(assign.fingerprint, assign.first, assign.end, quantisation)

    @property
    def number(self) -> int:
        """What it is called on the block channel."""
        return HEAD_NUMBER if self.head else self.assign.block_number

    def checked(self, done: int, total: int) -> None:
        """Report the progress of verifying a file."""
        self.say(f"checking the block on disk: {done * 100 // max(total, 1)} %")


def obtain(wanted: Wanted, model: str, cache: str) -> TensorSource:
    """The tensors of a block. `model`: the folder or id that the user gave, "" for none.

    Looked for in this order: the cache (folder `cache`, "" for the user's own), the folder that
    the coordinator names, if it is here too and holds the same model, and the coordinator itself.
    Raises ModelError for a model that cannot be used or is another one; ConfigError and
    CapacityError for what the disk refuses; PeerLost if the coordinator stops sending.
    """
    library = BlockLibrary(cache)
    if model:
        return _from_model(wanted, model, library)
    kept = library.find(wanted.key, wanted.checked)
    if kept is not None:
        log.info("the block is in %s", kept.path)
        return _block(wanted, kept)
    named = wanted.assign.model
    if Path(named).exists():
        try:
            return _from_model(wanted, named, library)
        except ModelError as problem:
            log.info("not using %s here: %s", named, problem)
    return _from_coordinator(wanted, library)


def _from_model(wanted: Wanted, model: str, library: BlockLibrary) -> TensorSource:
    """From a model (see `open_source`) or a folder of block files on this machine."""
    key = wanted.key
    made = manifest_of(model)
    if made is not None:
        if key.entry(made) is None:
            raise ModelError(
                f"{model} does not hold {key.what} in {key.quantisation.name} of the model that "
                f"the coordinator runs ({wanted.assign.model}); leave --model out, and the "
                "coordinator sends them"
            )
        return _block(wanted, BlockFolder(Path(model)))
    if fingerprint(model) != key.fingerprint:
        raise ModelError(
            f"the model in {model} is not the one that the coordinator runs "
            f"({wanted.assign.model}); leave --model out, and the coordinator sends the layers"
        )
    source = open_source(model, key.quantisation)
    if key.quantisation.kind in ("none", "file"):
        return source  # nothing is to be worked out, so a copy on disk would save next to nothing

    def progress(done: int, total: int) -> None:
        wanted.say(f"quantising to {key.quantisation.name}: {done} of {total} layers")

    return _block(wanted, library.make(source, key, progress))


def _from_coordinator(wanted: Wanted, library: BlockLibrary) -> TensorSource:
    key = wanted.key

    def place(offer: BlockOffer) -> Path:
        if wanted.left_free:
            require_room(incoming.folder, offer.size + wanted.left_free)
        return incoming.folder / _file_of(offer, key)

    with library.begin(key, 0) as incoming:
        if incoming.found is not None:
            return _block(wanted, incoming.found)
        fetched = fetch_block(
            Address(wanted.coordinator.host, wanted.assign.blocks_port),
            wanted.identity,
            wanted.number,
            place,
            lambda progress: wanted.say(f"receiving the block: {progress.text}"),
            wanted.stop,
            SILENCE_S,
        )
        put_file(fetched.config_text.encode(), incoming.folder / CONFIG)
        manifest = Manifest.from_json(fetched.manifest_text, "the block's manifest")
        return _block(wanted, incoming.finish(manifest, wanted.checked))


def _file_of(offer: BlockOffer, key: BlockKey) -> str:
    """The name of the offered file, which must be of the block that is wanted."""
    try:
        manifest = Manifest.from_json(offer.manifest, "its manifest")
    except (ValueError, ModelError) as problem:
        raise RemoteProtocolError(f"the coordinator offered no usable block: {problem}") from None
    entry = key.entry(manifest)
    if entry is None:
        raise RemoteProtocolError(f"the coordinator offered something else than {key.what}")
    return entry.name


def _block(wanted: Wanted, folder: BlockFolder) -> TensorSource:
    return wanted.key.open(folder, wanted.checked)
