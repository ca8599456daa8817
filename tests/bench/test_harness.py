"""The harness: what it asks, what it compares, and what it makes of answers and traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.nodes import NodeRing

from edgespec.bench.harness import (
    BenchAnswer,
    BenchSettings,
    MeasuredRing,
    answer_lines,
    differences,
    play,
    play_at_once,
    results,
    sharing,
)
from edgespec.bench.load import Course, Load
from edgespec.bench.timeline import Activity, Bar, activity_of, read_traces
from edgespec.bench.workloads import Prompt
from edgespec.errors import ConfigError, RequestFailed
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Failed, Finished, Submit

FINISHED = Finished(
    tag=1,
    text="xyz",
    token_ids=(10, 11, 12),
    finish_reason="length",
    policy="autoregressive",
    draft="none",
    stages=1,
    prompt_tokens=2,
    new_tokens=3,
    seconds=2.0,
    first_token_seconds=0.5,
    trips=3.0,
    accepted_histogram=(1, 2),
    rows_sent=2,
    rows_wasted=0,
    misses=2,
    smallest_margin=0.5,
)
SETTINGS = BenchSettings(("autoregressive", "flowspec"), 6, Sampling())


def answer(policy: str, number: int = 1, turn: int = 1, **changes: Any) -> BenchAnswer:
    """One answer."""
    finished = structs.replace(FINISHED, policy=policy, **changes)
    return BenchAnswer(number, f"p{number}", "math", turn, 10 * number + turn, finished)


# --- asking -------------------------------------------------------------------------------------


def test_all_policies_answer_every_turn_and_later_turns_follow_the_reference() -> None:
    long, other = "abc" * 20, "ghi" * 20  # worth keeping for another prompt
    prompts = [Prompt("a", "one", (long, "def")), Prompt("b", "two", (other,))]
    heard: list[str] = []
    with NodeRing(2, kept_rows=2000) as ring, ring.client() as client:
        answers = play(client, prompts, SETTINGS, heard.append)
    order = [(a.prompt, a.turn, a.policy) for a in answers]
    turns = (("a", 1), ("a", 2), ("b", 1))
    assert order == [(*turn, policy) for turn in turns for policy in SETTINGS.policies]
    assert [a.request for a in answers] == [2, 3, 4, 5, 6, 7]  # the first one was to warm up
    assert len(heard) == 6
    assert not differences(answers)
    cached = [a.finished.cached_tokens for a in answers]
    assert cached[::2] == cached[1::2], "each policy reads as much as every other"
    assert cached[0] == cached[4] == 0 < cached[2], "a prompt itself, and what only follows it"
    texts = [long, f"{long}{answers[0].finished.text}\n\ndef", other]
    for number, text in enumerate(texts):
        submit = SETTINGS.submit(1, text, "autoregressive")
        ring.assert_right(submit, answers[2 * number].finished)
        ring.assert_right(submit, answers[2 * number + 1].finished)


def test_under_load_every_prompt_is_answered_alone_first_and_then_by_every_policy() -> None:
    prompts = [Prompt(name, "", (name * 8, "more")) for name in "abc"]
    heard: list[str] = []
    with NodeRing(2, kept_rows=2000) as ring, ring.client() as client:
        answers = play_at_once(client, prompts, SETTINGS, Load(live=2), heard.append)
        for one in answers:
            ring.assert_right(SETTINGS.submit(1, one.prompt * 8, one.policy), one.finished)
    alone, loaded = answers[:3], answers[3:]
    assert [a.request for a in answers] == list(range(2, 11))
    assert [(a.policy, a.prompt) for a in loaded] == [
        (policy, name) for policy in SETTINGS.policies for name in "abc"
    ]
    assert all(a.course is None for a in alone)
    for one in loaded:
        assert one.course is not None
        assert len(one.course.tokens) == one.finished.new_tokens
        assert one.course.asked < one.course.tokens[0] <= one.course.ended
        assert one.finished.cached_tokens == 0, "nobody finds what another one has read"
    for mine in (loaded[:3], loaded[3:]):
        first, second, third = (one.course for one in mine if one.course is not None)
        assert second.asked < min(first.ended, second.ended)
        assert third.asked >= min(first.ended, second.ended)
    assert heard[-1] == "flowspec, 2 at once: 3/3 answers"
    assert [[a.request for a in mine] for mine in sharing(answers, Load(2))] == [
        [5, 6, 7],
        [8, 9, 10],
    ]
    assert sharing(alone, None) == [[one] for one in alone]


def test_a_prompt_that_fails_under_load_is_named() -> None:
    prompts = [Prompt("a", "", ("abc",)), Prompt("b", "", ("abcd",))]
    coming = [
        FINISHED,
        structs.replace(FINISHED, tag=2),
        Failed(4, "too long"),
        structs.replace(FINISHED, tag=3),
    ]

    class Told:
        """A client that is told this."""

        def ask(self, submit: Submit) -> Iterator[Finished]:
            yield FINISHED

        def ask_at_once(self, submits: Iterable[Submit], live: int) -> Iterator[Finished | Failed]:
            assert [submit.tag for submit in submits] == [4, 5]
            yield from coming[2:]

    with pytest.raises(
        RequestFailed, match=r"^prompt 'a' \(1/2\) with autoregressive, 2 at once: too long"
    ):
        play_at_once(Told(), prompts, SETTINGS, Load(live=2))  # type: ignore[arg-type]


def test_figures_under_load_are_of_all_answers_together() -> None:
    """And they are compared with those to requests alone."""
    alone = [answer("autoregressive", number) for number in (1, 2)]

    def loaded(policy: str, begin: float, **changes: Any) -> list[BenchAnswer]:
        courses = [
            Course(begin, (begin + 1, begin + 2, begin + 3), begin + 3),
            Course(begin, (begin + 2, begin + 2, begin + 4), begin + 4),
        ]
        return [
            replace(answer(policy, number, **changes), course=course)
            for number, course in enumerate(courses, 1)
        ]

    answers = [*alone, *loaded("autoregressive", 10.0), *loaded("flowspec", 20.0)]
    activity = Activity(4.0, (), (1.0, 2.0), (0.0, 1.0), (0.0, 0.0), 600)
    activities = {11: activity}
    content = results(answers, activities, MeasuredRing(("",) * 2, ""), {}, Load(live=2))
    plain, fast = content["runs"]  # type: ignore[misc]
    assert (plain["policy"], fast["policy"]) == ("autoregressive", "flowspec")
    for run in (plain, fast):
        assert (run["seconds"], run["new_tokens"], run["answers"]) == (4.0, 6, 2)
        assert run["tokens_per_second"] == 1.5
        assert (run["coordinator_busy"], run["stage_busy"]) == (0.25, (0.5,))
        assert (run["live"], run["ttft_mean"], run["tbt_mean"]) == (2, 1.5, 1.0)
        assert (run["stage_wasted"], run["bytes_per_token"]) == ([0.25], 100.0)
        assert run["categories"] == {}
        assert run["exact"] is True
    assert content["differences"] == []
    wrong = [*alone, *loaded("autoregressive", 10.0, token_ids=(10, 11, 99))]
    content = results(wrong, activities, MeasuredRing(("",) * 2, ""), {}, Load(live=2))
    (run,) = content["runs"]  # type: ignore[misc]
    assert run["exact"] is False, "plain decoding under load is checked too"
    assert [d["position"] for d in content["differences"]] == [2, 2]  # type: ignore[attr-defined]


def test_a_prompt_that_cannot_be_answered_is_named() -> None:
    with (
        NodeRing(1) as ring,
        ring.client() as client,
        pytest.raises(RequestFailed, match=r"^prompt 'b' \(2/2\), turn 1 with autoregressive: "),
    ):
        play(client, [Prompt("a", "", ("abc",)), Prompt("b", "", ("x" * 5000,))], SETTINGS)


def test_no_new_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="max-new-tokens is 0"):
        BenchSettings(("autoregressive",), 0, Sampling())


# --- comparing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "position"), [((10, 99, 12), 1), ((10, 11), 2), ((10, 11, 12, 13), 3)]
)
def test_a_difference_has_a_place(tokens: tuple[int, ...], position: int) -> None:
    (found,) = differences([answer("flowspec", token_ids=tokens), answer("autoregressive")])
    assert (found.prompt, found.turn, found.policy) == ("p1", 1, "flowspec")
    assert found.position == position


def test_of_the_margins_of_a_difference_the_larger_one_is_told() -> None:
    right = answer("autoregressive", smallest_margin=1e-5)
    (found,) = differences([right, answer("flowspec", token_ids=(9,), smallest_margin=0.1)])
    assert found.margin == 0.1


def test_answers_to_prompts_of_one_name_are_not_mixed_up() -> None:
    first, second = answer("autoregressive", 1), answer("autoregressive", 2, token_ids=(7,))
    assert not differences([first, replace(second, prompt=first.prompt)])


# --- figures ------------------------------------------------------------------------------------


def test_results_have_the_figures_of_a_simulation_in_seconds_and_more() -> None:
    answers = [
        answer("autoregressive", 1),
        answer("flowspec", 1, seconds=1.0),
        replace(answer("autoregressive", 2), category="chat"),
        replace(answer("flowspec", 2, token_ids=(7, 8, 9), seconds=1.0), category="chat"),
    ]
    answers = [replace(a, request=at) for at, a in enumerate(answers)]
    activities = {
        a.request: Activity(a.finished.seconds, (), (0.1, 0.5), (0.0, 0.25), (0.0, 0.1), 60)
        for a in answers
    }
    content = results(answers, activities, MeasuredRing(("nano", "nano"), "llama"), {"stages": 1})
    json.dumps(content)
    runs: Any = content["runs"]
    assert [run["policy"] for run in runs] == ["autoregressive", "flowspec"]
    plain, fast = runs
    assert (plain["prompts"], plain["new_tokens"], plain["seconds"]) == (2, 6, 4.0)
    assert (plain["profile"], plain["cost_model"], plain["stages"]) == ("nano", "llama", 1)
    assert plain["coordinator_busy"] == pytest.approx(0.05)
    assert (plain["stage_busy"], plain["stage_idle"]) == ((0.25,), [0.75])
    assert (plain["stage_wasted"], plain["bytes_per_token"]) == ([0.125], 20.0)
    assert plain["emulation_late"] == pytest.approx(0.05)
    assert plain["accepted_histogram"] == (2, 4)
    assert fast["speedup_vs_autoregressive"] == pytest.approx(2.0)
    assert fast["speedup_vs_naive_tree"] is None
    assert (plain["exact"], fast["exact"]) == (True, False)
    assert fast["categories"]["math"]["exact"]
    assert not fast["categories"]["chat"]["exact"]
    (difference,) = content["differences"]  # type: ignore[misc]
    assert difference["position"] == 0


# --- traces -------------------------------------------------------------------------------------


def span(node: int, kind: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """One line of a trace."""
    base = {"what": "span", "node": node, "kind": kind, "request": 1, "late": 0.0, "ids": []}
    return {**base, "start": start, "end": end, "stopped": False, **more}


def block(start: float, end: float, *rows: tuple[int, int, int, int], **more: Any) -> Any:
    """A block of the first stage: (id, parent, position, token) of its rows."""
    names = ("ids", "parents", "positions", "tokens")
    columns = {name: [row[at] for row in rows] for at, name in enumerate(names)}
    parts = more.pop("parts", [[1, len(rows)]])
    return span(1, "RunBlock", start, end, **columns, parts=parts, **more)


def test_a_block_is_of_use_if_a_row_of_it_is_on_the_answers_path() -> None:
    entries = [
        block(5.0, 5.1, (0, -1, 0, 1), (1, 0, 1, 2)),  # the prompt
        span(0, "RunHead", 5.1, 5.2),
        block(5.2, 5.3, (2, 1, 2, 10)),  # the root, whose target token is the second token
        block(5.3, 5.4, (3, 2, 3, 99), (4, 2, 3, 11)),  # its guesses, one of them right
        block(5.4, 5.5, (5, 3, 4, 12)),  # the right token on the wrong path
        block(5.5, 5.6, (6, 4, 4, 12)),  # behind it nothing was wanted
        block(5.6, 5.7, (7, 4, 4, 5), stopped=True),
        span(0, "Draft", 6.9, 7.5),  # it ended after the answer
        span(1, "GatherRows", 7.0, 7.2),  # all of it
        {"what": "sent", "node": 1, "request": 1, "on_ring": True, "bytes": 70},
    ]
    activity = activity_of(entries, {1: FINISHED}, FINISHED.seconds)
    kinds = [(bar.node, bar.kind) for bar in activity.bars]
    stage = [(1, kind) for kind in ("used", "used", "wasted", "wasted", "wasted")]
    assert kinds == [(1, "used"), (0, "head"), *stage, (0, "draft")]
    assert activity.bars[-1] == Bar(0, "draft", pytest.approx(1.9), 2.0)
    assert activity.busy == (pytest.approx(0.2), pytest.approx(0.6))
    assert activity.wasted == (0.0, pytest.approx(0.3))
    assert activity.sent_bytes == 70


def test_a_block_of_several_requests_is_of_use_if_a_row_of_any_is() -> None:
    """Ids are each request's own: the same id may be of use in one and not in another."""
    entries = [
        block(5.0, 5.1, (0, -1, 0, 1), (1, 0, 1, 2), (0, -1, 0, 1), (1, 0, 1, 2),
              parts=[[1, 2], [2, 2]]),  # two prompts
        block(5.1, 5.2, (2, 1, 2, 99), (2, 1, 2, 10), parts=[[1, 1], [2, 1]]),
        block(5.2, 5.3, (2, 1, 2, 99), (3, 2, 3, 98), parts=[[1, 1], [2, 1]]),
    ]  # fmt: skip
    ends = {1: FINISHED, 2: FINISHED}
    activity = activity_of(entries, ends, 4.0)
    assert [bar.kind for bar in activity.bars] == ["used", "used", "wasted"]
    assert (activity.seconds, activity.busy[1]) == (4.0, pytest.approx(0.3))
    alone = activity_of(entries, {1: FINISHED}, 4.0)
    assert [bar.kind for bar in alone.bars] == ["used", "wasted", "wasted"]


