"""Events of decoding: segments, and the results of what was computed."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.machines.events import Event
from edgespec.tree.drafted import Children, DraftedTree
from edgespec.verify.rules import Grammar, Mask
from edgespec.verify.sampling import Choice
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.segment import Segment


@dataclass(frozen=True, slots=True)
class SegmentArrived(Event):
    """A segment came along the data ring."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class PromptEncoded(Event):
    """EncodePrompt ended: the prompt's tokens; or none and the `problem`, fit for a user, of a
    `kind` that the message Failed knows. `grammar`: the compiled one, if one was asked for.
    `thinks`: the prompt ends within a thought. `text`: its own, if it is to be told."""

    request: int
    tokens: tuple[int, ...]
    problem: str = ""
    kind: str = ""
    grammar: Grammar | None = None
    thinks: bool = False
    text: str = ""


@dataclass(frozen=True, slots=True)
class HeadDone(Event):
    """RunHead ended: the tokens after the rows on the path, and what else was asked for of them."""

    job: int
    request: int
    choice: Choice
    top_logprobs: TopLogprobs | None = None


Masks = tuple[Mask | None, ...] | str
"""What may come behind some rows, None where the answer has ended; or why that is not known, fit
for a user."""


@dataclass(frozen=True, slots=True)
class MasksFound(Event):
    """FindMasks ended, of each request with the masks behind its rows."""

    seq: int
    found: tuple[tuple[int, Masks], ...]


@dataclass(frozen=True, slots=True)
class StageBeat(Event):
    """A stage lives: it `holds` so many segments, and has `passed` on that one last (-1: none)."""

    stage: int
    holds: int
    passed: int


@dataclass(frozen=True, slots=True)
class Drafted(Event):
    """Draft ended: the whole tree below its root (Grow, Deepen), or the children of every path that
    it named (Expand)."""

    job: int
    request: int
    guesses: DraftedTree | Children
