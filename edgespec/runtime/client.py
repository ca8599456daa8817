"""Client: a blocking connection to a running coordinator, with bounded waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator
from math import inf
from typing import TypeVar

from edgespec.config import Address, Timing
from edgespec.errors import AccessRefused, ConfigError, PeerLost, RequestFailed
from edgespec.net.control import never_answered
from edgespec.net.keys import Identity
from edgespec.net.slowness import slowness
from edgespec.net.zmq_transport import ZmqTransport
from edgespec.ring.health import REASON_CHARS, printable
from edgespec.runtime.own_time import OwnTime
from edgespec.wire.client_messages import (
    Cancel,
    Echoed,
    Failed,
    Finished,
    Progress,
    Status,
    StatusRequest,
    Submit,
    Tokens,
)
from edgespec.wire.messages import Heartbeat, Message, Refuse, Removed

CANCEL_WAIT = 1.25
"""How long to wait for the end of a cancelled request: so many times a coordinator's silence."""

NOTE_S = 1.0
"""Seconds between two notes that the coordinator has not answered yet."""

Answer = Progress | Echoed | Tokens | Finished
Own = TypeVar("Own", bound="Client")


def answer_of(message: Answer | Failed) -> Answer:
    """Raises RequestFailed with the coordinator's reason if the request failed."""
    if isinstance(message, Failed):
        raise RequestFailed(message.reason, message.kind)
    return message


def check_refusal(message: Message) -> None:
    """Raises AccessRefused if the coordinator refuses this client."""
    if isinstance(message, Removed | Refuse):
        raise AccessRefused(f"the coordinator refused: {printable(message.reason, REASON_CHARS)}")


class CoordinatorWatch:
    """What every client knows of its coordinator: where it is, and for how long it may be silent,
    which it tells."""

    def __init__(self, coordinator: Address, wait: float, timing: Timing | None) -> None:
        """`wait`: seconds until one that never answered is given up. Raises ConfigError for a wait
        that cannot be used."""
        if not 0.0 < wait <= 86400.0:
            raise ConfigError(f"wait is {wait}; it must be above 0 and at most 86400 seconds")
        self._coordinator = coordinator
        self._wait = wait
        self._timing = timing or Timing()
        self._silence = self._timing.answer_silence * slowness()
        self._time = OwnTime()

    def _heed(self, message: Message) -> None:
        """What any of its messages says of it. Raises AccessRefused if it refuses this client."""
        check_refusal(message)
        if isinstance(message, Heartbeat):
            self._silence = message.silence or self._silence

    def _silent_for(self, seconds: float) -> PeerLost:
        """The error for a coordinator that was silent for so long."""
        return PeerLost(
            f"the coordinator at {self._coordinator} has been silent for {seconds:.1f} s: it has "
            "ended or cannot be reached"
        )

    def _broken(self) -> PeerLost:
        """The error for a connection that has ended, with all that was asked over it."""
        return PeerLost(f"the connection to the coordinator at {self._coordinator} broke")


class Client(CoordinatorWatch):
    """One connection to a coordinator. Use as a context manager."""

    def __init__(
        self,
        coordinator: Address,
        identity: Identity,
        wait: float,
        timing: Timing | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`wait`: seconds until a coordinator that never answered is given up. `check` is called
        on every turn and may raise, such as when a ring that this process started has ended.

        Raises ConfigError for an address or a wait that cannot be used.
        """
        super().__init__(coordinator, wait, timing)
        self._check = check
        self._transport = ZmqTransport.client(coordinator, identity, 2 * self._silence)
        self._started = self._time.now()
        self._heard: float | None = None
        self._said = 0.0
        self._open: set[int] = set()  # tags of requests that the coordinator may still work for
        self.cancelled = False

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what is still asked, and end the connection."""
        for tag in list(self._open):
            self._give_up(tag)
        self._transport.close()

    def cancel(self) -> None:
        """Have `ask` cancel its request; may be called by a signal handler."""
        self.cancelled = True

    def ask(self, submit: Submit) -> Iterator[Answer]:
        """Submit a request and yield what comes, the last being Finished.

        Raises RequestFailed with the coordinator's reason, and like `ask_at_once`.
        """
        for message in self.ask_at_once([submit], 1):
            yield answer_of(message)

    def ask_at_once(
        self, submits: Iterable[Submit], live: int
    ) -> Generator[Answer | Failed, None, None]:
        """Submit all of them, the next one as soon as fewer than `live` are open, and yield what
        comes of any of them as it comes.

        Raises PeerLost if the coordinator is gone. Before its first answer it yields a Progress
        that says so, and a cancel is a KeyboardInterrupt. Requests that are left before their ends
        are cancelled.
        """
        waiting = iter(submits)
        noted, limit = self._started, inf
        try:
            while self._time.now() < limit:
                while limit == inf and len(self._open) < live:
                    if (submit := next(waiting, None)) is None:
                        break
                    self._open.add(submit.tag)
                    self.send(submit)
                if not self._open:
                    return
                if self.cancelled and limit == inf:
                    if self._heard is None:
                        raise KeyboardInterrupt
                    for tag in self._open:
                        self.send(Cancel(tag))
                    limit = self._time.now() + CANCEL_WAIT * self._silence
                for message in self._receive():
                    match message:
                        case Progress(tag=tag) | Echoed(tag=tag) | Tokens(tag=tag) if (
                            tag in self._open
                        ):
                            yield message
                        case Finished(tag=tag) | Failed(tag=tag) if tag in self._open:
                            self._open.discard(tag)
                            yield message
                now = self._time.now()
                if self._heard is None and now - noted >= NOTE_S:
                    noted = now
                    waited = f"({now - self._started:.0f} of {self._wait:.0f} s)"
                    text = f"waiting for the coordinator at {self._coordinator} {waited}"
                    yield Progress(min(self._open), text)
            raise PeerLost(f"the coordinator at {self._coordinator} did not confirm the cancel")
        finally:
            for tag in list(self._open):
                self._give_up(tag)

    def status(self) -> Status:
        """The ring as the coordinator sees it. Raises PeerLost if it is gone."""
        self.send(StatusRequest())
        while True:
            for message in self._receive():
                if isinstance(message, Status):
                    return message

    def send(self, message: Message) -> None:
        """Say something to the coordinator; `ask` and the others do it as they need."""
        self._transport.send_control(b"", message)

    def _give_up(self, tag: int) -> None:
        """Cancel a request that has not ended; a Submit that has not left yet is sent first."""
        if tag in self._open:
            self._open.discard(tag)
            with contextlib.suppress(PeerLost):
                self.send(Cancel(tag))

    def _receive(self) -> list[Message]:
        """What came within a beat.

        Raises PeerLost after too long a silence, AccessRefused if the key is not accepted.
        """
        if self._check is not None:
            self._check()
        now = self._time.now()
        if now - self._said >= self._timing.beat:
            self._said = now
            self.send(Heartbeat())
        messages = [i.message for i in self._transport.poll(self._timing.beat)]
        now = self._time.turned(self._timing.beat)
        for message in messages:
            self._heed(message)
        if messages:
            self._heard = now
        elif self._heard is not None and self._transport.broke:
            raise self._broken()
        elif self._heard is None and now - self._started > self._wait:
            raise never_answered(self._coordinator, self._wait, self._transport.is_let_in)
        elif self._heard is not None and now - self._heard > self._silence:
            raise self._silent_for(now - self._heard)
        return messages
