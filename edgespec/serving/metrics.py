"""Metrics: the figures for Prometheus: requests of this process, and the state of the ring."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from edgespec.serving.problems import ApiProblem
from edgespec.wire.client_messages import Finished, NodeStatus, Status

disable_created_metrics()  # they would double the number of series

LEFT = "client_left"
"""The outcome of a request whose client left before its end."""

_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_ACCEPTED = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
_SPEED = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Counts the requests; `text` adds the state of the ring."""

    def __init__(self) -> None:
        self._registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        self._ring = _Ring()
        own.register(self._ring)

        counter = partial(Counter, namespace="edgespec", registry=own)
        histogram = partial(Histogram, namespace="edgespec", registry=own)
        self._requests = counter("requests", "Requests, by how they ended.", ["outcome"])
        self._generated = counter("generated_tokens", "Tokens of answers.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter("cached_tokens", "Prompt tokens that the stages still held.")
        self._trips = counter("trips", "Trips round the ring.")
        self._sent = counter("rows_sent", "Guesses that went round the ring.")
        self._wasted = counter("rows_wasted", "Of these, guesses that were wrong.")
        self._misses = counter("misses", "Results whose next token was not guessed.")
        self._sources = counter(
            "source_accepted", "Tokens of answers that a draft source had guessed.", ["source"]
        )
        self._alone = counter(
            "source_alone", "Of these, tokens that no other source had guessed.", ["source"]
        )
        self._recoveries = counter("recoveries", "Rings that were lost in mid-answer.")
        said = "Tokens that one result made certain."
        self._accepted = histogram("accepted_tokens", said, buckets=_ACCEPTED)
        said = "Until an answer's first token."
        self._first = histogram("first_token_seconds", said, buckets=_SECONDS)
        self._whole = histogram("answer_seconds", "Until an answer's end.", buckets=_SECONDS)
        self._speed = histogram("tokens_per_second", "Speed of whole answers.", buckets=_SPEED)
        said = "Answers that clients wait for or read now."
        self._answers = Gauge("http_answers", said, namespace="edgespec", registry=own)

    def began(self) -> None:
        """A request was accepted."""
        self._answers.inc()

    def tokens(self, count: int) -> None:
        """`count` tokens of an answer came."""
        self._generated.inc(count)

    def ended(self, end: Finished | ApiProblem | None) -> None:
        """An accepted request has ended; None: its client left."""
        self._answers.dec()
        if isinstance(end, Finished):
            self._requests.labels(end.finish_reason).inc()
            self._finished(end)
        else:
            self.refused(end)

    def refused(self, problem: ApiProblem | None) -> None:
        """A request was refused, or has failed."""
        self._requests.labels(problem.code or str(problem.status) if problem else LEFT).inc()

    def _finished(self, end: Finished) -> None:
        self._prompt.inc(end.prompt_tokens)
        self._cached.inc(end.cached_tokens)
        self._trips.inc(max(end.trips, 0.0))
        self._sent.inc(end.rows_sent)
        self._wasted.inc(max(end.rows_wasted, 0))
        self._misses.inc(end.misses)
        self._recoveries.inc(end.recoveries)
        for source in end.sources:
            self._sources.labels(source.name).inc(max(source.accepted, 0))
            self._alone.labels(source.name).inc(max(source.alone, 0))
        for tokens, times in enumerate(end.accepted_histogram):
            for _ in range(times):
                self._accepted.observe(tokens)
        self._first.observe(end.first_token_seconds)
        self._whole.observe(end.seconds)
        if end.seconds > 0:
            self._speed.observe(end.new_tokens / end.seconds)

    def text(self, status: Status | None) -> bytes:
        """The exposition. `status` None: the coordinator does not answer."""
        self._ring.status = status
        return generate_latest(self._registry)


class _Ring(Collector):
    """The ring's state, by the latest status."""

    def __init__(self) -> None:
        self.status: Status | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.status
        yield gauge("coordinator_up", "Whether the coordinator answers.", status is not None)
        if status is None:
            return
        yield gauge("ring_up", "Whether all stages are ready.", status.ready)
        yield gauge("ring_up_seconds", "Since the ring came up; 0: it is not up.", status.up_for)
        yield gauge("ring_number", "One more for each ring that was lost.", status.ring)
        yield gauge("ring_stages", "Stages that the ring has.", status.stages)
        yield gauge("requests_running", "Requests on the ring now.", status.running)
        yield gauge("requests_waiting", "Requests that wait for the ring.", status.waiting)
        said = (
            "Rows of a stage's cache that running requests may come to hold with their next token."
        )
        yield gauge("cache_rows_live", said, status.rows_live)
        yield gauge("cache_rows_kept", "Rows that are kept of answered requests.", status.rows_kept)
        said = "Rows that each stage's cache has room for; 0: no limit."
        yield gauge("cache_rows_room", said, status.rows_room)
        speeds = [one.tokens_per_second for one in status.live]
        said = "Of all running requests together, behind their first tokens."
        yield gauge("running_tokens_per_second", said, sum(speeds))
        said = "Of the slowest running request; 0: there is none."
        yield gauge("slowest_tokens_per_second", said, min(speeds, default=0.0))
        yield from _of_nodes(status.nodes)


_FIGURES = (
    ("busy_ratio", "Share of the time in which it computed.", "busy"),
    ("temperature_celsius", "Of its hottest part; 0: not known.", "temperature"),
    ("temperature_limit_celsius", "At which it slows down; 0: not known.", "limit"),
    ("memory_bytes", "That it has; 0: not known.", "memory"),
    ("memory_free_bytes", "That are not used; 0: not known.", "free"),
    ("throttled", "Whether it says that it runs slower than it could.", "throttled"),
    ("trip_seconds", "Of a control message there and back.", "trip"),
    ("heard_seconds", "Since its last message.", "heard"),
    ("layers", "Layers of its block.", "layers"),
    ("with_coordinator", "Whether it is on the coordinator's machine.", "with_coordinator"),
)
"""Of a stage: the metric's name, its help text, and the field of NodeStatus."""


def _of_nodes(nodes: tuple[NodeStatus, ...]) -> Iterator[Metric]:
    """One value per stage; spares have the stage 0, and of equal names only the first counts."""
    named = {(str(node.stage), node.name): node for node in reversed(nodes)}
    place, said = ["stage", "device"], "1 for the state that it is in."
    state = GaugeMetricFamily("edgespec_stage_state", said, labels=[*place, "state"])
    said = "How often the stage at this place was lost."
    losses = CounterMetricFamily("edgespec_stage_losses", said, labels=place)
    for labels, node in named.items():
        state.add_metric([*labels, node.state], 1)
        losses.add_metric(labels, node.losses)
    yield state
    yield losses
    for name, said, field in _FIGURES:
        family = GaugeMetricFamily(f"edgespec_stage_{name}", said, labels=place)
        for labels, node in named.items():
            value = node.end - node.first if field == "layers" else getattr(node, field)
            family.add_metric(labels, float(value))
        yield family


def gauge(name: str, said: str, value: float) -> Metric:
    """A metric without labels."""
    return GaugeMetricFamily(f"edgespec_{name}", said, value=float(value))
