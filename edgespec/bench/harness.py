"""Harness: all policies answer the same prompts on one real ring, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from edgespec.bench.report import REFERENCE, Played, Run, run_of
from edgespec.bench.timeline import Activity
from edgespec.bench.workloads import Prompt, submit_of
from edgespec.errors import ConfigError, RequestFailed
from edgespec.runtime.client import Client
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Finished, Submit

WARM_UP_TOKENS = 8

NEAR_TIE = 1e-3
"""Below this distance between the best token and the runner-up (logits), a batch of another shape
may round to the other token; above it, a difference between two policies is a fault."""


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
        return replace(submit, scope=policy)


@dataclass(frozen=True, slots=True)
class BenchAnswer:
    """One policy's answer to a turn of prompt `number`; `request`: the coordinator's number."""

    number: int
    prompt: str
    category: str
    turn: int
    request: int
    finished: Finished

    @property
    def policy(self) -> str:
        return self.finished.policy


@dataclass(frozen=True, slots=True)
class Difference:
    """An answer whose tokens differ from the reference's from `position` on.

    `margin`: the larger of both answers' smallest margins. A difference at a near-tie has one below
    NEAR_TIE in both.
    """

    prompt: str
    turn: int
    policy: str
    position: int
    margin: float

    @property
    def is_near_tie(self) -> bool:
        return self.margin < NEAR_TIE


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
    _ask(client, replace(first, max_new_tokens=WARM_UP_TOKENS, scope=""))
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


def _ask(client: Client, submit: Submit) -> Finished:
    *_, finished = client.ask(submit)
    assert isinstance(finished, Finished), "an answer ends with Finished or raises"
    if finished.finish_reason == "cancelled":
        raise KeyboardInterrupt
    return finished


def differences(answers: Iterable[BenchAnswer]) -> list[Difference]:
    """The answers that differ from the reference's."""
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
) -> dict[str, object]:
    """The object of results.json (docs/commands.md)."""
    categories = list(dict.fromkeys(answer.category for answer in answers if answer.category))
    runs = _figures(answers, activities, ring)
    for run in runs:
        run["categories"] = {}
    for category in categories:
        of_it = [answer for answer in answers if answer.category == category]
        for run, part in zip(runs, _figures(of_it, activities, ring), strict=True):
            run["categories"][category] = part  # type: ignore[index]
    return {
        "emulated": ring.is_emulated,
        "runs": runs,
        "differences": [
            {**asdict(found), "near_tie": found.is_near_tie} for found in differences(answers)
        ],
        "settings": dict(settings),
    }


def overall(
    answers: Sequence[BenchAnswer], activities: Mapping[int, Activity], ring: MeasuredRing
) -> list[Run]:
    """Each policy's figures over all answers, as `edgespec simulate` has them."""
    played = {}
    for policy in dict.fromkeys(answer.policy for answer in answers):
        mine = [answer for answer in answers if answer.policy == policy]
        seen = [activities[answer.request] for answer in mine]
        busy = [sum(node) for node in zip(*(activity.busy for activity in seen), strict=True)]
        elapsed = sum(activity.seconds for activity in seen)
        played[policy] = Played(tuple(a.finished for a in mine), elapsed, tuple(busy))
    return [run_of(policy, played, ring.profiles, ring.cost_model) for policy in played]


def _figures(
    answers: Sequence[BenchAnswer], activities: Mapping[int, Activity], ring: MeasuredRing
) -> list[dict[str, object]]:
    """Each policy's figures of a run, in real seconds, and those of the traces."""
    figures = []
    for run in overall(answers, activities, ring):
        entries = asdict(run)
        entries["seconds"] = entries.pop("virtual_seconds")
        given = [answer for answer in answers if answer.policy == run.policy]
        mine = [activities[answer.request] for answer in given]
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
