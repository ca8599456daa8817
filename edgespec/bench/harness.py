"""Harness: all policies answer the same prompts on one real ring, and their figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from msgspec import structs

from edgespec.bench.load import Course, Load
from edgespec.bench.report import ALONE, REFERENCE, Played, Run, run_of
from edgespec.bench.timeline import Activity
from edgespec.bench.workloads import Prompt, submit_of
from edgespec.errors import ConfigError, RequestFailed
from edgespec.runtime.client import Client
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Failed, Finished, Submit, Tokens

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The settings of all requests. Raises ConfigError for values that are refused."""

    policies: tuple[str, ...]
    max_new_tokens: int
    sampling: Sampling

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be at least 1")

    def submit(self, tag: int, text: str, policy: str) -> Submit:
        """Each policy asks as a user of its own, so that none finds a prompt that another read."""
        submit = submit_of(tag, text, self.max_new_tokens, self.sampling, policy)
        return structs.replace(submit, scope=policy)


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """One policy's answer to a turn of prompt `number`; `request`: the coordinator's number;
    `course`: of one that was asked for under load."""

    number: int
    prompt: str
    category: str
    turn: int
    request: int
    finished: Finished
    course: Course | None = None

    @property
    def policy(self) -> str:
        return self.finished.policy


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer whose tokens differ from the reference's from `position` on.

    `margin`: the larger of both answers' smallest margins.
    """

    prompt: str
    turn: int
    policy: str
    position: int
    margin: float


def play(
    client: Client,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    news: Callable[[str], None] = lambda text: None,
) -> list[BenchAnswer]:
    """Every answer, prompt by prompt and turn by turn, all policies one after the other.

    So drift affects all policies alike. The ring first gives a short answer that does not count. A
    later turn follows the earlier ones and the reference's answers to them, so all policies get the
    same text. `news(text)` reports progress. The client must be the only one of a fresh ring.
    Raises RequestFailed, naming the prompt.
    """
    assert REFERENCE in settings.policies, "there is nothing to compare with"
    asked = 1
    first = settings.submit(asked, prompts[0].text, REFERENCE)
    _ask(client, structs.replace(first, max_new_tokens=WARM_UP_TOKENS, scope=""))
    answers: list[BenchAnswer] = []
    for number, prompt in enumerate(prompts, 1):
        text = ""
        for turn, says in enumerate(prompt.turns, 1):
            text = f"{text}\n\n{says}" if text else says
            for policy in settings.policies:
                where = f"prompt {prompt.id!r} ({number}/{len(prompts)}), turn {turn}"
                news(f"{where}, {policy}")
                asked += 1
                try:
                    finished = _ask(client, settings.submit(asked, text, policy))
                except RequestFailed as problem:
                    raise RequestFailed(f"{where} with {policy}: {problem}") from None
                answers.append(
                    BenchAnswer(number, prompt.id, prompt.category, turn, asked, finished)
                )
            (reference,) = (a for a in answers[-len(settings.policies) :] if a.policy == REFERENCE)
            text += reference.finished.text
    return answers


def play_at_once(
    client: Client,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    load: Load,
    news: Callable[[str], None] = lambda text: None,
) -> list[BenchAnswer]:
    """The reference's answers, each request alone, and then every policy's, one policy after the
    other, with `load.live` requests at once. They are to the first turns. The rest as for `play`.
    """
    assert load.live is not None, "on real processes nobody comes at random times"
    first = [replace(prompt, turns=prompt.turns[:1]) for prompt in prompts]
    alone = play(client, first, replace(settings, policies=(REFERENCE,)), news)
    answers, asked = list(alone), alone[-1].request
    for policy in settings.policies:
        answers += _answers_at_once(client, first, settings, policy, load.live, asked + 1, news)
        asked += len(first)
    return answers


def _answers_at_once(
    client: Client,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    policy: str,
    live: int,
    request: int,
    news: Callable[[str], None],
) -> list[BenchAnswer]:
    """One policy's; `request`: the coordinator's number of the first."""
    asked: list[float] = []

    def submits() -> Iterator[Submit]:
        for number, prompt in enumerate(prompts):
            asked.append(time.monotonic())
            # Each is a user of its own: the ring's turns are the only order.
            scope = f"{policy} at once {number}"
            submit = settings.submit(request + number, prompt.text, policy)
            yield structs.replace(submit, scope=scope)

    tokens: list[list[float]] = [[] for _ in prompts]
    answers: dict[int, BenchAnswer] = {}
    for message in client.ask_at_once(submits(), live):
        number, now = message.tag - request, time.monotonic()
        prompt = prompts[number]
        match message:
            case Tokens(token_ids=ids):
                tokens[number] += [now] * len(ids)
            case Failed(reason=reason):
                where = f"prompt {prompt.id!r} ({number + 1}/{len(prompts)})"
                raise RequestFailed(f"{where} with {policy}, {live} at once: {reason}")
            case Finished():
                answers[number] = BenchAnswer(
                    number + 1,
                    prompt.id,
                    prompt.category,
                    1,
                    message.tag,
                    message,
                    Course(asked[number], tuple(tokens[number]), now),
                )
                news(f"{policy}, {live} at once: {len(answers)}/{len(prompts)} answers")
    return [answers[number] for number in range(len(prompts))]


def _ask(client: Client, submit: Submit) -> Finished:
    *_, finished = client.ask(submit)
    assert isinstance(finished, Finished), "an answer ends with Finished or raises"
    if finished.finish_reason == "cancelled":
        raise KeyboardInterrupt
    return finished


def sharing(answers: Sequence[BenchAnswer], load: Load | None) -> list[list[BenchAnswer]]:
    """The answers that shared the ring, in the order in which they were asked for: each by itself,
    or under load those of each policy, without those to requests alone."""
    if load is None:
        return [[answer] for answer in answers]
    return list(_by_policy(answers, load).values())


def differences(answers: Iterable[BenchAnswer]) -> list[Difference]:
    """The answers that differ from the reference's, of several those that come first."""
    found: list[Difference] = []
    right: dict[tuple[int, int], Finished] = {}
    ordered = sorted(answers, key=lambda answer: answer.policy != REFERENCE)
    for answer in ordered:
        given = answer.finished
        reference = right.setdefault((answer.number, answer.turn), given)
        if given.token_ids == reference.token_ids:
            continue
        pairs = zip(given.token_ids, reference.token_ids, strict=False)
        same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        shorter = min(len(given.token_ids), len(reference.token_ids))
        margin = max(given.smallest_margin, reference.smallest_margin)
        position = shorter if same is None else same
        found.append(Difference(answer.prompt, answer.turn, answer.policy, position, margin))
    return found


