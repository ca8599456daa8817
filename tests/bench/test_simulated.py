"""Simulated: every policy gives the plain tokens, in times that follow from the settings alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from msgspec import structs
from support.checkpoints import write_checkpoint
from support.plays import play_all
from support.tiers import thorough
from support.torch_rings import BASE, DRAFT, generated
from support.work import half

from edgespec.bench.processes import map_in_processes
from edgespec.bench.report import Played, as_json, run_of
from edgespec.bench.setup import Setup, answerable
from edgespec.bench.simulated import chosen_policies, dealt, play, simulate
from edgespec.bench.workloads import Prompt, default_prompts
from edgespec.daemon.profiles import profile_named
from edgespec.errors import ConfigError, EdgespecError
from edgespec.planning.cost_model import cost_model_named
from edgespec.planning.profile import Figure
from edgespec.policy.registry import POLICIES
from edgespec.sim.links import LinkSpec
from edgespec.verify.sampling import Sampling

NANO = profile_named("jetson-orin-nano-8gb")
SLOW_HOST = structs.replace(NANO, launch_seconds=Figure(0.0015, "made up"))  # D0 is busy drafting
ORIN = profile_named("jetson-agx-orin-64gb")
SETUP = Setup(
    model=BASE,
    draft=DRAFT,
    dtype="float64",
    profiles=(NANO, NANO, NANO),
    cost_model=cost_model_named("llama-2-13b"),
    link=None,
    prompts=tuple(default_prompts(2)),
    max_new_tokens=12,
    sampling=Sampling(),
)
SHORT = replace(SETUP, prompts=SETUP.prompts[:1], max_new_tokens=6)


@lru_cache
def all_of_it(policies: tuple[str, ...] = ("all",)) -> str:
    """The JSON of all policies on the two prompts, in this process."""
    return json.dumps(as_json(simulate(SETUP, list(policies)), SETUP.settings()))


@pytest.mark.thorough
def test_all_policies_give_the_plain_tokens_and_what_drafts_is_faster() -> None:
    runs = {run["policy"]: run for run in json.loads(all_of_it())["runs"]}
    assert list(runs) == list(POLICIES)
    assert all(run["exact"] for run in runs.values())
    plain = runs["autoregressive"]
    assert (plain["draft"], plain["speedup_vs_autoregressive"]) == ("none", 1.0)
    # A prompt in several chunks takes a little more than one.
    assert plain["trips"] == pytest.approx(plain["new_tokens"], abs=2)
    for name in ("naive_tree", "flowspec"):
        assert runs[name]["speedup_vs_autoregressive"] > 1.05
        assert runs[name]["tokens_per_trip"] > 1.2
    assert runs["naive_tree"]["speedup_vs_naive_tree"] == 1.0


def test_the_tokens_are_those_of_transformers() -> None:
    played = play(SETUP, "flowspec")
    expected = [generated(prompt.text, 12) for prompt in SETUP.prompts]
    assert played.tokens == expected


@pytest.mark.parametrize(
    "policies", [("autoregressive", "flowspec"), thorough(("all",))], ids=["two", "all"]
)
def test_figures_fit_together(policies: tuple[str, ...]) -> None:
    for run in json.loads(all_of_it(policies))["runs"]:
        assert (run["prompts"], run["stages"], run["new_tokens"]) == (2, 2, 24)
        assert run["tokens_per_second"] == run["new_tokens"] / run["virtual_seconds"]
        assert run["tokens_per_second"] < run["decode_tokens_per_second"]
        decoding = run["virtual_seconds"] - 2 * run["first_token_seconds"]
        assert run["decode_tokens_per_second"] == pytest.approx(22 / decoding)
        assert len(run["stage_busy"]) == 2
        assert all(0 < busy <= 1 for busy in (run["coordinator_busy"], *run["stage_busy"]))
        assert 0 <= run["rows_wasted"] <= run["rows_sent"]
        assert run["misses"] >= 0
        assert sum(n * times for n, times in enumerate(run["accepted_histogram"])) >= 22


def test_autoregressive_takes_the_time_of_its_blocks_and_links() -> None:
    """One row through both blocks, the head and three links, again for every token but the first.

    Every token takes a little longer, as there is one row more to attend to."""
    (run,) = simulate(SHORT, ["autoregressive"])
    costs = SHORT.costs()
    prompt = len(play(SHORT, "autoregressive").answers)
    assert prompt == 1
    decoding = run.virtual_seconds - run.first_token_seconds
    compute = sum(stage.block_seconds(1, 0) for stage in costs.stages)
    compute += costs.coordinator.head_seconds(1)
    latency = sum(link.latency for link in costs.links)
    assert 5 * (compute + latency) < decoding < 5 * 1.1 * (compute + latency)


@pytest.mark.thorough
def test_the_same_setup_gives_the_same_bytes() -> None:
    again = as_json(simulate(SETUP, ["all"]), SETUP.settings())
    assert json.dumps(again) == all_of_it()


def test_a_stage_on_the_coordinators_device_shares_its_time() -> None:
    """The same text, later: the work of both is done by one device."""
    alone = replace(SHORT, profiles=(SLOW_HOST,) * 3)
    apart, plain = play_all(alone, ("adaptive", "autoregressive")).values()
    setup = replace(alone, with_stage=2)
    shared, shared_plain = play_all(setup, ("adaptive", "autoregressive")).values()
    assert shared.tokens == apart.tokens == plain.tokens
    assert shared.speed < 0.95 * apart.speed
    assert shared.busy[0] + shared.busy[2] <= shared.elapsed
    # One row after the other keeps nobody waiting, and has one link less to cross.
    (costs, links), local = (setup.costs(), SHORT.costs().links), setup.costs().links[2]
    saved = links[2].latency - local.latency
    saved += links[2].seconds(costs.segment_bytes(1, 2)) - local.seconds(costs.segment_bytes(1, 2))
    trips = shared_plain.answers[0].new_tokens - 1
    assert decoding(plain) - decoding(shared_plain) == pytest.approx(trips * saved)
    even = replace(setup, link=LinkSpec(0.1, 1e6)).network()
    assert even.ring[1].latency == 0.1
    assert even.ring[2].latency == local.latency
    assert setup.settings()["with_stage"] == 2


def test_the_head_on_the_last_stage_is_charged_there() -> None:
    """The same text; with a large vocabulary D0 is no longer what all wait for."""
    model = cost_model_named("qwen3-4b")
    large = replace(SHORT, cost_model=model, profiles=(SLOW_HOST,) * 5, max_new_tokens=12)
    large = replace(large, loop_free=True)  # which has less to do there
    names = ("adaptive", "autoregressive")
    here, plain = play_all(large, names).values()
    there, plain_there = play_all(replace(large, head="last-stage"), names).values()
    assert there.tokens == here.tokens == plain.tokens == plain_there.tokens
    assert there.speed > 1.03 * here.speed
    # In plain decoding the one moves what it takes to the other.
    moved = plain.busy[0] - plain_there.busy[0]
    assert moved == pytest.approx(plain.busy[0])
    assert plain_there.busy[4] - plain.busy[4] == pytest.approx(moved, rel=0.02)
    assert replace(large, head="last-stage").settings()["head"] == "last-stage"


def decoding(played: Played) -> float:
    """Seconds behind the first tokens."""
    return sum(one.seconds - one.first_token_seconds for one in played.answers)


def test_references_run_even_if_nobody_asked_for_them() -> None:
    heard: list[tuple[int, int]] = []
    (run,) = simulate(SHORT, ["flowspec"], news=lambda done, of: heard.append((done, of)))
    assert run.policy == "flowspec"
    assert run.exact
    assert run.speedup_vs_naive_tree is not None
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_without_a_draft_there_is_nothing_to_compare_but_plain_decoding() -> None:
    setup = replace(SHORT, draft="")
    (run,) = simulate(setup, ["all"])
    assert (run.policy, run.draft) == ("autoregressive", "none")
    assert run.speedup_vs_naive_tree is None
    with pytest.raises(ConfigError, match="policy flowspec needs a draft model"):
        simulate(setup, ["flowspec"])


@pytest.mark.thorough
def test_one_fast_device_makes_a_ring_faster_and_a_slow_link_slower() -> None:
    def speed(setup: Setup) -> float:
        return simulate(setup, ["autoregressive"])[0].tokens_per_second

    even = speed(SHORT)
    mixed = replace(SHORT, profiles=(NANO, NANO, ORIN))
    assert speed(mixed) > even * 1.2
    (run,) = simulate(mixed, ["autoregressive"])
    assert run.profile == "jetson-orin-nano-8gb,jetson-orin-nano-8gb,jetson-agx-orin-64gb"
    assert run.stage_busy[1] < run.stage_busy[0] / 1.5
    assert speed(replace(SHORT, link=LinkSpec(0.1, 1e6))) < even / 1.5


@pytest.mark.thorough
def test_chance_on_the_links_changes_no_token_and_repeats_itself() -> None:
    setup = replace(SHORT, link=LinkSpec(0.005, 1e7, jitter=0.02, loss=0.2))
    runs = simulate(setup, ["flowspec"])
    assert runs[0].exact
    assert simulate(setup, ["flowspec"]) == runs


def test_sampled_answers_are_exact_too() -> None:
    setup = replace(SHORT, sampling=Sampling(temperature=0.8, top_k=50, seed=3))
    (run,) = simulate(setup, ["flowspec"])
    assert run.exact
    assert play(setup, "flowspec").tokens != play(SHORT, "flowspec").tokens


@pytest.mark.thorough
def test_a_useless_draft_costs_time_but_no_token(tmp_path: Path) -> None:
    folder = useless_draft(tmp_path)
    (run,) = simulate(replace(SHORT, draft=str(folder)), ["flowspec"])
    assert run.exact
    assert run.tokens_per_trip < 1.5


def useless_draft(folder: Path) -> Path:
    """A draft model of random weights with the bundled pair's tokenizer."""
    write_checkpoint(folder, vocab_size=2048, max_position_embeddings=1024)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((Path(DRAFT) / name).read_bytes())
    return folder


