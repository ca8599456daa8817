"""The connecting end of the control channel: its set-up, and why it is not let in."""

from __future__ import annotations

import logging
import time
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from edgespec import __version__
from edgespec.config import Address
from edgespec.errors import AccessRefused, AddressUnavailable, OtherVersion, PeerLost
from edgespec.net.access import prove
from edgespec.net.keys import Identity
from edgespec.net.sockets import Content, connect
from edgespec.wire.codec import MOST_BYTES
from edgespec.wire.refusal import other_version

log = logging.getLogger(__name__)

CONTROL_HWM = 10_000
"""Control messages are small and their rate is bounded by tokens; messages to a peer that is this
far behind are refused."""

CONTROL_BYTES = 4 << 20
"""The longest message that a coordinator takes on the control channel."""

LOST_MS = 3_000
"""A half-open connection (a pulled cable) ends after so long where it was made, and ZeroMQ connects
again. The system's own probes find it, once a second and without waking a program up. The machines'
own Heartbeat decides whether a peer is alive, as it also shows that its loop runs."""

MOST_PROBES = 127
"""More cannot be set: libzmq would close the socket for that, and connect again without end."""

HEARTBEAT_MS = 10_000
"""ZMTP pings find the same where something between both ends answers probes for the other side.

Only the connecting end sends pings, with a time after which the listening end closes the connection
too. The listening end must not ping: libzmq 4.3.5 aborts the process (`!_io_error`) if a ping is
due while a peer, from which no more is read because too much waits, has just disconnected."""

MOST_FAILURES = 5
STRANGER_S = 5.0
"""So many failed handshakes in a row within so many seconds, without an earlier success, show that
the other side has another key: libzmq's own thread refuses a wrong key within milliseconds, however
busy the process is, and the next attempt follows a tenth of a second later. A single one can fail
because the other side is just ending. A coordinator that is too busy to admit a key (it imports
torch, say) lets each handshake run into `access.HANDSHAKE_MS`, which is too slow to count here."""

SURE_FAILURES = 3
"""The same for a look at an address, which is soon repeated."""
QUIET_S = 20.0
"""Seconds without an answer of a coordinator that let us in, after which the log says what that may
mean: longer than most take to load their models."""

CONNECT_S = 1.0
"""Seconds for a connection within a local network."""


