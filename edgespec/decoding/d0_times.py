"""D0 times: what the coordinator's device is at, and what its heads and drafts take.

Its worker does one thing after another, heads first, and in the middle of a draft too. Heads that
wait may run as one pass, and so may drafts: they then end at one time, and what they took is learnt
once, for all their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.policy.estimates import RingEstimates
from edgespec.policy.row_times import RowTimes

Owner = tuple[int, int]
"""The numbers of a request and of one of its jobs."""


@dataclass(slots=True)
class _Work:
    """`rows`: 0 if what it takes says nothing."""

    rows: int
    asked: float
    estimates: RingEstimates

    def adds(self, rows: int) -> None:
        """It had so many rows more than were asked for."""
        self.rows += rows if self.rows else 0

    def says_nothing(self) -> None:
        """What it takes does not."""
        self.rows = 0


class _Lane:
    """Work of one kind, in order: what waits or is at work, and the pass that ended last."""

    def __init__(self, times: Callable[[RingEstimates], RowTimes]) -> None:
        self._times = times
        self._ended: list[_Work] = []  # of one pass, as far as known
        self._seconds = 0.0
        self._end = 0.0
        self.open: dict[Owner, _Work] = {}

    @property
    def began(self) -> float:
        """When the oldest open one can have begun: not before the one before it ended."""
        return max(next(iter(self.open.values())).asked, self._end)

    def asked(self, owner: Owner, rows: int, estimates: RingEstimates, now: float) -> None:
        """It shall work on so many rows; 0 if what that takes says nothing."""
        self.open[owner] = _Work(rows, now, estimates)

    def stalled(self) -> None:
        """What the open ones take says nothing."""
        for work in self.open.values():
            work.says_nothing()

    def forget(self, request: int) -> None:
        """Nobody waits for what is open of that request."""
        self.open = {owner: work for owner, work in self.open.items() if owner[0] != request}

    def ends(self, owner: Owner, seconds: float, now: float, further: int = 0) -> None:
        """A work has ended now, with so many rows more than were asked for; if it was a pass of its
        own, that took so long."""
        work = self.open.pop(owner)
        work.adds(further)
        if self._ended and now > self._end:
            self._learn()
        if not self._ended:
            self._seconds = seconds
        self._end = now
        self._ended.append(work)
        # Whatever waited with it may have been in its pass: it then ends now, too.
        if not any(other.asked < now for other in self.open.values()):
            self._learn()

    def _learn(self) -> None:
        ended, self._ended = self._ended, []
        if all(work.rows for work in ended):
            rows = sum(work.rows for work in ended)
            for estimates in {id(work.estimates): work.estimates for work in ended}.values():
                self._times(estimates).record(rows, self._seconds)


class D0Times:
    """The books of one coordinator's heads and drafts; `own_stage`: see CoordinatorSettings."""

    def __init__(self, own_stage: int = 0) -> None:
        self.own_stage = own_stage
        self.heads = _Lane(lambda estimates: estimates.head)
        self.drafts = _Lane(lambda estimates: estimates.draft)
        self._draft_ended = 0.0
        self._head_seconds = 0.0  # how long heads were at work since the running draft began

    def __len__(self) -> int:
        return len(self.heads.open) + len(self.drafts.open)

    def head_ended(self, owner: Owner, now: float) -> None:
        """The head has looked at its rows: learn what that took, and how long it kept drafts
        waiting."""
        # A head that came in a draft's last part waited for the end of that.
        began = max(self.heads.began, self._draft_ended)
        if self.drafts.open:
            self._head_seconds += now - max(min(began, now), self.drafts.began)
        self.heads.ends(owner, now - began, now)

    def draft_ended(self, owner: Owner, now: float, further: int = 0) -> None:
        """The draft source has worked, and guessed below so many nodes more than it was asked:
        learn what that took, without the heads that went before it meanwhile."""
        seconds = max(now - self.drafts.began - self._head_seconds, 0.0)
        self.drafts.ends(owner, seconds, now, further)
        self._draft_ended, self._head_seconds = now, 0.0

    def stages_ran(self, ran: Sequence[tuple[int, float]]) -> None:
        """Each stage in turn computed so many rows in so many seconds. Drafts that are not done
        have waited for the one on this device: what they take says nothing of a pass."""
        if 0 < self.own_stage <= len(ran):
            self.drafts.stalled()

    def forget(self, request: int) -> None:
        """The request has ended: what is still at work for it is not waited for."""
        self.heads.forget(request)
        self.drafts.forget(request)
