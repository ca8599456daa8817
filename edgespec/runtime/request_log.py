"""Request log: every request of a coordinator, and its end, as JSON lines in a file.

`edgespec replay` plays them again. The file holds prompts and answers: only its owner
may read it.
"""

from __future__ import annotations

import json
import os
import time

from edgespec.errors import ConfigError
from edgespec.types.record import as_dict
from edgespec.wire.client_messages import Failed, Finished, Submit

FORMAT = 1
KIND = "request"
"""The `what` of each line."""

LEFT = "client_left"
"""The outcome of a request whose client left."""

MOST_OPEN = 4096
"""Open requests that are remembered: more than a coordinator takes at once."""


class RequestLog:
    """Writes a line for each request when it ends, with the time of its arrival."""

    def __init__(self, path: str) -> None:
        """Begin an empty file. Raises ConfigError if it cannot be written."""
        try:
            descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            os.fchmod(descriptor, 0o600)
        except OSError as problem:
            raise ConfigError(f"cannot write the requests to {path}: {problem.strerror}") from None
        self._file = open(descriptor, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._began = time.monotonic()
        self._open: dict[tuple[bytes, int], tuple[float, Submit]] = {}

    def asked(self, peer: bytes, submit: Submit) -> None:
        if len(self._open) < MOST_OPEN:
            self._open[peer, submit.tag] = time.monotonic() - self._began, submit

    def answered(self, peer: bytes, end: Finished | Failed) -> None:
        if isinstance(end, Finished):
            figures = as_dict(end)
            del figures["tag"], figures["policy"]
            self._write(peer, end.tag, end.finish_reason, policy=end.policy, **figures)
        else:
            self._write(peer, end.tag, "failed", reason=end.reason, kind=end.kind)

    def left(self, peer: bytes) -> None:
        """The client is gone: its requests end without an answer."""
        for other, tag in list(self._open):
            if other == peer:
                self._write(peer, tag, LEFT)

    def close(self) -> None:
        self._open.clear()
        self._file.close()

    def _write(self, peer: bytes, tag: int, outcome: str, **more: object) -> None:
        known = self._open.pop((peer, tag), None)
        if known is None:
            return
        after, submit = known
        request = as_dict(submit)
        del request["tag"]
        line = {"what": KIND, "format": FORMAT, "after": round(after, 6), "outcome": outcome}
        self._file.write(json.dumps({**line, "request": request, "end": more}) + "\n")
