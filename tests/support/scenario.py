"""Scenario: everything that a run follows from, as plain data; drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

from msgspec import structs
from support.faults import (
    Bent,
    Change,
    Crash,
    Delay,
    Duplicate,
    Fault,
    Late,
    Lose,
    SlowStage,
    SmallCache,
)

from edgespec.errors import ConfigError
from edgespec.policy.base import Policy
from edgespec.policy.registry import POLICIES, policy_named
from edgespec.schema import FileStruct
from edgespec.sim.links import LinkSpec, Network
from edgespec.sim.toy import VOCABULARY
from edgespec.wire.client_messages import Submit

LETTERS = "abcdefghij"
_SMALL = {"nodes": 10, "depth": 3, "levels": 2, "width": 3, "longest": 3}
"""Parameters of a policy by the last word of their names, and the most a small variant takes."""


class Setting(FileStruct, frozen=True):
    """One parameter of a policy that is not what its paper has."""

    name: str
    value: int


class ScenarioRequest(FileStruct, frozen=True):
    """One request: what is asked when (virtual seconds), and when its client gives up, if ever."""

    tag: int
    at: float
    cancel_at: float | None
    prompt: str
    max_new_tokens: int
    seed: int
    stop: tuple[str, ...]
    policy: str
    settings: tuple[Setting, ...] = ()

    @property
    def policy_name(self) -> str:
        """The name under which this request's policy is known while the run lasts."""
        return f"{self.policy}#{self.tag}" if self.settings else self.policy

    def submit(self, temperature: float = 0.0) -> Submit:
        """The message of this request."""
        return Submit(
            *(self.tag, self.prompt, self.max_new_tokens, temperature, 0, 1.0, 0.0),
            *(self.seed, self.stop, self.policy_name),
        )


class Scenario(FileStruct, frozen=True):
    """One run of a toy ring.

    `accuracy`: how often the draft knows the next token. Paces are mean seconds of one effect at
    the head, the draft and each stage; `layers`: parts of each stage's block between which it can
    be stopped. `recovery`: seconds that a request waits for a ring that was lost. `head_last`: the
    output head is on the last stage. `live`: requests that are answered at once, at most.
    `kept_rows`: cache rows that they and answered ones may take up together; 0: nothing is kept.
    `hybrid`: the bundled hybrid computes, and every second request is sampled.
    """

    seed: int
    accuracy: float
    eos_ids: tuple[int, ...]
    prefill_chunk: int
    context_length: int
    head_pace: float
    draft_pace: float
    stage_paces: tuple[float, ...]
    layers: tuple[int, ...]
    network: Network
    faults: tuple[Fault, ...]
    asks: tuple[ScenarioRequest, ...]
    recovery: float = 60.0
    head_last: bool = False
    live: int = 1
    kept_rows: int = 0
    hybrid: bool = False

    @property
    def stages(self) -> int:
        """Stages of the ring."""
        return len(self.stage_paces)


@contextmanager
def policies_of(scenario: Scenario) -> Iterator[None]:
    """While this lasts, the coordinator knows the scenario's variants of policies by name."""
    variants: dict[str, Policy] = {}
    for ask in scenario.asks:
        if ask.settings:
            given = {setting.name: setting.value for setting in ask.settings}
            policy: Any = policy_named(ask.policy)
            if not given.keys() <= _parameters(policy).keys():
                raise ConfigError(f"policy {ask.policy} has no parameters {sorted(given)}")
            variants[ask.policy_name] = replace(policy, **given)
    POLICIES.update(variants)
    try:
        yield
    finally:
        for name in variants:
            del POLICIES[name]


def draw(seed: int) -> Scenario:
    """The scenario of that seed; the same for the same registry of policies."""
    rng = random.Random(f"{seed} scenario")
    stages = rng.choice((1, 1, 2, 2, 3, 4, 5, 8))
    base = rng.choice((0.001, 0.01, 0.1))
    paces = tuple(base * rng.choice((0.0, 0.05, 1.0, 1.0, 1.0, 20.0)) for _ in range(stages + 2))
    span = base * 25 * (stages + 1)  # about as long as a request takes
    faults = _draw_faults(rng, stages, base, span) + _draw_changes(seed, base, span)
    # Of dice of their own, as the changes.
    together = random.Random(f"{seed} live")
    live = together.choice((1, 1, 2, 3, 5))
    keeps = random.Random(f"{seed} kept")
    kept_rows = keeps.choice((0, 0, 700, 3000))
    return Scenario(
        seed=seed,
        accuracy=rng.choice((0.0, 0.3, 0.7, 0.9, 1.0)),
        eos_ids=tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 1, 3)))),
        prefill_chunk=rng.randint(1, 8),
        context_length=rng.choice((2000, 2000, 2000, 16)),
        head_pace=paces[0],
        draft_pace=paces[1],
        stage_paces=paces[2:],
        layers=tuple(rng.choice((1, 2, 4, 11)) for _ in range(stages)),
        network=_draw_network(rng, stages, base),
        faults=faults + draw_losses(seed, 0.2),
        asks=_with_preambles(
            keeps, kept_rows, _draw_asks(rng, span, faults) + _draw_company(together, live, span)
        ),
        recovery=rng.choice((60.0, 60.0, 60.0, base * 5.0, 0.0)),
        head_last=random.Random(f"{seed} head").random() < 0.3,
        live=live,
        kept_rows=kept_rows,
    )


