"""The refusal of other versions: its bytes, which no version may change."""

from __future__ import annotations

from msgspec import msgpack
from support.versions import NEWER, refusal_by_newer, said_by

import edgespec
from edgespec.wire.codec import VERSION, decode, encode
from edgespec.wire.messages import Heartbeat, Join, Refuse
from edgespec.wire.refusal import other_version, refusal, refusal_of

FROZEN = {
    7: b"\x94\xa8edgespec\x07\x06\xa2no",  # release 0.2.0
    11: b"\x94\xa8edgespec\x0b\x06\xa2no",
    12: b"\x95\xa8edgespec\x0c\x06\xc4\x00\xa2no",
    13: b"\x93\xa8edgespec\x0d\x92\x06\xa2no",
    14: b"\x93\xa8edgespec\x0e\x92\x06\xa2no",
    16: b"\x93\xa8edgespec\x10\x92\x06\xa2no",
    127: b"\x93\xa8edgespec\x7f\x92\x06\xa2no",
}
"""Do not change them: programs out there read these, and nothing else."""


def test_the_frames_are_those_that_programs_of_each_version_read() -> None:
    assert {version: refusal_of(version, "no") for version in FROZEN} == FROZEN


def test_the_words_are_those_that_later_programs_look_for() -> None:
    frame = refusal(14)
    text = (
        f"it runs edgespec {edgespec.__version__} (protocol {VERSION}), this program speaks "
        "protocol 14; install the same edgespec on all machines"
    ).encode()
    assert frame == b"\x93\xa8edgespec\x0e\x92\x06\xd9" + bytes([len(text)]) + text


def test_this_version_says_the_same_by_its_own_message() -> None:
    """So that a change of Refuse, which would leave others without an answer, is noticed here."""
    assert encode(Refuse("no")) == refusal_of(VERSION, "no")
    assert decode(refusal_of(VERSION, "no")) == Refuse("no")


def test_a_refusal_by_another_version_is_told_with_both_and_what_to_do() -> None:
    problem = other_version(refusal_by_newer())
    assert str(problem) == (
        f"it runs edgespec 9.8.7 (protocol {NEWER}), this program is edgespec "
        f"{edgespec.__version__} (protocol {VERSION}); install the same edgespec on all machines"
    )
    assert problem is not None
    assert problem.version == 0, "it needs no answer"


def test_a_refusal_is_read_whatever_the_versions_of_both_are() -> None:
    for version in range(13, 128):
        problem = other_version(refusal(version))
        assert problem is not None
        assert f"it runs edgespec {edgespec.__version__} (protocol {VERSION}), this" in str(problem)


def test_a_frame_of_another_version_is_known_by_its_beginning() -> None:
    join = Join(1, "board", 7, "127.0.0.1", 9, "k")
    for frame, version in [
        (said_by(VERSION + 1, join), VERSION + 1),
        (said_by(13, join), 13),
        (msgpack.encode(["edgespec", 12, 20, b"", 1, "board"]), 12),
        (msgpack.encode(["edgespec", 7, 20]), 7),
        (msgpack.encode(["edgespec", 99]), 99),
    ]:
        problem = other_version(memoryview(frame))
        assert problem is not None
        assert problem.version == version
        assert f"it runs an edgespec of protocol {version}, this program is" in str(problem)


def test_all_else_is_of_this_version_or_of_none() -> None:
    for frame in (encode(Heartbeat()), encode(Refuse("no")), b"", b"\xff" * 40, b"edgespec"):
        assert other_version(frame) is None
    words = "it runs edgespec " + "x" * 500 + " (protocol 15), this program speaks protocol 1"
    assert other_version(refusal_of(VERSION, words)) is None, "a text of any length is no release"
