"""Stage metrics: the figures for Prometheus of a stage's own daemon, at an address of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec.config import Address
from edgespec.decoding.stage_stats import ROW_CLASSES, StageStats
from edgespec.errors import AddressUnavailable
from edgespec.net.discovery_interfaces import reached_at
from edgespec.runtime.stage_node import StageNode
from edgespec.serving.guard import Door, Guard
from edgespec.serving.limits import HttpLimits
from edgespec.serving.metrics import gauge
from edgespec.serving.protocol import CalmServer, opened, settings_of
from edgespec.wire.messages import Health

log = logging.getLogger(__name__)


LIMITS = HttpLimits(header=8 << 10, header_seconds=5.0, idle_seconds=5, connections=8)
"""There are few clients, and each connection takes a descriptor of the stage's process."""

BACKLOG = 8
"""Connections that wait in the system to be accepted."""

END_S = 5.0


class StageMetrics:
    """Serves /metrics of one stage, in a thread of its own. Use as a context manager."""

    def __init__(
        self, address: Address, stage: StageNode, accepts: Callable[[str], bool] | None = None
    ) -> None:
        """`accepts`: see Guard; None: no key is needed. Raises AddressUnavailable if nothing can
        listen there."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        registry.register(_Stage(stage))

        async def metrics(_: Request) -> Response:
            return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

        try:
            self._listener = opened(address, BACKLOG)
        except OSError as problem:
            raise AddressUnavailable(
                f"the metrics cannot be served at {address} ({problem.strerror or problem}); stop "
                "the program that uses it, or choose another address with --metrics"
            ) from None
        port = self._listener.getsockname()[1]
        door = Door() if accepts else Door(frozenset({port}))
        app = Starlette(
            routes=[Route("/metrics", metrics, methods=["GET"])],
            middleware=[Middleware(Guard, accepts or _nobody, LIMITS.header, door)],
        )
        app.router.redirect_slashes = False
        self._server = CalmServer(settings_of(app, LIMITS, BACKLOG))
        self._thread = threading.Thread(target=self._run, name="edgespec-metrics", daemon=True)
        places = reached_at(Address(address.host, port))
        log.info("metrics at %s", " or ".join(f"http://{one}/metrics" for one in places))

    def __enter__(self) -> StageMetrics:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.end()
        self._thread.join(END_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except Exception:  # the stage works without metrics
            log.exception("metrics are no longer served")


def _nobody(key: str) -> bool:
    """No key counts: a proxy has none to pass on."""
    return False


class _Stage(Collector):
    """Reads the stage at each scrape, in another thread than its own."""

    def __init__(self, stage: StageNode) -> None:
        self._stage = stage

    def collect(self) -> Iterator[Metric]:
        place, machine = self._stage.place, self._stage.machine
        number = place.stage if place else 0
        yield gauge("stage", "Which stage it is; 0: a spare, or none yet.", number)
        layers = place.end - place.first if place else 0
        yield gauge("stage_layers", "Layers of its block.", layers)
        yield gauge("ring_up", "Whether it is connected in the ring.", self._stage.is_connected)
        if machine is not None:
            yield gauge("queued_segments", "Segments that wait for the block.", machine.queued)
            yield gauge("kv_rows", "Rows in the KV cache, of all requests.", machine.held_rows)
        yield from _counts(machine.stats if machine else StageStats())
        yield from _of_device(self._stage.device())


def _counts(stats: StageStats) -> Iterator[Metric]:
    yield _counter("segments", "Segments that it handed on.", stats.segments)
    yield _counter("emptied_segments", "Of these, with no row left.", stats.emptied)
    yield _counter("rows", "Rows that it computed.", stats.rows)
    yield _counter("rows_wasted", "Of these, guesses that were wrong by then.", stats.wasted)
    yield _counter("faults", "Requests that it had to end.", stats.faults)
    yield _counter("rings", "Rings that it had a place in.", stats.rings)
    said = "Computed blocks, by their rows."
    blocks = CounterMetricFamily("edgespec_blocks", said, labels=["rows"])
    said = "Seconds of these blocks."
    seconds = CounterMetricFamily("edgespec_block_seconds", said, labels=["rows"])
    for rows, times in zip(ROW_CLASSES, stats.times, strict=True):
        blocks.add_metric([rows], times.blocks)
        seconds.add_metric([rows], times.seconds)
    yield blocks
    yield seconds


def _of_device(health: Health | None) -> Iterator[Metric]:
    if health is None:
        return
    yield gauge("temperature_celsius", "Of its hottest part; 0: not known.", health.temperature)
    yield gauge("memory_bytes", "That the device has; 0: not known.", health.memory)
    yield gauge("memory_free_bytes", "That are not used; 0: not known.", health.free)
    yield gauge("throttled", "Whether it runs slower than it could.", health.throttled)


def _counter(name: str, said: str, value: float) -> Metric:
    return CounterMetricFamily(f"edgespec_{name}", said, value=float(value))
