"""Ways: a plan is the fastest of what could be done with its boards, by what `simulate` says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.tiers import thorough

from edgespec.bench.setup import Setup
from edgespec.bench.simulated import play
from edgespec.bench.together import play_together
from edgespec.bench.workloads import Prompt, default_prompts
from edgespec.daemon import played_plans
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.planning import Quants, devices_of, head_places, model_to_plan
from edgespec.daemon.played_plans import CLEARLY, QUESTIONS, PlayedPlan, fastest_plans
from edgespec.planning.cost_model import NO_DRAFT
from edgespec.planning.plan import Plan, plan
from edgespec.planning.problem import Problem
from edgespec.verify.sampling import Sampling

NANO, SUPER, NX = "jetson-orin-nano-8gb", "jetson-orin-nano-super-8gb", "jetson-orin-nx-16gb"
AGX, THOR, PI = "jetson-agx-orin-64gb", "jetson-thor-t5000-128gb", "raspberry-pi-5-8gb"


def problem(model: str, draft: str, devices: str) -> Problem:
    asked = model_to_plan(model, Quants(), draft)
    coordinator, others = devices_of(devices)
    return Problem(asked.model, coordinator, others, 2048)


def planned(devices: str) -> Plan:
    asked = model_to_plan("llama-2-13b", Quants(draft="none"), "")
    coordinator, others = devices_of(devices)
    return plan(Problem(asked.model, coordinator, others, 4096))


def test_plain_decoding_is_what_the_machines_take() -> None:
    made = planned(f"{NX},3*{NANO}")
    assert len(set(made.split)) > 1, "an uneven split is what this is about"
    setup = Setup(
        bundled("base"),
        bundled("draft"),
        "float32",
        tuple(node.device.profile for node in made.nodes),
        made.problem.model.costs,
        None,
        (Prompt("1", "", (QUESTIONS[0],)),),
        12,
        Sampling(0.0, 0, 1.0, 0.0, 0),
        made.split,
        made.with_stage,
    )
    (answer,) = play(setup, "autoregressive").answers
    each = (answer.seconds - answer.first_token_seconds) / (answer.new_tokens - 1)
    seen = answer.prompt_tokens + answer.new_tokens // 2
    assert each == pytest.approx(made.trip_seconds(seen), rel=0.005)


@pytest.mark.thorough
def test_speculation_is_played_on_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played_plans, "QUESTIONS", QUESTIONS[:1])
    heard: list[int] = []
    nanos = problem("llama-2-13b", "", f"4*{NANO}")
    found = fastest_plans(nanos, ("coordinator",), True, heard.append)
    assert found[0].guessing is not None
    assert found[0].guessing > found[0].plain
    assert heard[-1] == len(found)
    many = fastest_plans(problem("llama-2-13b", "", f"{NANO},16*{PI}"), ("coordinator",))
    assert all(way.guessing is not None for way in many), "more stages than the bundled layers"


def test_the_break_even_is_where_two_lines_cross() -> None:
    """Seconds a token fall evenly with what is guessed right."""
    made = planned(f"3*{NANO}")
    ring, alone = PlayedPlan(made, 4.0, 16.0, 0.75), PlayedPlan(made, 8.0, 10.0, 0.5)
    share = ring.break_even(alone)
    assert share is not None
    part = share / ring.right  # of what was right in both
    at = [1 / way.plain - part * (1 / way.plain - 1 / way.speed) for way in (ring, alone)]
    assert at[0] == pytest.approx(at[1])
    assert PlayedPlan(made, 4.0, 6.0, 0.9).break_even(alone) is None, "never faster"
    assert PlayedPlan(made, 9.0, 12.0, 0.9).break_even(alone) is None, "always faster"


def test_no_question_is_one_that_a_report_uses() -> None:
    reported = " ".join(prompt.text for prompt in default_prompts())
    assert not any(question.split(". ")[0][10:] in reported for question in QUESTIONS)


SETS = {
    # Those on which a ring was planned that was slower than its fastest board.
    "14b-eagle": ("qwen3-14b", "eagle3", f"{AGX},2*{NANO}"),
    "8b-agx": ("llama-3.1-8b", "", f"{AGX},2*{NANO}"),
    "32b-agx": ("qwen3-32b", "", f"{AGX},2*{NANO}"),
    "13b-nanos": ("llama-2-13b", "", f"5*{NANO}"),
    "13b-agx": ("llama-2-13b", "", f"{AGX},4*{NANO}"),
    "13b-mixed": ("llama-2-13b", "", f"{NX},{AGX},{NANO}"),
    "7b-nanos": ("llama-2-7b", "", f"3*{NANO}"),
    "8b-nanos": ("llama-3.1-8b", "", f"4*{NANO}"),
    "8b-ngram": ("llama-3.1-8b", "ngram", f"4*{NANO}"),
    "8b-plain": ("llama-3.1-8b", "none", f"3*{NANO}"),
    "8b-supers": ("qwen3-8b", "", f"2*{SUPER}"),
    "8b-nx": ("qwen3-8b", "", f"{NX},3*{NANO}"),
    "7b-slow-first": ("qwen2.5-7b", "", f"{NANO},{AGX}"),
    "32b-mixed": ("qwen2.5-32b", "", f"{AGX},{NX},2*{NANO}"),
    "32b-nanos": ("qwen2.5-32b", "", f"4*{NANO}"),
    "3b-pis": ("llama-3.2-3b", "", f"3*{PI}"),
    "3b-pi-first": ("llama-3.2-3b", "", f"{PI},2*{NANO}"),
    "70b-thor": ("llama-3.3-70b", "", f"{THOR},{AGX}"),
    "8b-thor": ("llama-3.1-8b", "", f"{THOR},2*{AGX}"),
    "2b-ngram": ("smollm2-1.7b", "ngram", f"{SUPER},2*{NANO}"),
}
"""Model, draft and boards."""

PROMPTS = tuple(default_prompts(2))


@pytest.mark.parametrize("name", [thorough(name) for name in SETS])
def test_the_plan_is_the_fastest_way(name: str) -> None:
    """Of its ring and each board alone, with its draft and without, on other prompts."""
    model, draft, devices = SETS[name]
    asked = problem(model, draft, devices)
    heads = head_places("auto", draft, model)
    best = fastest_plans(asked, heads, bool(draft))[0]
    others = [plan(asked, heads)] if asked.fits() else []
    kinds = {device.profile: device for device in (asked.coordinator, *asked.others)}
    bare = model_to_plan(model, Quants(), "none").model
    for device in kinds.values():
        for of in (asked.model, bare):
            alone = replace(asked, model=of, coordinator=device, others=())
            others += [plan(alone)] if alone.fits() else []
    chosen, *speeds = simulated([best.plan, *others])
    assert chosen * CLEARLY > max(speeds), name


def simulated(plans: list[Plan]) -> list[float]:
    """Tokens a second of `adaptive` on each of them, or of plain decoding without a draft."""
    setups = [played_plans._setup(made) or _plain(made) for made in plans]
    drafts = any(made.problem.model.draft.name for made in plans)
    setups = [replace(one, prompts=PROMPTS, max_new_tokens=32) for one in setups]
    policies = ["adaptive" if one.draft and drafts else "autoregressive" for one in setups]
    pairs = list(zip(setups, policies, strict=True))
    scripted = [pair for pair in pairs if pair[0].is_scripted]
    played = iter(play_together(scripted)) if scripted else iter(())
    return [(next(played) if one.is_scripted else play(one, how)).speed for one, how in pairs]


def _plain(made: Plan) -> Setup:
    """What plays a plan without a draft."""
    ngram = replace(made.problem.model, draft=replace(NO_DRAFT, name="ngram"), sources="ngram")
    setup = played_plans._setup(replace(made, problem=replace(made.problem, model=ngram)))
    assert setup is not None
    return replace(setup, draft="")
