"""Segments that are lost, repeated or wrong end their ring, and every request goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType

import pytest
from msgspec import structs
from support.asking import Asking
from support.nodes import NodeRing
from support.rings import submit
from support.tiers import tiered

from edgespec.decoding import flights
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.runtime import node
from edgespec.wire.segment import Segment

STAGES = 3
Send = Callable[[Segment], None]


def _renamed(segment: Segment, by: int) -> Segment:
    parts = tuple(structs.replace(part, request=part.request + by) for part in segment.parts)
    return structs.replace(segment, parts=parts)


def _numbered(segment: Segment, by: int) -> Segment:
    seq = max(segment.header.seq + by, 0)
    return structs.replace(segment, header=structs.replace(segment.header, seq=seq))


def _rubbish(sockets: ZmqTransport, send: Send, segment: Segment) -> None:
    if sockets.push is None:
        send(segment)  # which waits for the connection
    else:
        sockets.push.send(b"no segment")


LIES: dict[str, tuple[Callable[[ZmqTransport, Send, Segment], None], str]] = {
    "malformed": (lambda sockets, send, s: _rubbish(sockets, send, s), "cannot be read"),
    "lost": (lambda sockets, send, s: None, ""),
    "repeated": (lambda sockets, send, s: [send(s), send(s)], "-"),  # type: ignore[dict-item]
    "of another request": (lambda sockets, send, s: send(_renamed(s, 7)), "of no segment"),
    "of another number": (lambda sockets, send, s: send(_numbered(s, 1000)), "of no segment"),
    "of an old number": (lambda sockets, send, s: send(_numbered(s, -1)), ""),
}
"""What the last stage does, and what the log says of it ("-": nothing, as it does no harm)."""


@pytest.mark.parametrize("lie", tiered(LIES, ["malformed", "lost", "of another request"]))
def test_after_bad_segments_all_requests_answer(
    lie: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node, "RENEW_S", 0.1)
    monkeypatch.setattr(flights, "LEAST_S", 0.5)
    caplog.set_level(logging.INFO)
    tell, said = LIES[lie]
    with NodeRing(STAGES, live=6) as ring:
        ring.await_up()
        sockets = ring.threads[STAGES].node.transport
        honest, left = sockets.send_ring, 4

        def send_ring(self: ZmqTransport, segment: Segment) -> None:
            nonlocal left
            if left and not segment.parts[0].committed:
                left -= 1
                tell(self, honest, segment)
            else:
                honest(segment)

        monkeypatch.setattr(sockets, "send_ring", MethodType(send_ring, sockets))
        for users in (3, 1, 6):
            asked = [submit(tag, max_new_tokens=20, policy="flowspec") for tag in range(users)]
            for one in [Asking(ring, ask) for ask in asked]:
                one.right()
        assert left == 0
        ring.assert_free()
    renewals = [text for text in caplog.messages if text.startswith("the coordinator cannot go on")]
    assert all("stage 3" in text for text in renewals), renewals
    assert any(said in text for text in renewals) == (said != "-"), renewals
