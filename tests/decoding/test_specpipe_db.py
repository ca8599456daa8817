"""SpecPipe-DB: live requests of `specpipe` have a level each in one segment; prompts go first."""

from __future__ import annotations

import random

from support.rings import FakeRing, assert_one_end, submit

from edgespec.decoding.effects import SendRing
from edgespec.machines.effects import Effect
from edgespec.wire.client_messages import Finished
from edgespec.wire.segment import Segment

LIVE = 3


class Recorder:
    """Keeps the segments that a ring's coordinator sends."""

    def __init__(self, fake: FakeRing) -> None:
        self.segments: list[Segment] = []
        self._dispatch = fake.ring.dispatch
        fake.ring.dispatch = self.dispatch  # type: ignore[method-assign]

    def dispatch(self, number: int, effects: list[Effect]) -> None:
        if number == 0:
            self.segments += [e.segment for e in effects if isinstance(e, SendRing)]
        self._dispatch(number, effects)


def played(policy: str) -> list[Segment]:
    """The segments of three requests with prompts of several chunks, the last of which comes when
    the others have begun to decode."""
    rng = random.Random(policy)
    fake = FakeRing(3, live=LIVE, prefill_chunk=2, accuracy=1.0)
    recorder = Recorder(fake)
    prompts = ["".join(rng.choices("abcdefghij", k=9)) for _ in range(LIVE)]
    wanted = [submit(tag, prompt, 24, policy) for tag, prompt in enumerate(prompts)]
    for ask in wanted[:-1]:
        fake.ring.submit(ask)
    while all(part.committed for segment in recorder.segments for part in segment.parts):
        assert fake.take_turns(1)
    fake.ring.submit(wanted[-1])
    fake.ring.run()
    for ask in wanted:
        end = assert_one_end(fake.ring.replies, ask.tag)
        assert isinstance(end, Finished)
        assert end.token_ids == fake.expected(ask).token_ids
    return recorder.segments


def test_prompts_go_first_and_then_a_level_of_each_in_one_segment() -> None:
    segments = played("specpipe")
    assert not any(mixed(segment) for segment in segments)
    assert any(mixed(segment) for segment in played("pipedec")), "others let them share a segment"
    ends = [at for at, s in enumerate(segments) for part in s.parts if part.request == LIVE]
    together = [len(s.parts) for s in segments[ends[0] : ends[-1]] if not s.parts[0].committed]
    levels = [number for number in together if number > 1]
    assert levels.count(LIVE) > len(levels) / 2


def mixed(segment: Segment) -> bool:
    """Whether it has rows of a prompt and others."""
    return len({part.committed for part in segment.parts}) == 2
