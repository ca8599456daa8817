"""Simulated: policies play the same prompts on a ring in virtual time; real tokens, charged time.

What the models say depends on no policy and on no ring: `simulate` has it computed once for all
policies (bench.together), where the settings let it; `play` computes everything, for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from edgespec.bench.asking import Asking
from edgespec.bench.processes import News, map_in_processes, process_count
from edgespec.bench.report import ALONE, REFERENCE, RIVAL, Played, Run, run_of
from edgespec.bench.setup import Setup, load_base, one_thread, world_of
from edgespec.errors import ConfigError
from edgespec.plugins import OWN_POLICIES, known_policies
from edgespec.policy.registry import POLICIES, policy_named

T = TypeVar("T")

Play = tuple[Setup, str]
"""A set-up, and the policy that plays it, as a process is told."""


def chosen_policies(names: Sequence[str], draft: str) -> tuple[str, ...]:
    """The policies called `names`, each once; "all": all that can run with this draft ("": none).
    One may be of somebody's own (see plugins).

    Raises ConfigError for an unknown name, and for a policy that lacks its draft.
    """
    chosen: list[str] = []
    for name in known_policies(names):
        if name == "all":
            chosen += [known for known, policy in POLICIES.items() if draft or not policy.drafts]
        elif policy_named(name).drafts and not draft:
            raise ConfigError(
                f"policy {name} needs a draft model or another source; name it with --draft"
            )
        else:
            chosen.append(name)
    if not chosen:
        raise ConfigError(f"there is no policy; name some of: all, {', '.join(sorted(POLICIES))}")
    return tuple(dict.fromkeys(chosen))


def simulate(
    setup: Setup,
    policies: Sequence[str],
    jobs: int = 1,
    news: Callable[[int, int], None] = lambda done, of: None,
) -> list[Run]:
    """The figures of each policy, in the order of their names; the same for any number of jobs.

    Up to `jobs` (0: one a processor) processes share the policies. `news(done, of)`: how many
    answers there are, of how many. The policies that the others are compared with run too, whether
    they are asked for or not. Raises ConfigError for settings, models or prompts that do not fit.
    """
    asked = chosen_policies(policies, setup.draft)
    references = (REFERENCE, RIVAL) if setup.draft else (REFERENCE,)
    plays = {name: (setup, OWN_POLICIES.get(name, name)) for name in (*references, *asked)}
    if setup.load is not None:
        plays = {ALONE: (replace(setup, load=None), REFERENCE), **plays}
    names = dealt(list(plays), process_count(jobs) if setup.is_scripted else len(plays))
    groups = [[plays[name] for name in hand] for hand in names]
    done = [0] * len(groups)

    def heard(group: int, answers: int) -> None:
        done[group] = answers
        news(sum(done), len(plays) * len(setup.prompts))

    played = map_in_processes(play_each, groups, jobs, heard)
    results = {
        name: one
        for hand, ones in zip(names, played, strict=True)
        for name, one in zip(hand, ones, strict=True)
    }
    devices = [profile.name for profile in setup.profiles]
    return [run_of(policy, results, devices, setup.cost_model.name) for policy in asked]


def dealt(plays: Sequence[T], groups: int) -> list[list[T]]:
    """The plays in so many groups at most, to and fro: those that take longest come last."""
    hands: list[list[T]] = [[] for _ in range(min(groups, len(plays)))]
    for number, play in enumerate(plays):
        turn, place = divmod(number, len(hands))
        hands[-1 - place if turn % 2 else place].append(play)
    return hands


def play_each(plays: Sequence[Play], news: News = lambda done: None) -> list[Played]:
    """What comes of each; all have the models, prompts and sampling of the first. `news(done)`: how
    many answers there are. Raises ConfigError."""
    plays = [(setup, known_policies([policy])[0]) for setup, policy in plays]
    if plays[0][0].is_scripted:
        from edgespec.bench.together import play_together

        return play_together(plays, news)
    count = len(plays[0][0].prompts)
    return [
        play(setup, policy, lambda done, before=n * count: news(before + done))  # type: ignore[misc]
        for n, (setup, policy) in enumerate(plays)
    ]


def play(setup: Setup, policy: str, news: News = lambda done: None) -> Played:
    """One policy answers all prompts in a world of its own; the models compute every row of it."""
    with one_thread():
        loaded = load_base(setup.model, setup.dtype, setup.stages)
        asking = Asking(world_of(setup, loaded), setup, policy)
        for answers in range(1, len(setup.prompts) + 1):
            asking.run(answers)
            news(answers)
        return asking.played
