"""Guard: lets requests in by API key, and on loopback only those of this machine's programs."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from edgespec.errors import EdgespecError
from edgespec.serving.problems import ApiProblem

OPEN_PATHS = frozenset({"/", "/key", "/health", "/healthz", "/readyz", "/openapi.json"})
ASKER = "edgespec.asker"
"""Key of an ASGI scope for the SHA-256 of the API key that was sent; absent without keys."""

OPEN_FOLDER = "/static/"
"""May be read without a key: the page's own files."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

FORWARDED = (
    *("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"),
    "cf-connecting-ip",
)
"""Headers of which one at least says that a proxy passes on what another machine asks."""

KEYS_UNUSABLE = (
    "this server cannot read its API keys now, and its log says why; on its machine, put a copy of "
    "api-keys.json back into the cluster folder, or remove it and make new keys with `edgespec key "
    "new NAME`"
)

log = logging.getLogger(__name__)

_WRONG_ORIGIN = ApiProblem(
    403,
    "pages of other sites may not ask this server; --cors-origin URL names those that may",
    code="wrong_origin",
)


@dataclass(frozen=True, slots=True)
class Door:
    """What the guard of an API is told of who may ask.

    `open_ports`: those that listen on loopback alone and need no key. `origins`: of other sites
    whose pages may ask (`https://chat.example`). `names`: by which the API may be called, beside
    loopback's own; where keys are asked for, and there are none: any.
    """

    open_ports: Container[int] = ()
    origins: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()


class Guard:
    """ASGI middleware. `accepts` says whether a key is valid.

    What needs a key is decided by the path that is routed, without slashes at its end. A request's
    URL is none of it: its Host header is what the client says.

    Without keys, browsers are the danger: a page of another site may send requests to this
    machine's loopback, and by DNS rebinding also read the answers. So a request has to name the
    loopback as its host, and may not come from another site's page. The other danger is a proxy on
    this machine, which asks for anybody: what one says that it passes on needs a key.
    """

    def __init__(
        self, app: ASGIApp, accepts: Callable[[str], bool], header: int, door: Door
    ) -> None:
        """`header`: the longest head of a request, in bytes."""
        self._app = app
        self._accepts = accepts
        self._header = header
        self._door = door
        self._said = ""  # to the log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
            problem = self._problem(HTTPConnection(scope))
            if problem is not None:
                await problem.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, asked: HTTPConnection) -> ApiProblem | None:
        if _head_bytes(asked.scope) > self._header:  # h11 checks only heads that come in pieces
            words = f"the head is longer than {self._header} bytes"
            return ApiProblem(400, words, code="invalid_http")
        proxy = next((name for name in FORWARDED if name in asked.headers), "")
        is_open = self._needs_no_key(asked.scope) and not proxy
        if not self._is_called(_name(asked.headers.get("host", "")), is_open):
            return _wrong_host(is_open)
        if is_open:
            return self._foreign(asked)
        if _is_open(asked.scope):
            return None
        key = key_of(asked)
        try:
            is_valid = self._accepts(key)
        except EdgespecError as problem:  # commands and editors may have damaged the file
            return self._unusable(str(problem))
        self._said = ""
        if is_valid:
            asked.scope[ASKER] = hashlib.sha256(key.encode()).hexdigest()
            return None
        through = f" as what came through a proxy ({proxy})" if proxy else ""
        what = "that API key counts not, or no longer" if key else f"this needs an API key{through}"
        return ApiProblem(
            401,
            f"{what}; send `Authorization: Bearer KEY` with a key that `edgespec key new NAME` "
            "printed on the coordinator",
            code="invalid_api_key",
        )

    def _unusable(self, why: str) -> ApiProblem:
        """For all while keys cannot be checked; the log has the reason once."""
        if why != self._said:
            self._said = why
            log.warning("no API key is accepted: %s", why)
        return ApiProblem(503, KEYS_UNUSABLE, code="keys_unusable")

    def _needs_no_key(self, scope: Scope) -> bool:
        server = scope.get("server")
        return bool(server and server[1] in self._door.open_ports)

    def _is_called(self, host: str, is_open: bool) -> bool:
        """Whether the API answers to that name. A number cannot be rebound by DNS."""
        names = self._door.names
        if host in LOOPBACK_NAMES or host in names:
            return True
        return not is_open and (not names or _is_number(host))

    def _foreign(self, asked: HTTPConnection) -> ApiProblem | None:
        """Why a request without a key is refused: another site's page sends it."""
        origin = asked.headers.get("origin")
        if origin in self._door.origins:
            return None
        if origin is not None and origin.partition("://")[2] != asked.headers.get("host", ""):
            return _WRONG_ORIGIN
        # A browser fetches a picture or script for another site's page without an Origin.
        is_foreign = asked.headers.get("sec-fetch-site") == "cross-site"
        return _WRONG_ORIGIN if is_foreign and not _is_open(asked.scope) else None


def key_of(asked: HTTPConnection) -> str:
    """The key that is sent with a request, "" without one."""
    scheme, _, key = asked.headers.get("authorization", "").partition(" ")
    if not key:  # as Anthropic's clients send it
        return asked.headers.get("x-api-key", "").strip()
    return key.strip() if scheme.lower() == "bearer" else ""


def _wrong_host(is_open: bool) -> ApiProblem:
    words = (
        "this server answers on loopback alone, to requests for 127.0.0.1, localhost or [::1]; to "
        "serve others start it with --http HOST:PORT and API keys, behind a proxy of this machine "
        "with --require-key"
    )
    if not is_open:
        words = "this server does not answer to that name; --host-name NAME lets it"
    return ApiProblem(403, words, code="wrong_host")


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]*)\]|([^\[\]:]*))(?::[0-9]*)?")


def _name(host: str) -> str:
    """A host header without its port; "" if it is malformed."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2] or "").lower() if found else ""


def _is_number(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _head_bytes(scope: Scope) -> int:
    """Size of a request's head, without its blanks."""
    line = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return line + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
