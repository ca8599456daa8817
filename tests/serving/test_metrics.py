"""Metrics: what is counted of an answer, what is told of the ring, and the example dashboard."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.dashboard import DASHBOARD, asked_metrics
from support.nodes import NodeRing

from edgespec.serving.metrics import Metrics
from edgespec.serving.problems import ApiProblem
from edgespec.wire.client_messages import Finished, LiveRequest, NodeStatus, Status

END = Finished(
    1, "ab", (1, 2), "stop", "p", "d", 2, 7, 12, 3.0, 0.5, 4.5, (1, 2, 0, 3), 20, 9, 2, 0.1, 1, 4
)
NODES = (
    NodeStatus(
        1, 0, 4, "one", state="ready", temperature=55.0, limit=90.0, memory=8, free=3, busy=0.5,
        throttled=True, trip=0.002, losses=2,
    ),
    NodeStatus(2, 4, 9),
    NodeStatus(0, 0, 0, "spare", state="standing by"),
    NodeStatus(0, 0, 0, "spare", state="standing by"),
)  # fmt: skip


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, by name and labels; Prometheus's own parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_an_answer_is_counted_once() -> None:
    metrics = Metrics()
    metrics.began()
    metrics.tokens(12)
    metrics.ended(END)
    told = values(metrics.text(None))
    plain = {name: value for (name, labels), value in told.items() if not labels}
    assert plain["edgespec_generated_tokens_total"] == 12
    assert plain["edgespec_prompt_tokens_total"] == 7
    assert plain["edgespec_cached_tokens_total"] == 4
    assert plain["edgespec_trips_total"] == 4.5
    assert plain["edgespec_rows_sent_total"] == 20
    assert plain["edgespec_rows_wasted_total"] == 9
    assert plain["edgespec_misses_total"] == 2
    assert plain["edgespec_recoveries_total"] == 1
    assert plain["edgespec_accepted_tokens_count"] == 6
    assert plain["edgespec_accepted_tokens_sum"] == 0 * 1 + 1 * 2 + 3 * 3
    assert plain["edgespec_first_token_seconds_sum"] == 0.5
    assert plain["edgespec_tokens_per_second_sum"] == 4.0
    assert plain["edgespec_http_answers"] == 0
    assert told["edgespec_requests_total", (("outcome", "stop"),)] == 1
    assert plain["edgespec_coordinator_up"] == 0


def test_bad_ends_are_counted_by_their_cause() -> None:
    metrics = Metrics()
    for end in (None, ApiProblem(503, "x", code="ring_lost"), ApiProblem(418, "x")):
        metrics.began()
        metrics.ended(end)
    told = values(metrics.text(None))
    for outcome in ("client_left", "ring_lost", "418"):
        assert told["edgespec_requests_total", (("outcome", outcome),)] == 1


def test_every_stage_is_told_with_its_figures() -> None:
    status = Status(False, (), NODES, 2, 5, 0.0, 1, 3, "m", 100)
    told = values(Metrics().text(status))
    assert told["edgespec_ring_up", ()] == 0
    assert told["edgespec_ring_number", ()] == 5
    assert (told["edgespec_requests_running", ()], told["edgespec_requests_waiting", ()]) == (1, 3)
    one = (("device", "one"), ("stage", "1"))
    assert told["edgespec_stage_temperature_celsius", one] == 55.0
    assert told["edgespec_stage_memory_free_bytes", one] == 3
    assert told["edgespec_stage_busy_ratio", one] == 0.5
    assert told["edgespec_stage_throttled", one] == 1
    assert told["edgespec_stage_trip_seconds", one] == 0.002
    assert told["edgespec_stage_losses_total", one] == 2
    assert told["edgespec_stage_layers", one] == 4
    assert told["edgespec_stage_state", (*one, ("state", "ready"))] == 1
    missing = (("device", ""), ("stage", "2"), ("state", "missing"))
    assert told["edgespec_stage_state", missing] == 1


def test_running_requests_are_told_by_their_speeds() -> None:
    live = (LiveRequest(1, "adaptive", 5, 20, 4.5), LiveRequest(2, "adaptive", 5, 9, 2.0))
    told = values(Metrics().text(Status(True, (), NODES, 2, 5, 1.0, 2, 0, "m", 100, live)))
    assert told["edgespec_running_tokens_per_second", ()] == 6.5
    assert told["edgespec_slowest_tokens_per_second", ()] == 2.0
    idle = values(Metrics().text(Status(True, (), NODES, 2, 5, 1.0, 0, 0, "m", 100)))
    assert idle["edgespec_running_tokens_per_second", ()] == 0.0
    assert idle["edgespec_slowest_tokens_per_second", ()] == 0.0


def test_names_of_devices_cannot_break_the_text() -> None:
    odd = 'a"b\\c\nd'
    told = values(Metrics().text(Status(True, (), (NodeStatus(1, 0, 1, odd),))))
    assert ("edgespec_stage_layers", (("device", odd), ("stage", "1"))) in told


@pytest.fixture
def scraped(http: httpx.Client, toy_ring: NodeRing) -> str:
    """What Prometheus gets, after an answer."""
    http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4}).raise_for_status()
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    return reply.text


def test_the_ring_is_scraped(scraped: str) -> None:
    told = values(scraped.encode())
    assert told["edgespec_ring_up", ()] == 1
    assert told["edgespec_generated_tokens_total", ()] >= 4
    assert told["process_resident_memory_bytes", ()] > 1 << 20


def test_a_refused_request_is_counted_by_its_code(http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "hello", "best_of": 3})
    told = values(http.get("/metrics").content)
    assert told["edgespec_requests_total", (("outcome", "unsupported_parameter"),)] == 1


def test_the_dashboard_uses_metrics_that_exist(scraped: str) -> None:
    asked = asked_metrics(by_stages=False)
    assert len(asked) >= 10
    there = {name for name, _ in values(scraped.encode())}
    # Of those with labels there is no sample before the first answer.
    families = text_string_to_metric_families(scraped)
    there |= {f"{family.name}_total" for family in families if family.type == "counter"}
    for query, names in asked.items():
        assert names, query
        assert names <= there, (query, names - there)


def test_the_docs_name_every_metric(scraped: str) -> None:
    docs = (DASHBOARD.parent / "metrics.md").read_text(encoding="utf-8")
    families = {f.name for f in text_string_to_metric_families(scraped)}
    for name in families:
        if name.startswith("edgespec_"):
            assert name in docs, f"{name} is missing in docs/metrics.md"