def draw_hybrid(seed: int) -> Scenario:
    """That of `draw`, computed by the bundled hybrid: texts so long that rows become states, few
    stages, of which each has layers."""
    scenario, rng = draw(seed), random.Random(f"{seed} hybrid")
    stages = min(scenario.stages, 5)
    preamble = "".join(rng.choices(LETTERS, k=80))
    asks = tuple(
        structs.replace(
            ask,
            prompt=preamble[: rng.randint(30, 80)] + ask.prompt[-12:],
            max_new_tokens=rng.randint(1, 16),
        )
        for ask in scenario.asks[:3]
    )
    network = scenario.network
    return structs.replace(
        scenario,
        hybrid=True,
        asks=asks,
        context_length=rng.choice((2000, 2000, 100)),
        prefill_chunk=rng.choice((5, 16, 64)),
        stage_paces=scenario.stage_paces[:stages],
        layers=scenario.layers[:stages],
        network=Network(
            network.ring[:stages] + network.ring[-1:],
            network.to_stages[:stages],
            network.from_stages[:stages],
        ),
        faults=tuple(f for f in scenario.faults if getattr(f, "stage", 1) <= stages),
    )


def draw_losses(seed: int, share: float) -> tuple[Fault, ...]:
    """Segments that are lost or wrong, in a `share` of all scenarios; of dice of their own."""
    rng = random.Random(f"{seed} losses")
    if rng.random() >= share:
        return ()
    shares = [rng.choice((0.001, 0.005)) for _ in range(2)]
    known = (Lose("segment", shares[0]), Bent(shares[1]))
    return known[: rng.choice((1, 1, 2))] if rng.random() < 0.8 else known[1:]


def _draw_network(rng: random.Random, stages: int, base: float) -> Network:
    def link() -> LinkSpec:
        return LinkSpec(
            latency=base * rng.choice((0.0, 0.1, 1.0, 1.0, 5.0)),
            bytes_per_second=rng.choice((0.0, 0.0, 1e5)) / base / 100,
            jitter=base * rng.choice((0.0, 0.0, 1.0, 10.0)),
            loss=rng.choice((0.0, 0.0, 0.05, 0.3)),
            retry_after=base * rng.choice((2.0, 20.0)),
        )

    if rng.random() < 0.3:
        return Network.even(stages, link(), link())
    return Network(
        tuple(link() for _ in range(stages + 1)),
        tuple(link() for _ in range(stages)),
        tuple(link() for _ in range(stages)),
    )


def _draw_faults(rng: random.Random, stages: int, base: float, span: float) -> tuple[Fault, ...]:
    def some_stage() -> int:
        return rng.randint(1, stages)

    faults: list[Fault] = []
    if rng.random() < 0.3:
        faults.append(Delay(rng.choice((0.02, 0.3)), base * rng.choice((5.0, 50.0))))
    if rng.random() < 0.4:
        faults.append(Duplicate(rng.choice((0.1, 0.5)), base * rng.choice((0.0, 5.0, 50.0))))
    if rng.random() < 0.5:
        faults.append(Lose("retain", rng.choice((0.15, 0.5, 1.0))))
    if rng.random() < 0.3:
        faults.append(Late(rng.choice((0.2, 1.0)), base * rng.choice((5.0, 50.0))))
    if rng.random() < 0.3:
        start = rng.random() * span
        faults.append(SlowStage(some_stage(), rng.choice((3.0, 30.0)), start, start + span / 2))
    if rng.random() < 0.05:
        faults.append(SmallCache(some_stage(), rng.randint(1, 30)))
    faults += _draw_crashes(rng, stages, base, span)
    return tuple(faults)


def _draw_crashes(rng: random.Random, stages: int, base: float, span: float) -> list[Crash]:
    """Mostly none; some at any time, some soon after another: while it is not noticed, while the
    ring is not back, or while the requests are read again."""
    crashes: list[Crash] = []
    for _ in range(rng.choice((0,) * 12 + (1, 1, 2, 3, 5))):
        noticed, restart = base * rng.choice((0.0, 10.0)), base * rng.choice((0.0, 1.0, 20.0))
        at = rng.random() * span
        if crashes and rng.random() < 0.6:
            last = crashes[-1]
            at = last.at + rng.random() * 2 * (last.noticed_after + last.restart_after + base)
        crashes.append(Crash(rng.randint(1, stages), at, noticed, restart))
    return crashes


def _draw_changes(seed: int, base: float, span: float) -> tuple[Change, ...]:
    """Mostly none. Of dice of their own, so that what else a seed gives is what it gave before."""
    rng = random.Random(f"{seed} changes")
    return tuple(
        Change(rng.random() * span, base * rng.choice((0.1, 5.0)), base * rng.choice((0.0, 20.0)))
        for _ in range(rng.choice((0,) * 6 + (1, 2)))
    )


def _draw_asks(
    rng: random.Random, span: float, faults: tuple[Fault, ...]
) -> tuple[ScenarioRequest, ...]:
    crashes = [f for f in faults if isinstance(f, Crash)]
    back_up = max((c.at + c.noticed_after + c.restart_after for c in crashes), default=0.0)
    asks = []
    for tag in range(rng.choice((1, 1, 2, 3)) + bool(crashes)):
        at = 0.0 if tag == 0 or rng.random() < 0.3 else rng.random() * span
        if crashes and tag > 0 and rng.random() < 0.7:
            at = back_up + rng.random() * span / 10  # the ring is up again: this one must succeed
        asks.append(_draw_ask(rng, tag, at, span))
    return tuple(asks)


def _draw_company(rng: random.Random, live: int, span: float) -> tuple[ScenarioRequest, ...]:
    """More requests, where several may be live, most of them at the beginning."""
    most = 2 * (live - 1)
    times = [0.0 if rng.random() < 0.6 else rng.random() * span for _ in range(most)]
    return tuple(_draw_ask(rng, 100 + number, at, span) for number, at in enumerate(times))


def _with_preambles(
    rng: random.Random, kept_rows: int, asks: tuple[ScenarioRequest, ...]
) -> tuple[ScenarioRequest, ...]:
    """The same requests, in front of most prompts more or less of one preamble, if rows are kept;
    and one more that comes late."""
    if not kept_rows:
        return asks
    preamble = "".join(rng.choices(LETTERS, k=rng.randint(40, 120)))
    last = structs.replace(asks[-1], tag=200, at=3 * asks[-1].at, cancel_at=None)
    return tuple(
        structs.replace(ask, prompt=preamble[: rng.choice((0, 30, 60, 120, 120))] + ask.prompt)
        for ask in (*asks, last)
    )


def _draw_ask(rng: random.Random, tag: int, at: float, span: float) -> ScenarioRequest:
    stops = ["".join(rng.choices(LETTERS, k=rng.randint(1, 3))) for _ in range(3)]
    policy, settings = _draw_policy(rng)
    return ScenarioRequest(
        tag=tag,
        at=at,
        cancel_at=at + rng.random() * span if rng.random() < 0.15 else None,
        prompt="".join(rng.choices(LETTERS, k=rng.randint(1, 12))),
        max_new_tokens=rng.randint(1, 16),
        seed=rng.randint(0, 3),
        stop=tuple(stops[: rng.choice((0, 0, 1, 3))]),
        policy=policy,
        settings=settings,
    )


def _draw_policy(rng: random.Random) -> tuple[str, tuple[Setting, ...]]:
    """A published policy, mostly in a small variant: it costs little and crowds every limit."""
    names = sorted(name for name in POLICIES if "#" not in name)
    drafting = [name for name in names if POLICIES[name].drafts]
    name = rng.choice(names if rng.random() < 0.3 else drafting)
    if rng.random() < 0.05:
        return name, ()
    settings = []
    for parameter, value in _parameters(POLICIES[name]).items():
        most = _SMALL.get(parameter.rpartition("_")[2])
        if most is not None and type(value) is int:
            settings.append(Setting(parameter, rng.randint(1, most)))
    return name, tuple(settings)


def _parameters(policy: Any) -> dict[str, Any]:
    """A policy's parameters and their values; none if it is no dataclass."""
    known = fields(policy) if is_dataclass(policy) else ()
    return {parameter.name: getattr(policy, parameter.name) for parameter in known}
