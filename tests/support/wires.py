"""A coordinator alone, fed by hand: everything that it sends is in view."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.rings import submit
from support.segments import changed

from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.effects import Draft, EncodePrompt, Renew, RunHead, SendRing
from edgespec.decoding.events import (
    Drafted,
    HeadDone,
    SegmentArrived,
)
from edgespec.decoding.request import Request
from edgespec.machines.effects import (
    Effect,
    SendPeer,
    SendStages,
)
from edgespec.machines.events import (
    MessageArrived,
    RingUp,
)
from edgespec.sim.toy import ToyCodec
from edgespec.tree.draft_tree import DraftTree
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.types.tensor import Tensor
from edgespec.verify.sampling import Choice
from edgespec.wire.client_messages import Submit
from edgespec.wire.messages import CloseRequest, Credit, Message, Retain
from edgespec.wire.segment import Segment


class Wire:
    """A coordinator alone, with everything it sends in view; `now` is its time."""

    def __init__(self, stages: int = 2, **ring_settings: Any) -> None:
        ring = CoordinatorSettings(stages, 1000, "fake", **ring_settings)
        self.machine = CoordinatorMachine(ring, ToyCodec())
        self.now = 0.0
        self.segments: list[Segment] = []
        self.heads: list[RunHead] = []
        self.drafts: list[Draft] = []
        self.retains: list[Retain] = []
        self.replies: list[Message] = []
        self.ends: list[int] = []
        self.renewals: list[str] = []
        self.take(self.machine.handle(RingUp(), self.now))

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case EncodePrompt():
                    self.take(self.machine.handle(self.machine.encode(effect), self.now))
                case SendRing(segment):
                    self.segments.append(segment)
                case RunHead():
                    self.heads.append(effect)
                case Draft():
                    self.drafts.append(effect)
                case SendStages(Retain() as retain):
                    self.retains.append(retain)
                case SendStages(CloseRequest(request)):
                    self.ends.append(request)
                case SendPeer(_, message):
                    self.replies.append(message)
                case Renew(why):
                    self.renewals.append(why)

    def submit(self, ask: Submit) -> None:
        self.take(self.machine.handle(MessageArrived(b"client", ask), self.now))

    def back(self, segment: Segment, **changes: object) -> None:
        """A segment comes back from the ring with the last `want` rows."""
        part = segment.parts[0]
        rows = part.want if part.committed else len(part.ids)
        first = len(part.ids) - rows
        result = changed(
            segment,
            ids=part.ids[first:],
            parents=part.parents[first:],
            positions=part.positions[first:],
            tokens=np.zeros(0, np.int64),
            hidden=Tensor("float32", (rows, 1), bytes(4 * rows)),
        )
        self.take(self.machine.handle(SegmentArrived(changed(result, **changes)), self.now))

    def head(self, *tokens: int) -> None:
        """The oldest head job ends."""
        job = self.heads.pop(0)
        choice = Choice(np.arange(len(tokens)), np.array(tokens), np.ones(len(tokens)))
        self.take(self.machine.handle(HeadDone(job.job, job.request, choice), self.now))

    def drafted(self, tree: DraftedTree) -> None:
        """The oldest draft job ends."""
        job = self.drafts.pop(0)
        self.take(self.machine.handle(Drafted(job.job, job.request, tree), self.now))

    def expanded(self, *children: tuple[int, int, float]) -> None:
        """The oldest draft job ends with these children: (path, token, score)."""
        parents, tokens, scores = zip(*children, strict=True) if children else ((), (), ())
        found = Children(
            np.array(parents, np.int64), np.array(tokens, np.int64), np.array(scores, np.float64)
        )
        job = self.drafts.pop(0)
        self.take(self.machine.handle(Drafted(job.job, job.request, found), self.now))

    def take_draft_of_the_prompt(self) -> None:
        """The draft source has read the prompt."""
        self.drafted(DraftedTree.empty())

    def credit(self, seq: int) -> None:
        """The first stage has handed on that segment."""
        self.take(self.machine.handle(MessageArrived(b"stage", Credit(seq)), self.now))

    @property
    def request(self) -> Request:
        """The first request, which must be open."""
        request = self.machine.accepts(1)
        assert request is not None
        return request

    @property
    def tree(self) -> DraftTree:
        """The first request's tree, which must be there."""
        assert self.request.tree is not None
        return self.request.tree

    def first_token(self, policy: str, max_new_tokens: int = 50) -> None:
        """A request whose first token is there."""
        self.submit(submit(1, "hello", max_new_tokens, policy))
        self.back(self.segments.pop())
        if self.drafts:
            self.drafted(DraftedTree.empty())
        self.head(7)
