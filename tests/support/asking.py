"""A request to a ring of nodes, in a thread of its own."""

from __future__ import annotations

import threading

from support.nodes import PATIENCE_S, NodeRing
from support.rings import assert_one_end

from edgespec.errors import EdgespecError
from edgespec.runtime.client import Client
from edgespec.wire.client_messages import Finished, Progress, Submit, Tokens
from edgespec.wire.messages import Message


class Asking:
    """One request in a thread of its own."""

    def __init__(self, ring: NodeRing, ask: Submit) -> None:
        self.ask = ask
        self.got: list[Message] = []
        self.problem: EdgespecError | None = None
        self.client: Client | None = None
        self._ring = ring
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._ring.client() as self.client:
                for message in self.client.ask(self.ask):
                    self.got.append(message)
        except EdgespecError as problem:
            self.problem = problem

    @property
    def tokens(self) -> int:
        """How many have come."""
        return sum(len(m.token_ids) for m in list(self.got) if isinstance(m, Tokens))

    @property
    def notes(self) -> list[str]:
        """What it was told while it waited."""
        return [m.text for m in list(self.got) if isinstance(m, Progress)]

    def end(self) -> None:
        """Wait for it."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the client hangs"

    def right(self) -> Finished:
        """Its answer: that of plain decoding, streamed without a gap."""
        self.end()
        assert self.problem is None, self.problem
        end = assert_one_end(self.got, self.ask.tag)
        assert isinstance(end, Finished)
        self._ring.assert_right(self.ask, end)
        return end
