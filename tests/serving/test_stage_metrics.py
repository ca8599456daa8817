"""Stage metrics: a stage's own daemon tells Prometheus what it has done."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.dashboard import asked_metrics
from support.nodes import HOST, PATIENCE_S, NodeRing, until
from support.rings import submit
from support.tiers import tiered

from edgespec.config import Address
from edgespec.decoding.stage_stats import ROW_CLASSES
from edgespec.errors import AddressUnavailable
from edgespec.serving import stage_metrics
from edgespec.serving.stage_metrics import LIMITS, StageMetrics
from edgespec.wire.client_messages import Finished


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def descriptors() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))


def answers(port: int) -> bool:
    """Whether who asks now is told."""
    try:
        return httpx.get(f"http://{HOST}:{port}/metrics", timeout=PATIENCE_S).status_code == 200
    except httpx.HTTPError:
        return False


def told(port: int) -> dict[str, float]:
    """Every sample; of those with rows, under NAME/ROWS."""
    text = httpx.get(f"http://{HOST}:{port}/metrics", timeout=120).text
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


@pytest.mark.parametrize("crowd", tiered([40, 150], [40]))
def test_half_sent_heads_take_nothing_from_a_stage(
    crowd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once held a thread and a descriptor of the stage for ever, until there were none."""
    quick = replace(LIMITS, header_seconds=1.0, crowded_seconds=0.2, drain_seconds=0.5)
    monkeypatch.setattr(stage_metrics, "LIMITS", quick)
    with NodeRing(2) as ring, StageMetrics(Address(HOST, 0), ring.threads[2].node) as served:
        ring.await_up()
        address = served._listener.getsockname()
        told(address[1])
        before = descriptors(), threading.active_count()
        with ExitStack() as stack:
            # Their own ends are descriptors of this process, too.
            for _ in range(crowd):
                held = stack.enter_context(socket.create_connection(address, PATIENCE_S))
                held.sendall(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
            until(lambda: descriptors() - crowd - before[0] <= 3 * LIMITS.connections)
            assert threading.active_count() <= before[1] + 1
            until(lambda: answers(address[1]))  # one of them makes room, or its time is over
            assert ring.ask(submit(max_new_tokens=8)).new_tokens == 8
        until(lambda: descriptors() <= before[0] + 2)
        assert ring.membership.status().ring == 1


def test_others_than_this_machine_need_a_key() -> None:
    with (
        NodeRing(1) as ring,
        StageMetrics(Address(HOST, 0), ring.threads[1].node, "a key".__eq__) as served,
    ):
        url = f"http://{HOST}:{served._listener.getsockname()[1]}/metrics"
        assert httpx.get(url).status_code == 401
        assert httpx.get(url, headers={"authorization": "Bearer b key"}).status_code == 401
        good = httpx.get(url, headers={"authorization": "Bearer a key"})
        assert good.status_code == 200
        assert "edgespec_stage" in good.text
