"""Stage metrics: a stage's own daemon tells Prometheus what it has done."""

from __future__ import annotations

import socket

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.dashboard import asked_metrics
from support.nodes import HOST, NodeRing
from support.rings import submit

from edgespec.config import Address
from edgespec.errors import AddressUnavailable
from edgespec.machines.tally import ROW_CLASSES
from edgespec.serving.stage_metrics import StageMetrics
from edgespec.wire.client_messages import Finished


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def told(port: int) -> dict[str, float]:
    """Every sample; of those with rows, under NAME/ROWS."""
    text = httpx.get(f"http://{HOST}:{port}/metrics", timeout=10).text
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_stage_tells_what_it_has_done() -> None:
    port = free_port()
    with NodeRing(2) as ring, ring.client() as client:
        ring.await_up()
        with StageMetrics(Address(HOST, port), ring.threads[2].node):
            before = told(port)
            *_, end = client.ask(submit(max_new_tokens=40, policy="flowspec"))
            ring.assert_free()
            after = told(port)
        with pytest.raises(httpx.ConnectError):
            told(port)
    assert isinstance(end, Finished)
    assert before["edgespec_rows_total"] == before["edgespec_segments_total"] == 0
    assert (after["edgespec_stage"], after["edgespec_ring_up"]) == (2, 1)
    assert after["edgespec_stage_layers"] > 0
    names = {sample.partition("/")[0] for sample in after}
    for query, asked in asked_metrics(by_stages=True).items():
        assert asked, query
        assert asked <= names, (query, asked - names)
    # The prompt's rows and the root are no guesses; what was pruned on the way never came here.
    assert 40 <= after["edgespec_rows_total"] <= end.prompt_tokens + end.rows_sent + end.misses + 1
    assert 0 < after["edgespec_rows_wasted_total"] <= end.rows_wasted
    assert after["edgespec_faults_total"] == 0
    assert after["edgespec_rings_total"] == 1
    blocks = sum(after[f"edgespec_blocks_total/{rows}"] for rows in ROW_CLASSES)
    segments, emptied = (after[f"edgespec_{n}segments_total"] for n in ("", "emptied_"))
    assert segments - emptied <= blocks <= segments  # some lose all rows while they are computed
    assert sum(after[f"edgespec_block_seconds_total/{rows}"] for rows in ROW_CLASSES) > 0


def test_a_taken_address_says_what_to_do() -> None:
    with socket.socket() as taken, NodeRing(1) as ring:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnavailable, match=rf"{HOST}:{port} .*--metrics"):
            StageMetrics(Address(HOST, port), ring.threads[1].node)
