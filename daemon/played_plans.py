"""Played plans: how fast those of one problem are, by playing them in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.config import HEADS
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.planning import read_config
from edgespec.drafting.choice import parse_draft
from edgespec.planning.architecture import architecture_of
from edgespec.planning.plan import Plan, candidates
from edgespec.planning.problem import Problem
from edgespec.verify.sampling import Sampling

if TYPE_CHECKING:  # torch takes seconds to import
    from edgespec.bench.setup import Setup

SHORT_CONTEXT = 256
"""Cached rows at which plain decoding is compared, and told beside that at a full context."""

CLEARLY = 1.03
"""So many times as fast is faster: less says nothing of other texts."""

NEW_TOKENS = 24
"""Of each question that is played."""

ANSWER = 128
"""Tokens of the answers for which speeds are told."""

QUESTIONS = (
    "Question: Nina buys 4 bags of apples with 6 apples in each bag. She eats 5 apples. How many "
    "apples are left?\nAnswer:",
    "Question: A bus has 40 seats. 3 groups of 9 children get on. How many seats stay free?\n"
    "Answer:",
)
"""Written for this; no benchmark reports on them."""


@dataclass(frozen=True, slots=True)
class PlayedPlan:
    """A plan, and tokens a second: `plain`, by the cost model; `guessing`: of `adaptive` in virtual
    time with the bundled pair, which guessed `right` of its tokens (a share); None where it was not
    played."""

    plan: Plan
    plain: float
    guessing: float | None = None
    right: float = 1.0

    @property
    def speed(self) -> float:
        """Of the two, what the plan is for."""
        return self.plain if self.guessing is None else self.guessing

    def break_even(self, other: PlayedPlan) -> float | None:
        """The share of its tokens that must be guessed right for this to be faster than the other
        way; None if there is none between 0 and 1.

        A token's seconds are taken to fall evenly from plain decoding to what was played, of both
        as guesses get better.
        """
        behind = 1 / self.plain - 1 / other.plain
        gains = [1 / way.plain - 1 / way.speed for way in (self, other)]
        share = self.right * behind / (gains[0] - gains[1]) if gains[0] > gains[1] else -1.0
        return share if 0 < share < 1 else None


def fastest_plans(
    problem: Problem,
    heads: Sequence[str],
    needs_draft: bool = True,
    news: Callable[[int], None] = lambda done: None,
) -> list[PlayedPlan]:
    """Plans that may be the fastest (planning.plan.candidates), the fastest first: by virtual time
    with a draft, by plain decoding without; what is simpler before what is not CLEARLY faster: a
    board alone, the ring that the formula has chosen, any other. `news(done)`: how many answers
    were played. Takes seconds.

    Where one of them cannot be played (see _setup), the formula's choice comes first. Raises as
    `candidates`.
    """
    plans = candidates(problem, heads, needs_draft)
    setups = [_setup(plan) for plan in plans]
    wanted = [setup for setup in setups if setup is not None]
    played = iter(_play(wanted, news)) if wanted else iter(())
    found = [
        PlayedPlan(plan, 1 / plan.trip_seconds(SHORT_CONTEXT), *(next(played) if setup else ()))
        for plan, setup in zip(plans, setups, strict=True)
    ]
    unplayed = any(way.plan.problem.model.draft.name and way.guessing is None for way in found)
    if unplayed:
        return found
    ring = plans[0]

    def worth(way: PlayedPlan) -> float:
        simplicity = 1 if way.plan.is_alone else 0 if way.plan is ring else -1
        return way.speed * CLEARLY**simplicity

    return sorted(found, key=worth, reverse=True)


def _play(setups: Sequence[Setup], news: Callable[[int], None]) -> Iterator[tuple[float, float]]:
    """Tokens a second in answers of ANSWER tokens, and which share of the tokens was guessed."""
    from edgespec.bench.simulated import play_each

    for played in play_each([(setup, "adaptive") for setup in setups], news):
        answers = played.answers
        tokens = sum(answer.new_tokens for answer in answers)
        first = sum(answer.first_token_seconds for answer in answers)
        each = (played.seconds - first) / (tokens - len(answers))
        misses = sum(answer.misses for answer in answers)
        yield ANSWER / (first / len(answers) + (ANSWER - 1) * each), 1 - misses / tokens


def _setup(plan: Plan) -> Setup | None:
    """What plays the plan's draft on it; None without a draft, or without bundled weights for it,
    and for a draft that takes rows of the base, with more stages than the bundled model has
    layers."""
    from edgespec.bench.setup import Setup
    from edgespec.bench.workloads import Prompt

    base = bundled("base")
    layers = architecture_of(*read_config(base)).layers
    of = plan.problem.model
    if not of.draft.name:
        return None
    # The bundled base ships no head of its own; its EAGLE head reads the same rows.
    choice = parse_draft(of.sources.replace("mtp", "eagle"), bundled)
    if not all(Path(folder).exists() for folder in choice.folders):
        return None
    setup = Setup(
        model=base,
        draft=str(choice),
        dtype="float32" if choice.needs_rows else "float64",  # or looked up: see bench.script
        profiles=tuple(node.device.profile for node in plan.nodes),
        cost_model=of.costs,
        link=None,
        prompts=tuple(Prompt(str(n), "", (text,)) for n, text in enumerate(QUESTIONS)),
        max_new_tokens=NEW_TOKENS,
        sampling=Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0),
        split=plan.split,
        with_stage=plan.with_stage,
        head=HEADS[plan.problem.head_last],
    )
    return setup if setup.is_scripted or len(plan.split) <= layers else None
