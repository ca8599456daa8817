"""The stage process: from a StageConfig to a running V1 … VN."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from edgespec.backends.compute import StageCompute
from edgespec.config import Address, Emulation, StageConfig
from edgespec.daemon.health import SensorReader
from edgespec.daemon.notify import Notifier
from edgespec.daemon.process import exit_code, going_on, take_file_descriptors
from edgespec.errors import CapacityError
from edgespec.net.emulated_link import PacedTransport
from edgespec.net.keys import Identity
from edgespec.net.slowness import slowness
from edgespec.net.sockets import number_of, own_address_towards, without_zone
from edgespec.ring.member import MemberMachine
from edgespec.runtime.instrumentation import Instrumentation, NodePace
from edgespec.runtime.stage_node import StageNode
from edgespec.runtime.trace import Trace
from edgespec.wire.messages import Assign, Join

if TYPE_CHECKING:
    from edgespec.model.source import TensorSource

LEFT_FREE = 2 << 30
"""Bytes of the disk that a block does not take which is fetched in case it is needed."""

log = logging.getLogger(__name__)


SILENT_S = 10.0
"""Seconds of the coordinator's silence after which it is looked for elsewhere, and between two
looks."""

Find = Callable[[Address], Address | None]
"""Where a coordinator answers that has been at this address; None: nowhere. It takes seconds."""


def run_stage(
    config: StageConfig,
    identity: Identity,
    name: str,
    accepts: Callable[[str], bool] | None = None,
    find: Find | None = None,
    trace: Trace | None = None,
) -> int:
    """Join the ring, again whenever it is lost, until a signal; returns the exit code.

    `name`: this device's name in the cluster. `accepts`: whether a key may read its metrics;
    None: no key is needed. `find`: for a coordinator that comes back at another address. `trace`:
    where what it does is written.

    Raises ConfigError for settings or addresses that cannot be used, AccessRefused if the
    coordinator does not, or no longer, know the key.
    """
    place = f"stage {config.stage}" if config.stage else "any stage"
    log.info("%s: starting; importing torch takes seconds on a small board", place)
    take_file_descriptors()
    # Imported before the node's loop runs: half a second inside a shared library's start-up with
    # Python's lock held would look like a dead stage.
    with going_on("importing torch"):
        _import()
        from edgespec.model.tensors import best_device

        device = best_device().type
    pace = None
    if config.emulation is not None:
        pace = partial(_pace, config.emulation)
    with SensorReader(device) as monitor:
        while True:
            node = _node(config, identity, name, pace, trace, monitor, device)
            watch = _Watch(node, config.coordinator, find)
            with _metrics(config.metrics, node, accepts), watch:
                stop = node.run(f"looking for the coordinator at {config.coordinator}")
            if watch.found is None:
                return exit_code(stop)
            log.info(stop.reason)
            config = replace(config, coordinator=watch.found)


def _node(
    config: StageConfig,
    identity: Identity,
    name: str,
    pace: Callable[[Assign | None], NodePace] | None,
    trace: Trace | None,
    monitor: SensorReader,
    device: str,
) -> StageNode:
    """A stage that asks the coordinator for a place."""
    from edgespec.daemon.memory import available_memory

    host = own_address_towards(config.coordinator)
    transport = PacedTransport.stage(config.coordinator, identity, config.listen or host)
    join = Join(
        config.stage,
        name,
        os.getpid(),
        without_zone(host),  # it means nothing to another machine
        transport.data_port,
        identity.own.public,
        max(0, available_memory(device).bytes - config.reserved),
    )
    member = MemberMachine(join, str(config.coordinator), config.wait, config.timing)
    instrumentation = Instrumentation(transport, pace, trace)
    log.info("asking the coordinator at %s for a place", config.coordinator)
    node = StageNode(
        transport,
        member,
        config.coordinator,
        partial(_load, config, identity),
        instrumentation,
        monitor.latest,
        partial(_prepare, config, identity),
    )
    node.supervisor = Notifier(slow=slowness())
    return node


class _Watch:
    """Looks for a silent coordinator elsewhere, in a thread of its own, and ends the node once it
    is `found` there. Use as a context manager."""

    def __init__(self, node: StageNode, coordinator: Address, find: Find | None) -> None:
        self._node, self._coordinator, self._find = node, coordinator, find
        self._number = number_of(coordinator.host)  # that of a name may change
        self._over = threading.Event()
        self.found: Address | None = None

    def __enter__(self) -> _Watch:
        if self._find is not None:
            threading.Thread(target=self._look, name="edgespec-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _look(self) -> None:
        assert self._find is not None, "it would not have been started"
        while not self._over.wait(SILENT_S):
            if time.monotonic() - self._node.heard_at < SILENT_S:
                continue
            at = self._find(self._coordinator)
            if at is None or (number_of(at.host), at.port) == (
                self._number,
                self._coordinator.port,
            ):
                continue  # it is where it was, and loads its models
            if not self._over.is_set():
                self.found = at
                self._node.end(f"the coordinator is at {at} now", failed=False)
            return


@cache
def import_meanwhile() -> None:
    """Begin with the imports, once, in a thread: a board is often up before its coordinator. An end
    does not wait for them."""
    threading.Thread(target=_import, name="edgespec-import", daemon=True).start()


def _import() -> None:
    import edgespec.backends.torch_backend
    import edgespec.daemon.block_fetch  # noqa: F401


def _metrics(
    address: Address | None, node: StageNode, accepts: Callable[[str], bool] | None
) -> AbstractContextManager[object]:
    if address is None:
        return nullcontext()
    from edgespec.serving.stage_metrics import StageMetrics  # only with --metrics

    return StageMetrics(address, node, accepts)


def _pace(emulation: Emulation, place: Assign | None) -> NodePace:
    from edgespec.daemon.emulation import emulated_costs, stage_pace

    assert place is not None, "a stage has a place before it has a pace"
    return stage_pace(emulated_costs(emulation, place.stages, bool(place.head)), place.stage)


def _prepare(
    config: StageConfig,
    identity: Identity,
    assign: Assign,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> None:
    """All that a stage needs but memory: its kernels, and its block on the disk."""
    _compile_kernels(say)
    _fetch(config, identity, assign, say, stop, LEFT_FREE)


def _compile_kernels(say: Callable[[str], None]) -> None:
    """Those that this device's processor needs, unless they were compiled before."""
    from edgespec.kernels.compiled import load, unbuilt
    from edgespec.model.tensors import best_device

    if best_device().type == "cpu":
        for name in unbuilt():
            say("compiling the kernels for this CPU (once)")
            load(name)


