"""`edgespec demo --compare`: a question answered by plain decoding and as usual, on one ring."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from edgespec.cli.answer_view import AnswerView
from edgespec.cli.answering import described, figures, json_text, tokens_per_second
from edgespec.cli.notes import Notes
from edgespec.config import CoordinatorConfig
from edgespec.errors import ConfigError
from edgespec.policy.registry import POLICIES
from edgespec.runtime.client import Client
from edgespec.wire.client_messages import Finished, Submit

PLAIN = "autoregressive"
WARM_UP_TOKENS = 8
"""Of each way before anything is timed: kernels are loaded, times are learnt, and the prompt's rows
are kept, for both alike."""


def check_comparable(config: CoordinatorConfig, submit: Submit) -> None:
    """Raise ConfigError if both answers would be plain decoding's."""
    if submit.policy and not POLICIES[submit.policy].drafts:
        raise ConfigError(f"--compare with --policy {submit.policy} compares nothing; drop one")
    if not config.draft:
        raise ConfigError("--compare needs a draft source to compare with; give --draft ngram")


def show_comparison(
    client: Client, submit: Submit, dtype: str, as_json: bool, notes: Notes
) -> Finished:
    """Answer plainly, then as `submit` says, and print how the two compare.

    `dtype`: what the ring computes in. Returns the last answer, which may be a cancelled one.
    """
    plainly = replace(submit, policy=PLAIN)
    short = min(WARM_UP_TOKENS, submit.max_new_tokens)
    answers: list[Finished] = []
    for asked, label in (
        (replace(plainly, max_new_tokens=short), ""),
        (replace(submit, max_new_tokens=short), ""),
        (plainly, "plain decoding:"),
        (submit, "edgespec:"),
    ):
        if label and not as_json:
            notes.say(label)
        view = AnswerView(notes, hidden=as_json or not label)
        answers.append(view.follow(client.ask(asked)))
        if answers[-1].finish_reason == "cancelled":
            return answers[-1]
        if label and notes.is_verbose:
            notes.table(described(answers[-1]))
    comparison = Comparison(*answers[-2:])
    if as_json:
        print(json_text(figures(comparison.usual) | comparison.figures()))
    else:
        notes.say(comparison.summary(dtype))
    return comparison.usual


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to one question: by plain decoding, and as usual."""

    plain: Finished
    usual: Finished

    @property
    def speedup(self) -> float:
        """How many times as fast as plain decoding it is; 0 if that took no time."""
        plain = tokens_per_second(self.plain)
        return tokens_per_second(self.usual) / plain if plain else 0.0

    @property
    def is_same(self) -> bool:
        return self.plain.token_ids == self.usual.token_ids

    def figures(self) -> dict[str, object]:
        """What `--json` has beside the figures of the usual answer (docs/figures.md)."""
        return {
            "plain_tokens_per_second": tokens_per_second(self.plain),
            "speedup": self.speedup,
            "same_text": self.is_same,
        }

    def summary(self, dtype: str) -> str:
        """One line. `dtype`: what was computed in."""
        return (
            f"plain {tokens_per_second(self.plain):.1f} tok/s, edgespec "
            f"{tokens_per_second(self.usual):.1f} tok/s: {self.speedup:.1f} times as fast, "
            f"{'same text' if self.is_same else self._difference(dtype)}"
        )

    def _difference(self, dtype: str) -> str:
        pairs = zip(self.plain.token_ids, self.usual.token_ids, strict=False)
        shorter = min(len(self.plain.token_ids), len(self.usual.token_ids))
        at = next((n for n, (one, other) in enumerate(pairs) if one != other), shorter)
        margin = min(self.plain.smallest_margin, self.usual.smallest_margin)
        return (
            f"but the texts differ from token {at + 1} on: rounding in {dtype} may have turned a "
            f"close call (the closest was {margin:.2g})"
        )