def test_other_tokens_are_noticed() -> None:
    played = play(SHORT, "autoregressive")
    wrong = structs.replace(played.answers[0], token_ids=(*played.answers[0].token_ids[:-1], 0))
    results = {"autoregressive": played, "flowspec": replace(played, answers=(wrong,))}
    assert not run_of("flowspec", results, ["a", "a"], "m").exact
    assert run_of("autoregressive", results, ["a", "a"], "m").exact


# --- settings that cannot be --------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "policy": (lambda: chosen_policies(["flowspec", "magic"], DRAFT), "unknown policy 'magic'"),
    "no policy": (lambda: chosen_policies([], DRAFT), "there is no policy"),
    "no tokens": (lambda: replace(SETUP, max_new_tokens=0), "max-new-tokens is 0"),
    "no prompts": (lambda: replace(SETUP, prompts=()), "there are no prompts"),
    "no stages": (lambda: replace(SETUP, profiles=(NANO,)), "1 devices make no ring"),
    "memory": (
        lambda: replace(SETUP, cost_model=cost_model_named("llama-3.1-70b")),
        "use more stages or a device with more memory",
    ),
    "layers": (
        lambda: play(replace(SETUP, profiles=(NANO,) * 10), "autoregressive"),
        "9 stages for a model of 8 layers",
    ),
    "dtype": (lambda: simulate(replace(SETUP, dtype="int3"), ["autoregressive"]), "int3"),
    "long prompts": (
        lambda: answerable(BASE, [Prompt("a", "", ("word " * 2000,))], lambda text: None),
        r"1 of 1 prompts are left out, .* in the model's context of 1024: a \(",
    ),
    "head": (lambda: replace(SETUP, head="middle"), "unknown head 'middle'"),
    "hidden rows": (
        lambda: replace(SETUP, head="last-stage", draft="eagle:folder"),
        "eagle guesses from the base's hidden rows",
    ),
    "jobs": (lambda: simulate(SETUP, ["autoregressive"], jobs=-1), "jobs is -1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_refused(what: str) -> None:
    make, words = WRONG[what]
    with pytest.raises(ConfigError, match=words):
        make()


def test_policies_are_dealt_to_and_fro() -> None:
    assert dealt("abcdefgh", 2) == [["a", "d", "e", "h"], ["b", "c", "f", "g"]]
    assert dealt("abcd", 3) == [["a"], ["b"], ["c", "d"]]
    assert dealt("ab", 3) == [["a"], ["b"]]


def test_policies_are_taken_once_each() -> None:
    assert chosen_policies(["flowspec", "all", "flowspec"], DRAFT)[:2] == (
        "flowspec",
        "autoregressive",
    )
    assert set(chosen_policies(["all"], DRAFT)) == set(POLICIES)


# --- processes ----------------------------------------------------------------------------------


def test_results_come_in_the_order_of_the_items() -> None:
    heard: list[tuple[int, int]] = []
    results = map_in_processes(half, [8, 4, 2], 2, lambda *news: heard.append(news))
    assert results == [4, 2, 1]
    assert sorted(heard) == [(0, 1), (1, 1), (2, 1)]


def test_an_error_of_a_process_is_raised_here_and_ends_the_others() -> None:
    with pytest.raises(EdgespecError, match="3 is odd"):
        map_in_processes(half, [8, 3, 2], 2)
    with pytest.raises(EdgespecError, match="was ended from outside"):
        map_in_processes(half, [66, 2], 2)


def test_a_prompt_that_is_too_long_is_left_out_and_named() -> None:
    said: list[str] = []
    fits, long = Prompt("fits", "", ("word " * 20,)), Prompt("long\x1b", "", ("word " * 2000,))
    assert answerable(BASE, [long, fits], said.append) == [fits]
    assert answerable(BASE, [fits], said.append) == [fits]
    (text,) = said
    assert text.startswith("1 of 2 prompts are left out")
    assert "long\ufffd (" in text