@dataclass(frozen=True, slots=True)
class MeasuredRing:
    """The measured devices (D0's profile first; "": real ones), and the charged model."""

    profiles: tuple[str, ...]
    cost_model: str

    @property
    def is_emulated(self) -> bool:
        return bool(self.profiles[0])


def results(
    answers: Sequence[BenchAnswer],
    activities: Mapping[int, Activity],
    ring: MeasuredRing,
    settings: Mapping[str, object],
    load: Load | None = None,
) -> dict[str, object]:
    """The object of results.json (docs/figures.md); `activities`: see `overall`."""
    categories = list(dict.fromkeys(answer.category for answer in answers if answer.category))
    runs = _figures(answers, activities, ring, load)
    for run in runs:
        run["categories"] = {}
    # Under load answers of all categories share the ring and its time.
    for category in categories if load is None else ():
        of_it = [answer for answer in answers if answer.category == category]
        for run, part in zip(runs, _figures(of_it, activities, ring), strict=True):
            run["categories"][category] = part  # type: ignore[index]
    return {
        "emulated": ring.is_emulated,
        "runs": runs,
        "differences": [asdict(found) for found in differences(answers)],
        "settings": dict(settings),
    }


def overall(
    answers: Sequence[BenchAnswer],
    activities: Mapping[int, Activity],
    ring: MeasuredRing,
    load: Load | None = None,
) -> list[Run]:
    """Each policy's figures over all answers, as `edgespec simulate` has them.

    `activities`: of each of `sharing`, by its first request."""
    played = {}
    for policy, mine in _by_policy(answers, load).items():
        seen = _seen(mine, activities)
        busy = [sum(node) for node in zip(*(activity.busy for activity in seen), strict=True)]
        elapsed = sum(activity.seconds for activity in seen)
        courses = tuple(a.course for a in mine if a.course is not None)
        ends = tuple(a.finished for a in mine)
        played[policy] = Played(ends, elapsed, tuple(busy), load, courses)
    policies = list(played)
    if load is not None:
        played[ALONE] = Played(tuple(a.finished for a in answers if a.course is None), 0.0, ())
    return [run_of(policy, played, ring.profiles, ring.cost_model) for policy in policies]


