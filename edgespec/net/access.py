"""Access: which keys may connect to a node's sockets, by ZeroMQ's CURVE and ZAP."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Container, Mapping
from types import SimpleNamespace

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from edgespec.net.keys import KeyPair, is_key, short
from edgespec.net.slowness import slowness
from edgespec.net.sockets import BATCH, Dropped, waiting

log = logging.getLogger(__name__)

Admits = Callable[[str], str]
"""Of a public key: "" if it may connect, or why not, for the log. Called in the ZAP thread."""

HANDSHAKE_MS = 3_000
"""Time to prove a key, after which a connection is closed; more where all is slower (slowness)."""

NO_KEY = "{} has no key, takes this for another cluster, or only looked who listens"
NOT_ANSWERED = (
    "{} was not answered in time, as this program was busy; a node of the cluster tries again"
)

BUSY_S = 2.0
"""After so many seconds without a look, as while models are loaded, a loop cannot tell a stranger
from a node of the cluster that gave up or ran into HANDSHAKE_MS."""

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Gate:
    """Decides which connections to the guarded sockets of one ZeroMQ context are let in."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._authenticator = _Authenticator(context)
        self._authenticator.start()
        self._doors: list[_Door] = []
        # For all doors together: an attack on several must not fill the log several times as fast.
        self._refused = {text: Dropped("refused a connection") for text in (NO_KEY, NOT_ANSWERED)}
        self._looked = time.monotonic()

    def guard(
        self, guarded: zmq.Socket[bytes], channel: str, own: KeyPair, admits: Admits
    ) -> zmq.Socket[bytes]:
        """Before the socket is bound: let in admitted keys only, and prove `own`. Returns a monitor
        to poll: when it has something, `look` logs connections without a key."""
        self._authenticator.admit(channel, admits)
        guarded.curve_server = True
        guarded.curve_publickey = own.public.encode()
        guarded.curve_secretkey = own.secret.encode()
        guarded.setsockopt(zmq.ZAP_DOMAIN, channel.encode())
        # Without an answer from ZAP, refuse; by default ZeroMQ would let every connection in.
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        guarded.setsockopt(zmq.HANDSHAKE_IVL, round(HANDSHAKE_MS * slowness()))
        door = _Door(guarded, self._refused)
        self._doors.append(door)
        return door.monitor

    def look(self, ready: Container[object], began: float) -> bool:
        """Log connections that proved no key; once in every turn of the loop that polls the
        monitors. `ready`: the result of the poll; `began`: when that began (time.monotonic).
        Returns whether a connection has ended."""
        was_busy, self._looked = began - self._looked > BUSY_S, time.monotonic()
        ended = [door.look(was_busy) for door in self._doors if door.monitor in ready]
        return any(ended)

    def close(self) -> None:
        """Stop, after the sockets' last use and before the context is terminated."""
        for door in self._doors:
            door.close()
        self._doors.clear()
        self._authenticator.stop()


class _Door:
    """A guarded socket's monitor, and where its connections come from."""

    def __init__(self, guarded: zmq.Socket[bytes], refused: Mapping[str, Dropped]) -> None:
        """`refused` counts failures by their text."""
        self._guarded = guarded
        self.monitor: zmq.Socket[bytes] = guarded.get_monitor_socket(_EVENTS)
        self._peers: dict[int, str] = {}  # by file descriptor
        self._failure = ""
        self._was_busy = False
        self._refused = refused

    def look(self, was_busy: bool) -> bool:
        """Log failed handshakes; returns whether any connection has ended. Either side may hang up
        first, so a stranger cannot be told from a node that gave up; a wrong key can, however busy
        this program was."""
        fresh: set[int] = set()
        self._was_busy |= was_busy
        messages = [parse_monitor_message(frames) for frames in waiting(self.monitor)]
        for message in messages:
            descriptor = int(message["value"])
            match message["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._peers.pop(descriptor, None)
                    fresh.add(descriptor)
                case zmq.EVENT_DISCONNECTED:  # follows the failure that it belongs to
                    fresh.discard(descriptor)
                    peer = self._peers.pop(descriptor, "someone")
                    if self._failure:
                        self._refused[self._failure].note(self._failure.format(peer))
                    self._failure = ""
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if self._was_busy:
                    self._failure = NOT_ANSWERED
                case _:
                    self._failure = NO_KEY
        if len(messages) < BATCH:  # all were read: these descriptors are still open
            self._was_busy = False
            self._peers.update((one, _peer_of(one)) for one in fresh)
        return any(message["event"] == zmq.EVENT_DISCONNECTED for message in messages)

    def close(self) -> None:
        self._guarded.disable_monitor()
        self.monitor.close()


def _peer_of(descriptor: int) -> str:
    """The address at the other end of a connection, which may be closed already."""
    try:
        opened = socket.socket(fileno=descriptor)
    except OSError:
        return "someone"
    try:
        host = str(opened.getpeername()[0])
    except OSError:
        return "someone"
    finally:
        opened.detach()  # ZeroMQ owns the descriptor
    return host.removeprefix("::ffff:")  # IPv4 on a socket that takes both


class _Authenticator(ThreadAuthenticator):
    """Answers ZAP's questions, and logs refusals."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(context)
        self._from = ""
        # One for each reason, of which there are few: a stranger that keeps trying must not hide
        # a used token or a removed device.
        self._dropped: dict[str, Dropped] = {}

    def admit(self, channel: str, admits: Admits) -> None:
        def callback(domain: str, key: bytes) -> bool:
            return self.asked(channel, key.decode(), admits)

        self.configure_curve_callback(channel, SimpleNamespace(callback=callback))

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        address = msg[3].decode("utf-8", "replace") if len(msg) > 3 else "?"
        self._from = address.removeprefix("::ffff:")
        await super().handle_zap_message(msg)

    def asked(self, channel: str, key: str, admits: Admits) -> bool:
        try:
            reason = admits(key) if is_key(key) else "it is no key"
        except Exception as problem:  # whatever it is, it must not let a key in
            log.debug("cannot tell who may connect", exc_info=True)
            self._note("", channel, key, f"the list of keys cannot be read ({problem})")
            return False
        if reason:
            self._note(reason, channel, key, reason)
        return not reason

    def _note(self, kind: str, channel: str, key: str, reason: str) -> None:
        dropped = self._dropped.setdefault(kind, Dropped("refused a connection"))
        dropped.note(f"{self._from} wants to use {channel} with the key {short(key)}: {reason}")


def prove(opened: zmq.Socket[bytes], own: KeyPair, server: str) -> None:
    """Before a socket connects: prove `own`, and accept only the holder of the key `server`."""
    opened.curve_publickey = own.public.encode()
    opened.curve_secretkey = own.secret.encode()
    opened.curve_serverkey = server.encode()
