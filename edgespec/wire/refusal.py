"""Refusal: what a program tells one of another version, in bytes that no version changes.

A frame of any version is [MAGIC, version, ...] with a version below 128. Its receiver, if it speaks
another one, answers with the Refuse of *that* version, so that programs which know nothing of this
file read it as well: [MAGIC, version, [6, text]] since version 13, and for all that come. The text
has one form too: "it runs edgespec RELEASE (protocol VERSION), this program speaks protocol ...".
"""

from __future__ import annotations

import re
from typing import Final

from msgpack import packb

from edgespec import __version__
from edgespec.errors import OtherVersion
from edgespec.wire.codec import MAGIC, START, VERSION

_REFUSE: Final = 6
"""The tag of messages.Refuse, in all versions."""

_REFUSAL = re.compile(
    rb"\x93\xa8edgespec.\x92\x06(?:[\xa0-\xbf]|\xd9.|\xda..)"
    rb"it runs (edgespec [!-~]{1,40} \(protocol \d{1,3}\)), this program ",
    re.DOTALL,
)
_REMEDY = "install the same edgespec on all machines"


def refusal(version: int) -> bytes:
    """The frame that refuses a program which speaks another version."""
    text = (
        f"it runs edgespec {__version__} (protocol {VERSION}), this program speaks protocol "
        f"{version}; {_REMEDY}"
    )
    return refusal_of(version, text)


def refusal_of(version: int, text: str) -> bytes:
    """The Refuse of a version."""
    if version > 12:
        return bytes(packb([MAGIC, version, [_REFUSE, text]]))
    # Release 0.2.0 spoke 7. In 12 the integers of all fields were together, before them.
    return bytes(packb([MAGIC, version, _REFUSE, *([b""] if version == 12 else []), text]))


def other_version(frame: bytes | memoryview) -> OtherVersion | None:
    """Why this frame is not understood, if its sender speaks another version, or says that we do.

    The error has the version of the frame, or 0 if it is that refusal, which needs no answer.
    """
    version = 0
    if (refused := _REFUSAL.match(frame)) is not None:
        runs = refused[1].decode()
    else:
        start = START.match(frame)
        if start is None or (version := start[1][0]) == VERSION:
            return None
        runs = f"an edgespec of protocol {version}"
    here = f"this program is edgespec {__version__} (protocol {VERSION})"
    return OtherVersion(f"it runs {runs}, {here}; {_REMEDY}", version)
