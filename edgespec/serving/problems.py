"""Problems: errors in the shape of who asks, and how our own errors become such."""

from __future__ import annotations

import json
from typing import Any

from msgspec import to_builtins
from starlette.responses import Response

from edgespec.errors import (
    AccessRefused,
    AddressUnavailable,
    EdgespecError,
    OtherVersion,
    PeerLost,
    RequestFailed,
)
from edgespec.serving.limits import RETRY_S
from edgespec.serving.reply_bodies import ErrorDetail

NO_EMBEDDINGS = (
    "the model of a ring writes text and makes no embeddings; run a small embedding model beside "
    "it (`llama-server --embedding`, `ollama pull nomic-embed-text`, or the package "
    "sentence-transformers), on any one device"
)

_OF_KIND = {
    "invalid": (400, "invalid_request"),
    "context": (400, "context_length_exceeded"),
    "queue": (429, "queue_full"),
    "lost": (503, "ring_lost"),
    "slow": (408, "slow_reader"),
    "": (500, "request_failed"),
}
"""Status and code for a message Failed of the coordinator, by its kind."""


MESSAGES, OLLAMA = "/v1/messages", "/api/"
"""Where the paths of Anthropic's and Ollama's APIs begin."""

_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Its types of errors; any other status has invalid_request_error below 500, else api_error."""


class ApiProblem(Exception):
    """Why a request is not answered; the text is for the client's user."""

    def __init__(self, status: int, message: str, *, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """The reply's further headers."""
        if self.status in (429, 503):
            return {"retry-after": str(RETRY_S)}
        if self.status == 408:
            return {"connection": "close"}  # the rest of the body would be taken for a request
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}

    def as_json(self, path: str = "") -> dict[str, Any]:
        """The body, in the shape of the API that the path belongs to: OpenAI's, if no other."""
        if path.startswith(OLLAMA):
            return {"error": str(self)}
        if path.startswith(MESSAGES):
            kind = _ANTHROPIC.get(self.status, "invalid_request_error")
            kind = "api_error" if self.status >= 500 and self.status != 503 else kind
            return {"type": "error", "error": {"type": kind, "message": str(self)}}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        error = ErrorDetail(str(self), kind, self.param or None, self.code or None)
        return {"error": to_builtins(error)}

    def as_bytes(self, path: str = "") -> bytes:
        """The same, encoded."""
        return json.dumps(self.as_json(path)).encode()

    def response(self, path: str = "") -> Response:
        """The whole reply."""
        body = self.as_bytes(path)
        return Response(body, self.status, self.headers, media_type="application/json")


def refused(message: str, param: str = "", code: str = "invalid_value") -> ApiProblem:
    """For a request that cannot be served as it is."""
    return ApiProblem(400, message, param=param, code=code)


def problem_of(error: EdgespecError) -> ApiProblem:
    """One of our errors as the client gets it."""
    if isinstance(error, RequestFailed):
        status, code = _OF_KIND.get(error.kind, _OF_KIND[""])
        return ApiProblem(status, str(error), code=code)
    if isinstance(error, PeerLost | AddressUnavailable):
        return ApiProblem(503, str(error), code="coordinator_unreachable")
    if isinstance(error, AccessRefused | OtherVersion):
        return ApiProblem(503, str(error), code="coordinator_refuses")
    return ApiProblem(500, str(error), code="request_failed")
