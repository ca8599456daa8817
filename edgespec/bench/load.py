"""Load: how many requests come to a ring at once, and how long their tokens took under it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from edgespec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Load:
    """Either `live` requests at once, the next one as soon as one ends, or `arrivals` a second, at
    random times (a Poisson process). Raises ConfigError for anything else."""

    live: int | None = None
    arrivals: float | None = None

    def __post_init__(self) -> None:
        if self.live is not None and self.arrivals is not None:
            raise ConfigError("--live and --arrivals exclude each other; give one of them")
        if self.live is not None and self.live < 1:
            raise ConfigError(f"live is {self.live}; it must be at least 1 request")
        if self.arrivals is not None and not 0 < self.arrivals < math.inf:
            raise ConfigError(
                f"arrivals is {self.arrivals:g}; it must be above 0, in requests a second"
            )

    def times(self, prompts: int, seed: int) -> list[float]:
        """When those that wait for no answer are asked, in seconds; the others follow an answer
        each."""
        if self.arrivals is None:
            return [0.0] * min(self.live or 1, prompts)
        rng = random.Random(f"{seed} arrivals")
        return list(accumulate(rng.expovariate(self.arrivals) for _ in range(prompts)))

    def check_prompts(self, prompts: int, say: Callable[[str], None]) -> None:
        """Say so if there are fewer prompts than requests at once."""
        if self.live is not None and self.live > prompts:
            say(f"there are {prompts} prompts: no more than that are live at once")

    def settings(self) -> dict[str, object]:
        """The settings that a rerun needs."""
        return {"live": self.live, "arrivals": self.arrivals}


@dataclass(frozen=True, slots=True)
class Course:
    """When an answer was asked for, when each of its tokens came, and when it ended, in seconds."""

    asked: float
    tokens: tuple[float, ...]
    ended: float

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next; 0 for tokens that came together."""
        return [after - before for before, after in pairwise(self.tokens)]


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Figures of answers under load (docs/figures.md)."""

    live: float
    ttft_mean: float
    tbt_mean: float
    tbt_p99: float
    slowest_ratio: float


def span(courses: Sequence[Course]) -> float:
    """Seconds from the first question to the end of the last answer."""
    return max(one.ended for one in courses) - min(one.asked for one in courses)


def load_figures(load: Load, courses: Sequence[Course]) -> LoadFigures:
    """What came of that load; `courses`: of all answers, at least one."""
    first = [one.tokens[0] - one.asked for one in courses if one.tokens]
    gaps = sorted(gap for one in courses for gap in one.gaps)
    mean = _mean(gaps)
    slowest = max((_mean(one.gaps) for one in courses), default=0.0)
    seconds = span(courses)
    open_ones = sum(one.ended - one.asked for one in courses) / seconds if seconds else 0.0
    return LoadFigures(
        live=open_ones if load.live is None else load.live,
        ttft_mean=_mean(first),
        tbt_mean=mean,
        tbt_p99=gaps[math.ceil(0.99 * len(gaps)) - 1] if gaps else 0.0,
        slowest_ratio=slowest / mean if mean else 0.0,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
