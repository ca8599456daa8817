"""Stage metrics: what Prometheus is told by a stage's own daemon, at an address of its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgespec.config import Address
from edgespec.errors import AddressUnavailable
from edgespec.machines.stage import StageMachine
from edgespec.machines.tally import ROW_CLASSES, StageTally
from edgespec.net.sockets import number_of
from edgespec.wire.messages import Assign, Health

log = logging.getLogger("edgespec")


class Seen(Protocol):
    """The stage that is told of. Read by another thread than its own: figures alone."""

    @property
    def machine(self) -> StageMachine | None:
        """None before it had a place for the first time."""

    @property
    def place(self) -> Assign | None:
        """The newest one; None as a spare."""

    @property
    def is_connected(self) -> bool:
        """Whether the ring is up for it."""

    def device(self) -> Health | None:
        """How its device is, as far as that is known."""


class StageMetrics:
    """Serves /metrics of one stage. Use as a context manager."""

    def __init__(self, address: Address, stage: Seen) -> None:
        """Raises AddressUnavailable if nothing can listen there."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Stage(stage))
        try:
            started = start_http_server(address.port, number_of(address.host), registry)
        except OSError as problem:
            raise AddressUnavailable(
                f"the metrics cannot be served at {address} ({problem.strerror or problem}); stop "
                "the program that uses it, or choose another address with --metrics"
            ) from None
        self._server: WSGIServer = started[0]
        port = self._server.server_port
        log.info("metrics at http://%s/metrics", Address(address.host, port))

    def __enter__(self) -> StageMetrics:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Stage(Collector):
    """Reads the stage whenever somebody asks."""

    def __init__(self, stage: Seen) -> None:
        self._stage = stage

    def collect(self) -> Iterator[Metric]:
        place, machine = self._stage.place, self._stage.machine
        number = place.stage if place else 0
        yield _gauge("stage", "Which stage it is; 0: a spare, or none yet.", number)
        layers = place.end - place.first if place else 0
        yield _gauge("stage_layers", "Layers of its block.", layers)
        yield _gauge("ring_up", "Whether it is connected in the ring.", self._stage.is_connected)
        if machine is not None:
            yield _gauge("queued_segments", "Segments that wait for the block.", machine.queued)
            yield _gauge("kv_rows", "Rows in the KV cache, of all requests.", machine.held_rows)
        yield from _counts(machine.tally if machine else StageTally())
        yield from _of_device(self._stage.device())


def _counts(tally: StageTally) -> Iterator[Metric]:
    yield _counter("segments", "Segments that it handed on.", tally.segments)
    yield _counter("emptied_segments", "Of these, with no row left.", tally.emptied)
    yield _counter("rows", "Rows that it computed.", tally.rows)
    yield _counter("rows_wasted", "Of these, guesses that were wrong by then.", tally.wasted)
    yield _counter("faults", "Requests that it had to end.", tally.faults)
    yield _counter("rings", "Rings that it had a place in.", tally.rings)
    blocks = CounterMetricFamily(
        "edgespec_blocks", "Computed blocks, by their rows.", labels=["rows"]
    )
    seconds = CounterMetricFamily(
        "edgespec_block_seconds", "Seconds of these blocks.", labels=["rows"]
    )
    for rows, times in zip(ROW_CLASSES, tally.times, strict=True):
        blocks.add_metric([rows], times.blocks)
        seconds.add_metric([rows], times.seconds)
    yield blocks
    yield seconds


def _of_device(health: Health | None) -> Iterator[Metric]:
    if health is None:
        return
    yield _gauge("temperature_celsius", "Of its hottest part; 0: not known.", health.temperature)
    yield _gauge("memory_bytes", "That the device has; 0: not known.", health.memory)
    yield _gauge("memory_free_bytes", "That are not used; 0: not known.", health.free)
    yield _gauge("throttled", "Whether it runs slower than it could.", health.throttled)


def _gauge(name: str, said: str, value: float) -> Metric:
    return GaugeMetricFamily(f"edgespec_{name}", said, value=float(value))


def _counter(name: str, said: str, value: float) -> Metric:
    return CounterMetricFamily(f"edgespec_{name}", said, value=float(value))
