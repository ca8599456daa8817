"""How requests share passes of the stages, in virtual time, by what a pass of so many takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from support.tiers import thorough
from support.toy_answers import plain_answer
from support.worlds import FixedDurations, submit, toy_world

from edgespec.backends.charged_time import LoopTime
from edgespec.decoding.flights import Flights
from edgespec.machines.effects import Effect, RunBlock
from edgespec.machines.events import Event
from edgespec.planning.profile import LoopSeconds
from edgespec.sim.links import LinkSpec
from edgespec.sim.toy import ToyCodec
from edgespec.sim.world import World
from edgespec.wire.client_messages import Finished, Submit, Tokens
from edgespec.wire.segment import Choosing, Part

HEAD_S = 0.002


@dataclass
class PassDurations(FixedDurations):
    """A block takes `part` longer for each further request, and `row` for each further row."""

    part: float = 0.0
    row: float = 0.0

    def stage(self, number: int, effect: Effect, done: Event | None) -> float:
        """By what is in it."""
        seconds = super().stage(number, effect, done)
        if not isinstance(effect, RunBlock):
            return seconds
        return seconds + self.part * (len(effect.parts) - 1) + self.row * (len(effect.rows) - 1)


@dataclass
class Played:
    """A world that has answered, and the requests of each segment that had no rows of prompts."""

    world: World
    shares: list[int]

    def middle(self, count: int) -> list[int]:
        """So many of those, when all are in the midst of their answers."""
        end = 3 * len(self.shares) // 4
        return self.shares[end - count : end]

    def times(self, tag: int) -> list[float]:
        """When tokens of an answer came."""
        replies = [r for r in self.world.replies if isinstance(r.message, Tokens)]
        return [r.at for r in replies if r.message.tag == tag for _ in r.message.token_ids]

    def seconds(self, tags: Sequence[int], first: int, last: int) -> float:
        """From the `first` token of the slowest of these answers to its `last` one."""
        return max(self.times(tag)[last] - self.times(tag)[first] for tag in tags)


def play(
    asks: Sequence[Submit],
    durations: PassDurations,
    monkeypatch: pytest.MonkeyPatch,
    link: LinkSpec | None = None,
    late: Sequence[tuple[Submit, float]] = (),
) -> Played:
    """All texts are those of the requests alone."""
    shares: list[int] = []
    launch = Flights.launch

    def counted(
        flights: Flights, parts: Sequence[Part], choosing: Sequence[Choosing | None], now: float
    ) -> object:
        if not any(part.committed for part in parts):
            shares.append(len(parts))
        return launch(flights, parts, choosing, now)

    monkeypatch.setattr(Flights, "launch", counted)
    count = len(asks) + len(late)
    world = toy_world(
        durations, link, prefill_chunk=64, live=count, row_limits=[5000] * len(durations.stages)
    )
    for ask, at in [*((ask, 0.0) for ask in asks), *late]:
        world.submit(ask, at)
    world.run()
    ends = {r.message.tag: r.message for r in world.replies if isinstance(r.message, Finished)}
    for ask in [*asks, *(ask for ask, _ in late)]:
        right = plain_answer(ToyCodec(), ask, len(durations.stages), 2000)
        assert ends[ask.tag].token_ids == right.token_ids
    return Played(world, shares)


def asks(count: int, tokens: int = 40) -> list[Submit]:
    """So many plain ones."""
    return [submit(tag, "abcdefg"[: tag % 7 + 1], tokens) for tag in range(count)]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("loop", [thorough(None), 0.0002])
def test_a_pass_that_costs_the_same_for_many_is_filled_up(
    stages: int, loop: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many segments go round as there are stages, each full: a round takes a pass of each stage,
    and the head. With a place for D0 it would take one pass more."""
    time = LoopTime(LoopSeconds(loop, 0.0, "a test")) if loop else None
    durations = PassDurations([0.02] * stages, head=HEAD_S, part=0.0002, loop=time)
    played = play(asks(6 * stages), durations, monkeypatch)
    assert played.middle(15 * stages) == [6] * 15 * stages
    a_round = stages * 0.021 + HEAD_S + 20 * (loop or 0.0)
    assert played.seconds(range(6 * stages), 15, 35) < 20 * 1.05 * a_round


def test_two_segments_alternate_where_a_pass_costs_by_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then the stage is never idle, and nothing were gained by one pass of all."""
    durations = PassDurations([0.004], head=0.02, part=0.01)
    played = play(asks(8), durations, monkeypatch)
    assert played.middle(20) == [4] * 20
    assert played.seconds(range(8), 15, 35) < 20 * 1.02 * 2 * 0.034


def test_two_segments_alternate_over_slow_links(monkeypatch: pytest.MonkeyPatch) -> None:
    durations = PassDurations([0.02], head=HEAD_S, part=0.0002)
    played = play(asks(8), durations, monkeypatch, LinkSpec(0.03))
    assert played.middle(20) == [4] * 20


def test_none_is_starved_while_others_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of any length come beside answers: no token waits for more than what a round with
    the longest chunks takes, and prompts are read at 0.6 of their rate alone at least."""
    durations = PassDurations([0.01, 0.012], head=HEAD_S, part=0.001, row=0.001)
    late = [(submit(10 + n, "a" * (40 + 30 * n), 20), 0.3 + 0.05 * n) for n in range(6)]
    played = play(asks(5, 80), durations, monkeypatch, late=late)
    a_pass = 0.012 + 10 * 0.002
    for tag in [*range(5), *range(10, 16)]:
        times = played.times(tag)
        assert max(b - a for a, b in pairwise(times)) < 3 * 4.2 * a_pass, tag
    alone = sum(len(ask.prompt) for ask, _ in late) / 32 * (0.011 + 32 * 0.001)
    assert max(played.times(tag)[0] for tag in range(10, 16)) - 0.3 < alone / 0.6


@pytest.mark.parametrize("row", [thorough(0.0002), 0.001, thorough(0.004)])
def test_a_prompt_beside_answers_is_read_at_a_rate_that_the_device_shows(
    row: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least 0.65 of the rows a second that it has alone, and the answers keep about a quarter of
    their pace; where a row is so cheap that this binds, all of it."""
    prompt = submit(9, "a" * 400, 2)

    def reading(others: int) -> tuple[float, Played]:
        durations = PassDurations([0.02], head=HEAD_S, part=0.0005, row=row)
        late = [(submit(8, "abc", 5), 0.0), (prompt, 0.6)]
        with pytest.MonkeyPatch.context() as patch:
            played = play(asks(others, 150), durations, patch, late=late)
        return played.times(9)[0] - 0.6, played

    (alone, _), (beside, played) = reading(0), reading(4)
    share = alone / beside
    assert share > 0.65
    gaps = [b - a for tag in range(4) for a, b in pairwise(played.times(tag)) if b > 0.6]
    usual = 0.02 + 4 * (0.0005 + row) + HEAD_S
    assert max(gaps) < 4.4 * usual + 8 * row
