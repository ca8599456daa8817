"""Report: figures of policies that answered the same prompts, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest

from edgespec.bench.load import Course, Load, LoadFigures, load_figures, span
from edgespec.types.record import as_dict
from edgespec.wire.client_messages import Finished, SourceFigures

REFERENCE = "autoregressive"
"""Every policy must give the tokens of this one."""
RIVAL = "naive_tree"
"""The baseline of pipelined policies."""

ALONE = "alone"
"""The reference's answers, each request alone on the ring: under load its tokens are the right
ones."""


@dataclass(frozen=True, slots=True)
class Played:
    """One policy's answers to all prompts, in order.

    `elapsed`: virtual seconds from the first submission until the ring was empty; `busy`: seconds
    in which D0, V1 … VN computed. `load`: under which; `courses`: of each answer under it. `loop`:
    seconds that D0's own loop was charged, None where it was not.
    """

    answers: tuple[Finished, ...]
    elapsed: float
    busy: tuple[float, ...]
    load: Load | None = None
    courses: tuple[Course, ...] = ()
    loop: float | None = None

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        return [answer.token_ids for answer in self.answers]

    @property
    def seconds(self) -> float:
        """In which the answers were made; of answers that come at once, together."""
        if self.courses:
            return span(self.courses)
        return sum(answer.seconds for answer in self.answers)

    @property
    def speed(self) -> float:
        """New tokens per second of all answers, prefill included."""
        return _ratio(sum(answer.new_tokens for answer in self.answers), self.seconds)


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's figures (docs/figures.md); None where the other policy could not run.

    `load`: those of answers under load, None without one.
    """

    policy: str
    draft: str
    stages: int
    profile: str
    cost_model: str
    prompts: int
    new_tokens: int
    virtual_seconds: float
    tokens_per_second: float
    first_token_seconds: float
    decode_tokens_per_second: float
    trips: float
    tokens_per_trip: float
    coordinator_busy: float
    loop_ms_per_token: float | None
    stage_busy: tuple[float, ...]
    rows_sent: int
    rows_wasted: int
    misses: int
    accepted_histogram: tuple[int, ...]
    sources: tuple[SourceFigures, ...]
    exact: bool
    speedup_vs_autoregressive: float
    speedup_vs_naive_tree: float | None
    load: LoadFigures | None = None

    def as_dict(self) -> dict[str, object]:
        """The figures by their names; those of a load among the others."""
        figures = asdict(self)
        figures["sources"] = [as_dict(one) for one in self.sources]
        of_load = figures.pop("load") or {}
        return {**figures, **of_load}


def run_of(
    policy: str, results: Mapping[str, Played], profiles: Sequence[str], cost_model: str
) -> Run:
    """One policy's figures. `results` has REFERENCE and, if it could run, RIVAL too; under load
    ALONE as well.

    `profiles`: the names of the devices, D0's first.
    """
    played = results[policy]
    answers = played.answers
    new_tokens = sum(answer.new_tokens for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    first = sum(answer.first_token_seconds for answer in answers)
    trips = sum(answer.trips for answer in answers)
    busy = [_ratio(share, played.elapsed) for share in played.busy]
    histograms = [answer.accepted_histogram for answer in answers]
    rival = results.get(RIVAL)
    return Run(
        policy=policy,
        draft=answers[0].draft,
        stages=len(profiles) - 1,
        profile=profiles[0] if len(set(profiles)) == 1 else ",".join(profiles),
        cost_model=cost_model,
        prompts=len(answers),
        new_tokens=new_tokens,
        virtual_seconds=played.seconds,
        tokens_per_second=played.speed,
        first_token_seconds=first / len(answers),
        decode_tokens_per_second=_ratio(new_tokens - len(answers), seconds - first),
        trips=trips,
        tokens_per_trip=_ratio(new_tokens, trips),
        coordinator_busy=busy[0],
        loop_ms_per_token=None if played.loop is None else 1e3 * _ratio(played.loop, new_tokens),
        stage_busy=tuple(busy[1:]),
        rows_sent=sum(answer.rows_sent for answer in answers),
        rows_wasted=sum(answer.rows_wasted for answer in answers),
        misses=sum(answer.misses for answer in answers),
        accepted_histogram=tuple(map(sum, zip_longest(*histograms, fillvalue=0))),
        sources=_of_sources(answers),
        exact=played.tokens == results.get(ALONE, results[REFERENCE]).tokens,
        speedup_vs_autoregressive=_ratio(played.speed, results[REFERENCE].speed),
        speedup_vs_naive_tree=_ratio(played.speed, rival.speed) if rival else None,
        load=None if played.load is None else load_figures(played.load, played.courses),
    )


def _of_sources(answers: Sequence[Finished]) -> tuple[SourceFigures, ...]:
    """Each draft source's tokens, over all answers."""
    figures = zip(*(answer.sources for answer in answers), strict=True)
    return tuple(
        SourceFigures(
            of_one[0].name, sum(one.accepted for one in of_one), sum(one.alone for one in of_one)
        )
        for of_one in figures
    )


def as_json(runs: Sequence[Run], settings: Mapping[str, object]) -> dict[str, object]:
    """The JSON object of `edgespec simulate --json`."""
    return {"runs": [run.as_dict() for run in runs], "settings": dict(settings)}


COLUMNS = (
    *("policy", "tok/s", "vs AR", "vs naive", "tok/trip", "rows/tok", "wasted"),
    *("miss/100", "D0 busy", "stages busy", "exact"),
)
LOAD_COLUMNS = ("live", "TTFT", "TBT", "TBT p99", "slowest")
"""Behind the others, of runs under load; times in milliseconds."""


def cells(run: Run) -> tuple[str, ...]:
    """A run in COLUMNS, with LOAD_COLUMNS if it was under load; "vs" are ratios of tok/s, miss/100
    is per 100 tokens."""
    rival = run.speedup_vs_naive_tree
    return (
        run.policy,
        f"{run.tokens_per_second:.2f}",
        f"{run.speedup_vs_autoregressive:.2f}×",
        "-" if rival is None else f"{rival:.2f}×",
        f"{run.tokens_per_trip:.2f}",
        f"{_ratio(run.rows_sent, run.new_tokens):.1f}",
        f"{_ratio(run.rows_wasted, run.rows_sent):.0%}",
        f"{100 * _ratio(run.misses, run.new_tokens):.1f}",
        f"{run.coordinator_busy:.0%}",
        f"{min(run.stage_busy):.0%}-{max(run.stage_busy):.0%}",
        "yes" if run.exact else "NO",
        *(() if run.load is None else _load_cells(run.load)),
    )


def _load_cells(load: LoadFigures) -> tuple[str, ...]:
    times = (load.ttft_mean, load.tbt_mean, load.tbt_p99)
    return (
        f"{load.live:.3g}",
        *(f"{seconds * 1e3:.0f}" for seconds in times),
        f"{load.slowest_ratio:.2f}×",
    )


def _ratio(value: float, of: float) -> float:
    return value / of if of > 0 else 0.0