def _by_policy(answers: Sequence[BenchAnswer], load: Load | None) -> dict[str, list[BenchAnswer]]:
    """Each policy's answers; under load without those to requests alone."""
    counted = [answer for answer in answers if load is None or answer.course is not None]
    found: dict[str, list[BenchAnswer]] = {answer.policy: [] for answer in counted}
    for answer in counted:
        found[answer.policy].append(answer)
    return found


def _seen(answers: Sequence[BenchAnswer], activities: Mapping[int, Activity]) -> list[Activity]:
    return [activities[answer.request] for answer in answers if answer.request in activities]


def _figures(
    answers: Sequence[BenchAnswer],
    activities: Mapping[int, Activity],
    ring: MeasuredRing,
    load: Load | None = None,
) -> list[dict[str, object]]:
    """Each policy's figures of a run, in real seconds, and those of the traces."""
    figures = []
    groups = _by_policy(answers, load).values()
    for run, given in zip(overall(answers, activities, ring, load), groups, strict=True):
        entries = run.as_dict()
        entries["seconds"] = entries.pop("virtual_seconds")
        mine = _seen(given, activities)
        entries["prompts"] = len({answer.number for answer in given})
        entries["answers"] = len(given)
        elapsed = sum(activity.seconds for activity in mine)
        wasted = _shares([activity.wasted for activity in mine], elapsed)
        entries["stage_idle"] = [1.0 - busy for busy in run.stage_busy]
        entries["stage_wasted"] = wasted[1:]
        entries["bytes_per_token"] = sum(a.sent_bytes for a in mine) / max(run.new_tokens, 1)
        if ring.is_emulated:
            entries["emulation_late"] = max(_shares([a.late for a in mine], elapsed))
        figures.append(entries)
    return figures


def _shares(seconds: Sequence[Sequence[float]], elapsed: float) -> list[float]:
    """Each node's share of `elapsed`, over all answers."""
    return [sum(node) / elapsed if elapsed > 0 else 0.0 for node in zip(*seconds, strict=True)]


def answer_lines(
    answers: Sequence[BenchAnswer], policy: str, model_id: str, at: float
) -> list[dict[str, object]]:
    """One object a prompt in the form that Spec-Bench's scripts read, with all its turns; `at`:
    seconds since 1970.

    A decoding step is a verification. The scripts take means of `accept_lengths`; here
    they are in ascending order, not in the order of the steps. `token_ids` is ours: the tokens of
    every turn.
    """
    lines: list[dict[str, object]] = []
    mine = [answer for answer in answers if answer.policy == policy]
    for number in dict.fromkeys(answer.number for answer in mine):
        turns = [answer for answer in mine if answer.number == number]
        prompt = turns[0].prompt
        ends = [answer.finished for answer in turns]
        lengths = [_accept_lengths(end.accepted_histogram) for end in ends]
        choice = {
            "index": 0,
            "turns": [end.text for end in ends],
            "decoding_steps": [len(of_turn) for of_turn in lengths],
            "new_tokens": [end.new_tokens for end in ends],
            "wall_time": [end.seconds for end in ends],
            "accept_lengths": [length for of_turn in lengths for length in of_turn],
            "token_ids": [list(end.token_ids) for end in ends],
        }
        lines.append(
            {
                "question_id": int(prompt) if prompt.isdecimal() else prompt,
                "category": turns[0].category,
                "model_id": model_id,
                "choices": [choice],
                "tstamp": at,
            }
        )
    return lines


def _accept_lengths(histogram: Sequence[int]) -> list[int]:
    return [length for length, times in enumerate(histogram) for _ in range(times)]
