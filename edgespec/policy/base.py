"""The policy interface: what to grow and send next, decided from a view, changing nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from edgespec.policy.estimates import RingEstimates
from edgespec.policy.pace import Way
from edgespec.tree.draft_tree import DraftTree


@dataclass(slots=True)  # to freeze it would double what it takes to make one for each event
class RequestView:
    """What a policy sees of one request.

    `in_flight`: its segments on the ring, those included that are back and wait for their turn.
    `verifying`: results that the head has not done yet. `drafting`: the draft source is at work.
    `drafted_root`: the root below which the last finished draft grew. `exhausted`: growing that
    draft deeper gave nothing new. `depth_left`: levels below the root whose target tokens could
    still be used. `queued`: segments that the first stage has not handed on yet. `ahead`: rows of
    the segment sent last, 0 after a miss and while the root is unsent. `estimates`: what was learnt
    of the ring and the draft source. `own_stage`: the stage on the draft source's device, 0: none;
    its work goes first there. `way`: what is worth guessing for this request (policy.pace).
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
    own_stage: int = 0
    way: Way = Way.ALL


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
    """Draft `width` children of each of these nodes and merge the `keep` best of them all.

    A source to which further levels cost no pass expands the best of its guesses too, by the
    score of their whole path: until `most` nodes are expanded, and none below the score `least`.
    `free`: only what takes no pass of a model is guessed.
    """

    ids: tuple[int, ...]
    width: int
    keep: int
    most: int = 0
    least: float = 0.0
    free: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send these nodes as one segment."""

    ids: tuple[int, ...]


Plan = Grow | Deepen | Expand
"""What the draft source is asked to guess."""

Decision = Plan | Send


class Results(Enum):
    """When a policy wants results taken up, and the tree walked: `EACH` as it comes; `IN_STEP`:
    only when the draft that the result before it called for is done and its segments have left, as
    in lock-step; `TOGETHER`: when all segments are back."""

    EACH = auto()
    IN_STEP = auto()
    TOGETHER = auto()


class Policy(ABC):
    """Decides what to guess and to send for one request; a policy of one's own defines `decide`.

    Pure: the same view gives the same decisions; it never asks which draft source there is.

    `drafts`: it needs a draft source. `results`: see Results. `waits_for_credit`: it is also asked
    when the first stage has handed on a segment; without it, `queued` must not be used.
    `starts_with_prompt`: it guesses the first token too, while the prompt is on its way: the root
    is then the prompt's last token. `prompts_first`: of several live requests, those whose prompts
    wait to be sent go before all that decode.
    """

    drafts: ClassVar[bool] = True
    results: ClassVar[Results] = Results.EACH
    waits_for_credit: ClassVar[bool] = False
    starts_with_prompt: ClassVar[bool] = False
    prompts_first: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What requests and results call it."""
        return type(self).__name__.lower()

    @property
    def pool(self) -> Pooled | None:
        """Itself, if rows and guesses of several requests compete by it."""
        return self if isinstance(self, Pooled) else None

    def window(self, stages: int) -> int:
        """How many segments may be in flight at once (credits): one a stage, and one on its way."""
        return stages + 1

    @abstractmethod
    def decide(self, view: RequestView) -> list[Decision]:
        """What to do now; called after every event of the request."""


class Pooled(Policy):
    """A policy for which rows and guesses of several live requests compete.

    Expanded guesses are scored by how often guesses of their score were right, and get all that is
    certain below them at once: it does not go by levels.
    """

    @abstractmethod
    def best_rows(
        self, views: Sequence[RequestView], ahead: int, roots: int, beside: int = 0
    ) -> list[tuple[int, ...]]:
        """Nodes of each request to send in one segment, with so many new roots at most, beside so
        many rows of a prompt; `ahead`: rows of the segment before it."""

    @abstractmethod
    def best_nodes(self, views: Sequence[RequestView]) -> list[Expand | None]:
        """What to expand of each request in one pass of the draft."""
