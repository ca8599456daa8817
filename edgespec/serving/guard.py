"""Guard: lets requests in by API key, and on loopback only those of this machine's programs."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.serving.problems import ApiProblem

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/openapi.json"})
ASKER = "edgespec.asker"
"""Key of an ASGI scope for the SHA-256 of the API key that was sent; absent without keys."""

OPEN_FOLDER = "/static/"
"""May be read without a key: the page's own files."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

_WRONG_ORIGIN = ApiProblem(403, "pages of other sites may not ask this server", code="wrong_origin")


class Guard:
    """ASGI middleware. `accepts` says whether a key is valid; None: no key is needed.

    What needs a key is decided by the path that is routed. A request's URL is none of it: its
    Host header is what the client says.

    Without keys, browsers are the danger: a page of another site may send requests to this
    machine's loopback, and by DNS rebinding also read the answers. So a request has to name the
    loopback as its host, and may not come from another site's page.
    """

    def __init__(
        self,
        app: ASGIApp,
        accepts: Callable[[str], bool] | None,
        header: int,
        open_ports: Container[int] = (),
    ) -> None:
        """`header`: the longest head of a request, in bytes. `open_ports`: those that listen on
        loopback alone, and so need no key where others do."""
        self._app = app
        self._accepts = accepts
        self._open_ports = open_ports
        self._header = header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            problem = self._problem(HTTPConnection(scope))
            if problem is not None:
                await problem.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, asked: HTTPConnection) -> ApiProblem | None:
        if _head_bytes(asked.scope) > self._header:  # h11 checks only heads that come in pieces
            words = f"the head is longer than {self._header} bytes"
            return ApiProblem(400, words, code="invalid_http")
        server = asked.scope.get("server")
        if self._accepts is None or (server and server[1] in self._open_ports):
            return _foreign(asked)
        if _is_open(asked.scope):
            return None
        scheme, _, key = asked.headers.get("authorization", "").partition(" ")
        if not key:  # as Anthropic's clients send it
            scheme, key = "bearer", asked.headers.get("x-api-key", "")
        key = key.strip()
        if scheme.lower() == "bearer" and self._accepts(key):
            asked.scope[ASKER] = hashlib.sha256(key.encode()).hexdigest()
            return None
        what = "that API key counts not, or no longer" if key else "this needs an API key"
        return ApiProblem(
            401,
            f"{what}; send `Authorization: Bearer KEY` with a key that `edgespec key new NAME` "
            "printed on the coordinator",
            code="invalid_api_key",
        )


def _foreign(asked: HTTPConnection) -> ApiProblem | None:
    host = asked.headers.get("host", "")
    if _name(host) not in LOOPBACK_NAMES:
        return ApiProblem(
            403,
            "this server answers on loopback alone, to requests for 127.0.0.1, localhost or [::1]; "
            "to serve others start it with --http HOST:PORT and API keys",
            code="wrong_host",
        )
    origin = asked.headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        return _WRONG_ORIGIN
    # A browser fetches a picture or script for another site's page without an Origin.
    is_foreign = asked.headers.get("sec-fetch-site") == "cross-site"
    return _WRONG_ORIGIN if is_foreign and not _is_open(asked.scope) else None


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]*)\]|([^\[\]:]*))(?::[0-9]*)?")


def _name(host: str) -> str:
    """A host header without its port; "" if it is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2] or "").lower() if found else ""


def _head_bytes(scope: Scope) -> int:
    """Size of a request's head, without its blanks."""
    line = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
