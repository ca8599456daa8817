"""The policy interface: what to grow and send next, decided from a view, changing nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from edgespec.policy.estimates import RingEstimates
from edgespec.tree.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees of one request.

    `in_flight`: its segments on the ring, those included that are back and wait for their turn.
    `verifying`: results that the head has not done yet. `drafting`: the draft source is at work.
    `drafted_root`: the root below which the last finished draft grew. `exhausted`: growing that
    draft deeper gave nothing new. `depth_left`: levels below the root whose target tokens could
    still be used. `queued`: segments that the first stage has not handed on yet. `ahead`: rows of
    the segment sent last, 0 after a miss and while the root is unsent. `experience`: what is known
    of the ring and the draft source.
    """

    tree: DraftTree
    stages: int
    in_flight: int
    verifying: int
    drafting: bool
    drafted_root: int | None
    exhausted: bool
    depth_left: int
    queued: int
    ahead: int
    estimates: RingEstimates


@dataclass(frozen=True, slots=True)
class Grow:
    """Draft a fresh tree below the root and merge its `keep` best guesses."""

    depth: int
    width: int
    keep: int


@dataclass(frozen=True, slots=True)
class Deepen:
    """Draft `levels` more below the last drafted tree and merge the `keep` best new guesses."""

    levels: int
    width: int
    keep: int


@dataclass(frozen=True, slots=True)
class Expand:
    """Draft `width` children of each of these nodes and merge the `keep` best of them all."""

    ids: tuple[int, ...]
    width: int
    keep: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send these nodes as one segment."""

    ids: tuple[int, ...]


Plan = Grow | Deepen | Expand
"""What the draft source is asked to guess."""

Decision = Plan | Send


class Policy(Protocol):
    """Pure: the same view gives the same decisions; it never asks which draft source there is."""

    @property
    def name(self) -> str:
        """The published name."""

    @property
    def drafts(self) -> bool:
        """Whether it needs a draft source."""

    @property
    def verifies_each_result(self) -> bool:
        """Whether the tree is walked on every result, not only when all segments are back."""

    @property
    def drafts_in_step(self) -> bool:
        """Whether a result is taken up only when the draft that the one before it called for is
        done and its segments have left: one step after the other, as in lock-step."""

    @property
    def calibrates(self) -> bool:
        """Whether expanded guesses are scored by how often their like were right."""

    @property
    def waits_for_credit(self) -> bool:
        """Whether it is asked, too, when the first stage has handed on a segment; if not, `queued`
        is nothing to go by."""

    @property
    def starts_with_prompt(self) -> bool:
        """Whether it guesses the first token too, while the prompt is on its way: the root is then
        the prompt's last token."""

    def window(self, stages: int) -> int:
        """How many segments may be in flight at once (credits)."""

    def decide(self, view: View) -> list[Decision]:
        """What to do now; called after every event of the request."""