def ping(opened: zmq.Socket[bytes], lost_ms: int = LOST_MS) -> None:
    """Before a socket connects: it closes a connection whose other end was silent for so many ms,
    and the other end does some pings later."""
    opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_CNT, min(max(1, lost_ms // 1000), MOST_PROBES))
    opened.setsockopt(zmq.TCP_MAXRT, lost_ms)
    opened.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    opened.setsockopt(zmq.HEARTBEAT_TIMEOUT, lost_ms + HEARTBEAT_MS)
    opened.setsockopt(zmq.HEARTBEAT_TTL, lost_ms + 2 * HEARTBEAT_MS)


def set_up(opened: zmq.Socket[bytes], identity: Identity, lost_ms: int = LOST_MS) -> None:
    """Before a DEALER connects to a coordinator; `lost_ms`: see `ping`."""
    opened.setsockopt(zmq.SNDHWM, CONTROL_HWM)
    opened.setsockopt(zmq.RCVHWM, CONTROL_HWM)
    opened.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    opened.setsockopt(zmq.RECONNECT_IVL, 100)
    opened.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
    ping(opened, lost_ms)
    prove(opened, identity.own, identity.coordinator)


class Seen(Enum):
    """What is at an address, by a handshake."""

    NOTHING = "no program takes connections there, or no route leads there"
    BUSY = "a program that has not answered yet"
    OURS = "the coordinator of the cluster"
    REFUSES = "the coordinator, which does not accept the key of this machine (or this token)"
    OTHER = "a program that has another key, or none"


def look(coordinator: Address, identity: Identity, timeout: float = CONNECT_S) -> Seen:
    """What listens at an address, after `timeout` seconds at most.

    This is a handshake with the key of `identity`: a coordinator that knows the key logs nothing,
    while it would log a bare connection as a stranger's. Raises AddressUnavailable for a name that
    is not known.
    """
    seen, failures = Seen.NOTHING, 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as opened:
        opened.linger = 0
        set_up(opened, identity)
        events = Handshakes.EVENTS | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED
        monitor = opened.get_monitor_socket(events)
        try:
            connect(opened, coordinator)
            deadline = time.monotonic() + timeout
            while monitor.poll(max(0, round(1000 * (deadline - time.monotonic())))):
                match parse_monitor_message(monitor.recv_multipart())["event"]:
                    case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        return Seen.OURS
                    case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                        return Seen.REFUSES
                    case zmq.EVENT_CONNECTED:
                        seen = Seen.BUSY
                    case zmq.EVENT_CLOSED:
                        return Seen.NOTHING
                    case zmq.EVENT_DISCONNECTED:  # the last event of what speaks no ZeroMQ
                        seen = Seen.OTHER
                    case _:
                        failures += 1
                        if failures == SURE_FAILURES:
                            return Seen.OTHER
            return seen
        finally:
            opened.disable_monitor()
            monitor.close()


def takes_connections(coordinator: Address, identity: Identity) -> bool:
    """Whether a program listens at an address."""
    try:
        return look(coordinator, identity) is not Seen.NOTHING
    except AddressUnavailable:
        return False


def refused(coordinator: Address) -> AccessRefused:
    """The error for a key that the coordinator does not let in."""
    return AccessRefused(
        f"the coordinator at {coordinator} does not accept the key of this machine (or this "
        "token): it was removed, is used up or has expired, which its log tells; make a new token "
        "there with `edgespec token new`"
    )


def stranger(coordinator: Address) -> AccessRefused:
    """The error for a coordinator that has another key."""
    return AccessRefused(
        f"who listens at {coordinator} is not the coordinator of the cluster that this machine (or "
        "this token) belongs to; check the address, or join the cluster there with a token of it"
    )


_WHY_QUIET = (
    f"it loads its models, or it is older than edgespec {__version__} here: then install the same "
    "edgespec on all machines"
)


def never_answered(coordinator: Address, wait: float, is_let_in: bool) -> PeerLost:
    """The error for a coordinator that said nothing for `wait` seconds; `is_let_in`: it accepted
    our key."""
    if is_let_in:
        return PeerLost(
            f"the coordinator at {coordinator} let this program in, and said nothing for "
            f"{wait:.0f} s; {_WHY_QUIET}"
        )
    return PeerLost(
        f"no coordinator answered at {coordinator} within {wait:.0f} s; is `edgespec serve` "
        "running there, has it finished loading, and is the port open?"
    )


def check_version(frame: Content, coordinator: object) -> None:
    """Raise OtherVersion for a frame of a coordinator that does not speak our version."""
    problem = other_version(frame)
    if problem is not None:
        raise OtherVersion(f"the coordinator at {coordinator} is of another version: {problem}")


class Handshakes:
    """The results of a connecting socket's handshakes, from its monitor."""

    EVENTS = (
        zmq.EVENT_HANDSHAKE_SUCCEEDED
        | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        | zmq.EVENT_DISCONNECTED
    )

    def __init__(self, coordinator: Address) -> None:
        self._coordinator = coordinator
        self.is_let_in = self.broke = False
        """Whether the coordinator has accepted our key; whether that connection has ended since."""
        self._quiet_since: float | None = None  # it is connected, and has said nothing
        self._is_refused = False
        self._is_stranger = False
        self._failures = 0
        self._since = time.monotonic()

    def take(self, frames: list[bytes]) -> int:
        """Read a message of the monitor; returns which of EVENTS it is."""
        event = int(parse_monitor_message(frames)["event"])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_let_in, self._quiet_since = True, time.monotonic()
        elif event == zmq.EVENT_DISCONNECTED:
            self._quiet_since, self.broke = None, self.is_let_in
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._is_refused = True  # ZeroMQ does not try again
        else:
            self._count_failure(time.monotonic())
        return event

    def _count_failure(self, now: float) -> None:
        """`now`: when it is read. If that is late, as this program was busy, the failures span more
        time and no longer count as those of a stranger."""
        self._failures += 1
        if self._failures == MOST_FAILURES:
            self._is_stranger = now - self._since < STRANGER_S
            self._failures, self._since = 0, now

    def heard(self) -> None:
        """The coordinator has said something."""
        self._quiet_since = None

    def check(self) -> None:
        """Raise AccessRefused if the coordinator does not let this key in, or is another one.

        A coordinator that lets us in and says nothing is mentioned in the log.
        """
        quiet = 0.0 if self._quiet_since is None else time.monotonic() - self._quiet_since
        if quiet > QUIET_S:
            self._quiet_since = None
            log.warning(
                "the coordinator at %s let this program in %.0f s ago, and says nothing; %s",
                *(self._coordinator, quiet, _WHY_QUIET),
            )
        if self._is_refused:
            raise refused(self._coordinator)
        if self._is_stranger and not self.is_let_in:
            raise stranger(self._coordinator)
