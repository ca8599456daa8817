"""Access: which keys may connect to a node's sockets, by ZeroMQ's CURVE and ZAP."""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
from zmq.auth.thread import ThreadAuthenticator

from edgespec.net.keys import KeyPair, is_key, short
from edgespec.net.sockets import Dropped, waiting

log = logging.getLogger(__name__)

Admits = Callable[[str], str]
"""Of a public key: "" if it is let in, or why not, for the log. Asked in a thread of its own."""

HANDSHAKE_MS = 3_000
"""Whoever connects has this long to prove a key: a connection of a stranger costs no more."""

NO_KEY = "someone has no key, takes this for another cluster, or only looked who listens"

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Gate:
    """Asks for every connection to the guarded sockets of one ZeroMQ context who may come in."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._authenticator = _Authenticator(context)
        self._authenticator.start()
        self._monitors: list[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = []
        self._dropped = Dropped("refused a connection")

    def guard(
        self, guarded: zmq.Socket[bytes], channel: str, own: KeyPair, admits: Admits
    ) -> zmq.Socket[bytes]:
        """Before it is bound: only who holds an admitted key may connect, and this node proves its
        own. Returns a monitor, which tells `heard` of those who cannot even try."""
        self._authenticator.admit(channel, admits)
        guarded.curve_server = True
        guarded.curve_publickey = own.public.encode()
        guarded.curve_secretkey = own.secret.encode()
        guarded.setsockopt(zmq.ZAP_DOMAIN, channel.encode())
        # Without an answer from ZAP nobody comes in; ZeroMQ's default is that everybody does.
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        guarded.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        monitor: zmq.Socket[bytes] = guarded.get_monitor_socket(_FAILED)
        self._monitors.append((guarded, monitor))
        return monitor

    def heard(self, monitor: zmq.Socket[bytes]) -> None:
        """Somebody connected and proved no key. Which of the two sides hangs up first is chance, so
        that a stranger cannot be told from a device that only looks whether anybody listens."""
        for _ in waiting(monitor):
            self._dropped.note(NO_KEY)

    def close(self) -> None:
        """Admit nobody any more; before the context is terminated, behind its sockets' last use."""
        for guarded, monitor in self._monitors:
            guarded.disable_monitor()
            monitor.close()
        self._monitors.clear()
        self._authenticator.stop()


class _Authenticator(ThreadAuthenticator):
    """Answers ZAP's questions, and logs whom it turns away."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        super().__init__(context)
        self._from = ""
        # One for each reason, of which there are few: a stranger who comes again and again shall
        # not hide that a used token, or a removed device, came too.
        self._dropped: dict[str, Dropped] = {}

    def admit(self, channel: str, admits: Admits) -> None:
        self.configure_curve_callback(channel, _Provider(self, channel, admits))

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        address = msg[3].decode("utf-8", "replace") if len(msg) > 3 else "?"
        self._from = address.removeprefix("::ffff:")  # IPv4 on a socket that takes both
        await super().handle_zap_message(msg)

    def asked(self, channel: str, key: str, admits: Admits) -> bool:
        try:
            reason = admits(key) if is_key(key) else "it is no key"
        except Exception as problem:  # whatever it is, nobody comes in by it
            log.debug("cannot tell who may connect", exc_info=True)
            self._note("", channel, key, f"the list of keys cannot be read ({problem})")
            return False
        if reason:
            self._note(reason, channel, key, reason)
        return not reason

    def _note(self, kind: str, channel: str, key: str, reason: str) -> None:
        dropped = self._dropped.setdefault(kind, Dropped("refused a connection"))
        dropped.note(f"{self._from} wants to use {channel} with the key {short(key)}: {reason}")


class _Provider:
    """What pyzmq calls for every key that was proved on a channel."""

    def __init__(self, authenticator: _Authenticator, channel: str, admits: Admits) -> None:
        self._authenticator = authenticator
        self._channel = channel
        self._admits = admits

    def callback(self, domain: str, key: bytes) -> bool:
        return self._authenticator.asked(self._channel, key.decode(), self._admits)


def prove(opened: zmq.Socket[bytes], own: KeyPair, server: str) -> None:
    """Before it connects: prove `own`, and talk to nobody but the holder of the key `server`."""
    opened.curve_publickey = own.public.encode()
    opened.curve_secretkey = own.secret.encode()
    opened.curve_serverkey = server.encode()
