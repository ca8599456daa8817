"""The one tree of errors that edgespec raises on purpose, and the exit codes of its programs.

    EdgespecError
    ├── ConfigError            a setting, option, file or prompt that cannot be used as given
    │   ├── ModelError         a model, tokenizer or checkpoint that cannot be used as given
    │   │   └── BlockDamaged       a block file or its manifest that is not what was written
    │   ├── AddressUnavailable a host, network or port that cannot be used now, but may be later
    │   └── AccessRefused      a key or token that is missing, or that is not accepted
    ├── CapacityError          a limit (context, memory) that a request would exceed
    │   └── QueueFull              too many requests are waiting: the same one may succeed later
    ├── ProtocolError          a peer broke the rules of a protocol
    │   ├── LocalProtocolError     we did: a bug in this program
    │   └── RemoteProtocolError    the other side did: its message is dropped, never trusted
    │       └── OtherVersion           it speaks another version of the protocol
    ├── PeerLost               a stage or the coordinator is gone or silent
    └── RequestFailed          a request ended with an error; carries the one message for its user

Every message says what went wrong, where, and what to do about it. It may quote what files, peers
and users say: so it is cut to a length that can be read, and nothing in it steers a terminal.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CANCELLED = 130
"""Ended with Ctrl-C, as shells have it."""
EXIT_NO_READER = 141
"""What read the output went away: what shells have of a program that SIGPIPE ends."""

MOST_CHARS = 1200
"""Of a message. Of a longer one the beginning and the last _END stay: what to do about it."""
_END = 300


class EdgespecError(Exception):
    """Base of every error raised on purpose; its text is fit to be shown to a user."""

    _lines = True
    """Whether its messages may have several lines; else a newline in one is what a file says."""

    def __init__(self, message: str = "") -> None:
        super().__init__(_shown(message, "\n" if self._lines else ""))


def _shown(text: str, kept: str) -> str:
    text = _cut(text)
    if text.isprintable():
        return text
    return _cut("".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text))


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARS:
        return text
    return f"{text[: MOST_CHARS - _END - 5]} […] {text[-_END:]}"


class ConfigError(EdgespecError):
    """A setting, option, file or prompt that cannot be used as given."""


class ModelError(ConfigError):
    """A model, tokenizer or checkpoint that cannot be used as given."""

    _lines = False


class BlockDamaged(ModelError):
    """A block file or its manifest that is not what was written: missing, cut off or changed."""


class AddressUnavailable(ConfigError):
    """A host, network or port that cannot be used now, but may be later: wait, and try again."""


class AccessRefused(ConfigError):
    """A key or token that is missing, or that the other side does not, or no longer, accept."""


class CapacityError(EdgespecError):
    """A limit (context length, memory) that a request would exceed."""


class QueueFull(CapacityError):
    """Too many requests are waiting: the same one may succeed later."""


class ProtocolError(EdgespecError):
    """A peer broke the rules of a protocol."""


class LocalProtocolError(ProtocolError):
    """We broke the protocol: a bug in this program."""


class RemoteProtocolError(ProtocolError):
    """The other side broke the protocol; the only error that its bytes can cause."""


class OtherVersion(RemoteProtocolError):
    """The other side speaks another version of the protocol, or says that we do.

    `version`: that of its message; 0 if it says so.
    """

    def __init__(self, reason: str, version: int = 0) -> None:
        super().__init__(reason)
        self.version = version


class PeerLost(EdgespecError):
    """A stage or the coordinator is gone or silent."""


class RequestFailed(EdgespecError):
    """A request ended with an error; the text is its one terminal reply.

    `kind`: as in the message Failed.
    """

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind
