"""edgespec replay: recorded requests again in virtual time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from edgespec.bench.load import Load
from edgespec.bench.recorded import (
    Replayed,
    prompts_of,
    read_recording,
    replay_recording,
)
from edgespec.bench.setup import Setup
from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.simulate import USUAL_RING, SimulatedRing
from edgespec.cli.tables import show_table
from edgespec.config import DEFAULT_LIVE
from edgespec.door.asking import USUAL
from edgespec.plugins import known_policies
from edgespec.policy.registry import policy_named
from edgespec.wire.client_messages import Finished

_COLUMNS = ("came at", "policy", "prompt", "new", "recorded tok/s", "virtual tok/s", "tokens")


@options.grouped
def replay(
    file: Path = typer.Argument(
        metavar="FILE",
        help="What `edgespec serve --record` wrote.",
    ),
    ring: SimulatedRing = USUAL_RING,
    policy: str = typer.Option("", help="The policy of all requests. Default: as recorded."),
    live: int | None = typer.Option(
        None,
        metavar="K",
        help=f"Requests that are answered at once. Default: {DEFAULT_LIVE}, as a coordinator has "
        "it.",
    ),
    seed: int = typer.Option(0, help="Of the noise of links and jobs."),
    as_json_object: bool = options.JSON,
) -> None:
    """Play recorded requests again on a simulated ring, each when it came and as it was asked.

    Their tokens are compared with the recorded ones.
    """
    load = Load(DEFAULT_LIVE if live is None else live)
    (policy,) = known_policies([policy])
    if policy:
        policy_named(policy)
    notes, recorded = Notes(), read_recording(file)
    setup = ring.setup(prompts_of(recorded), replace(USUAL, seed=seed), load, notes)
    with notes.waiting(f"playing {len(recorded)} request(s) again"):
        played = replay_recording(setup, recorded, policy)
    if as_json_object:
        print(json.dumps({"requests": [_as_json(p) for p in played], "settings": setup.settings()}))
        return
    rows = map(_cells, played)
    show_table(_COLUMNS, rows, *_summary(setup, played), left=("policy", "tokens"))


def _cells(played: Replayed) -> tuple[str, ...]:
    recorded, end = played.recorded, played.end
    came = f"{recorded.after:.2f} s"
    before = _speed(len(recorded.token_ids or ()), recorded.seconds)
    if not isinstance(end, Finished):
        return came, recorded.submit.policy, "", "", before, "", f"failed: {end.reason}"
    same = {None: f"({recorded.outcome})", True: "as recorded", False: "OTHERS"}[played.same]
    counts = str(end.prompt_tokens), str(end.new_tokens)
    return came, end.policy, *counts, before, _speed(end.new_tokens, end.seconds), same


def _speed(tokens: int, seconds: float | None) -> str:
    return f"{tokens / seconds:.2f}" if seconds else "-"


def _summary(setup: Setup, played: Sequence[Replayed]) -> list[str]:
    compared = [p.same for p in played if p.same is not None]
    names = list(dict.fromkeys(profile.name for profile in setup.profiles))
    return [
        f"charged: {setup.cost_model.name}; D0 and {setup.stages} stage(s), {', '.join(names)}; "
        "virtual times are from these figures and not measured",
        f"{len(played)} request(s), {sum(compared)} of {len(compared)} answers with the "
        "tokens that were recorded",
    ]


def _as_json(played: Replayed) -> dict[str, object]:
    recorded, end = played.recorded, played.end
    told: dict[str, object] = {
        "after": recorded.after,
        "outcome": recorded.outcome,
        "recorded_seconds": recorded.seconds,
        "same": played.same,
    }
    if not isinstance(end, Finished):
        return {**told, "failed": end.reason}
    return {
        **told,
        "policy": end.policy,
        "prompt_tokens": end.prompt_tokens,
        "cached_tokens": end.cached_tokens,
        "new_tokens": end.new_tokens,
        "virtual_seconds": end.seconds,
        "first_token_seconds": end.first_token_seconds,
        "trips": end.trips,
        "token_ids": list(end.token_ids),
    }
