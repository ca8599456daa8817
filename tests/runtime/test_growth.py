"""What nodes hold does not grow with the requests that they have answered."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace
from support.alive import alive
from support.memory_rings import CLIENT_PEER, MemoryRing
from support.rings import submit

from edgespec.policy.registry import POLICIES
from edgespec.runtime.stage_node import StageNode
from edgespec.wire.client_messages import Finished

BATCH = 8


def test_answers_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any policy. What is learnt of times has bounds of its own."""
    ring = MemoryRing(monkeypatch, 2)
    assert ring.until(lambda: ring.membership.status().ready, 100)
    loads = [one._stage_load for one in ring.nodes if isinstance(one, StageNode)]
    learnt = [ring.machine.learnt, *loads]
    policies, found = sorted(POLICIES), []
    for first in range(0, 6 * BATCH, BATCH):
        tags = range(first, first + BATCH)
        for tag in tags:
            ask = submit(tag, f"question {tag}", 8, policies[tag % len(policies)], tag)
            ring.ask(replace(ask, temperature=tag % 4 / 2))
        assert ring.until(lambda tags=tags: all(map(ring.ends, tags)), 900)  # type: ignore[misc]
        assert all(isinstance(ring.ends(tag)[0], Finished) for tag in tags)
        ring.at_peer[CLIENT_PEER].clear()
        assert ring.until(lambda: ring.machine.idle, 100)
        found.append(alive(ring, without=learnt))
    ring.close()
    assert found[-1] - found[2] == Counter()