def test_what_is_one_job_for_several_requests_takes_its_time_once() -> None:
    entries = [span(0, "RunHead", 5.0, 5.5, request=number, late=0.25) for number in (1, 2)] + [
        span(0, "Draft", 5.5, 6.0, request=2)
    ]
    activity = activity_of(entries, {1: FINISHED, 2: FINISHED}, 4.0)
    assert [bar.kind for bar in activity.bars] == ["head", "draft"]
    assert (activity.busy[0], activity.late[0]) == (pytest.approx(1.0), pytest.approx(0.25))


def test_traces_are_read_by_request(tmp_path: Path) -> None:
    lines = [span(0, "RunHead", 1.0, 2.0), span(0, "RunHead", 2.0, 3.0, request=7)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "a").write_text(text + '{"what": "sp', encoding="utf-8")  # killed while it wrote
    found = read_traces([tmp_path / "a"])
    assert {request: len(entries) for request, entries in found.items()} == {1: 1, 7: 1}


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("hello\n")
    with pytest.raises(ConfigError, match="is no trace: it holds 'hello'"):
        read_traces([tmp_path / "a"])
    with pytest.raises(ConfigError, match="cannot read"):
        read_traces([tmp_path / "b"])


# --- Spec-Bench ---------------------------------------------------------------------------------


def test_answers_have_the_shape_that_spec_bench_reads() -> None:
    turns = [answer("flowspec", 1, 1), answer("flowspec", 1, 2), answer("autoregressive", 1, 1)]
    named = [replace(a, prompt="81") for a in turns]
    (line,) = answer_lines(named, "flowspec", "edgespec-flowspec", 5.0)
    assert set(line) == {"question_id", "category", "model_id", "choices", "tstamp"}
    assert (line["question_id"], line["category"]) == (81, "math")
    (choice,) = line["choices"]  # type: ignore[misc]
    assert choice["turns"] == ["xyz", "xyz"]
    assert choice["new_tokens"] == [3, 3]
    assert choice["decoding_steps"] == [3, 3]
    assert choice["accept_lengths"] == [0, 1, 1, 0, 1, 1]
    assert choice["wall_time"] == [2.0, 2.0]
    assert choice["token_ids"] == [[10, 11, 12], [10, 11, 12]]