def _fetch(
    config: StageConfig,
    identity: Identity,
    assign: Assign,
    say: Callable[[str], None],
    stop: Callable[[], bool],
    left_free: int = 0,
) -> tuple[TensorSource, TensorSource | None]:
    """The tensors of the block, and of the output head if the stage has it."""
    from edgespec.daemon.block_fetch import Wanted, obtain

    wanted = Wanted(assign, config.coordinator, identity, say, stop, left_free=left_free)
    block = obtain(wanted, config.model, config.cache)
    if not assign.head:
        return block, None
    return block, obtain(replace(wanted, head=True), config.model, config.cache)


def _load(
    config: StageConfig,
    identity: Identity,
    assign: Assign,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> StageCompute:
    from edgespec.backends.torch_backend import TorchBlock, TorchHead
    from edgespec.daemon.memory import give_back
    from edgespec.model.block import Block
    from edgespec.model.ends import OutputHead
    from edgespec.model.tensors import best_device

    _compile_kernels(say)
    source, ends = _fetch(config, identity, assign, say, stop)
    layers, device = (assign.first, assign.end), best_device()

    def progress(done: int, total: int) -> None:
        say(f"loading {done} of {total} layers")
        give_back(source, device)

    block = Block(
        *(source, *layers, assign.dtype, device, progress),
        cache_dtype=assign.cache_dtype,
        admit=partial(_require_memory, assign, ends, config.reserved),
    )
    head = None
    if ends is not None:
        head = TorchHead(OutputHead(ends, assign.dtype, device, share=block))
        give_back(ends, device)
    return StageCompute(TorchBlock(block), head, keeps_tokens=block.token_rows is not None)


def _require_memory(assign: Assign, ends: TensorSource | None, reserved: int, needed: int) -> None:
    """Raise CapacityError, with numbers, for a block of so many bytes (`needed`) that this device
    has no memory for.

    `reserved`: bytes that are not for it. Otherwise the system would kill a process, or swap, once
    the block is read.
    """
    from edgespec.daemon.memory import available_memory, bound_gpu
    from edgespec.model.inventory import head_bytes
    from edgespec.model.tensors import best_device, compute_dtype

    device = best_device()
    what = ""
    # Of a model that is one block, the embedding may be the output matrix too.
    if ends is not None and not (assign.first == 0 and ends.config.tie_word_embeddings):
        needed += head_bytes(ends, compute_dtype(assign.dtype))
        what = " and the output head"
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # what an earlier block had
    has = available_memory(device.type)
    if needed > has.bytes - reserved:
        less = f", of which the coordinator takes {reserved / 2**30:.2f}" if reserved else ""
        raise CapacityError(
            f"stage {assign.stage} needs {needed / 2**30:.2f} GiB for layers {assign.first} to "
            f"{assign.end - 1}{what}, this device has {has.bytes / 2**30:.2f} GiB ({has.source})"
            f"{less}; "
            "start the coordinator with fewer layers for it (--layers), more stages, or --quant "
            "int4"
        )
    if device.type == "cuda":
        bound_gpu(has.bytes - reserved)
