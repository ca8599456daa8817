"""What a slow start lengthens: the time for a handshake, on every door."""

from __future__ import annotations

import time

import pytest
import zmq

from edgespec.net import access, slowness
from edgespec.net.keys import KeyPair


@pytest.mark.parametrize(("took", "slow"), [(0.5, 1.0), (7.0, 3.5), (900.0, 10.0)])
def test_doors_are_as_patient_as_the_start_was_slow(
    took: float, slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slowness, "_slowness", 1.0)
    monkeypatch.setattr(slowness, "MOST", 10.0)
    monkeypatch.setattr(slowness, "_age", lambda: took)
    assert slowness.started() == pytest.approx(slow, rel=0.1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as door:
        gate = access.Gate(context)
        try:
            gate.guard(door, "a door", KeyPair.new(), lambda key: "")
            assert door.getsockopt(zmq.HANDSHAKE_IVL) == pytest.approx(3_000 * slow, rel=0.1)
        finally:
            gate.close()


def test_a_clock_that_is_set_meanwhile_makes_no_start_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slowness, "_slowness", 1.0)
    monkeypatch.setattr(slowness, "MOST", 1e9)
    real, before = time.time, slowness.started()
    monkeypatch.setattr(time, "time", lambda: real() + 86400.0)
    assert before <= slowness.started() < before + 1000.0, "a day is 43,200 usual starts"
