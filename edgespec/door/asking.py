"""Asking: what a program says of an answer that it wants, and the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import ConfigError, ProtocolError
from edgespec.types.record import MOST_CHARS
from edgespec.verify.sampling import Sampling
from edgespec.verify.stops import StopScanner
from edgespec.wire.client_messages import Finished, Submit
from edgespec.wire.codec import encode

TAG = 1
"""Of a request that is alone on its connection."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How an answer is made. Raises ConfigError for values that every coordinator would refuse.

    `max_new_tokens`: at most so many. `temperature`: from 0, which takes the most likely token
    every time, to 2. `top_k`: of the K most likely tokens, 0: of all. `top_p`: of the likeliest
    ones of total share P. `min_p`: none below P times the likeliest one's share. `seed`: the same
    one gives the same text. `stop`: the answer ends before any of these texts. `policy`: what the
    ring sends when; "": its best. `logprobs`: of each token its log-probability, and those of so
    many others, at most 20; None: of none.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    policy: str = ""
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for text in self.stop:
            _check_text("stop string", text)
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        _ = self.sampling
        StopScanner(self.stop)

    @property
    def sampling(self) -> Sampling:
        """How tokens are taken. Raises ConfigError for values out of range."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    def complete(self, prompt: str, tag: int = TAG) -> Submit:
        """The request for a completion of a text. Raises ConfigError if it cannot be sent."""
        _check_prompt(prompt)
        return self._submit(tag, prompt, "")

    def ask(self, prompt: str, tag: int = TAG) -> Submit:
        """The request for an answer by the model's chat template; a model without one completes the
        text. Raises ConfigError if it cannot be sent."""
        _check_prompt(prompt)
        return self._submit(tag, prompt, _conversation([{"role": "user", "content": prompt}]))

    def answer(self, messages: Sequence[Mapping[str, str]], tag: int = TAG) -> Submit:
        """The request for the next message of a conversation of {"role", "content"} objects.

        Raises ConfigError if it cannot be sent.
        """
        return self._submit(tag, "", _conversation(messages))

    def _submit(self, tag: int, prompt: str, messages: str) -> Submit:
        submit = Submit(
            tag,
            prompt,
            self.max_new_tokens,
            float(self.temperature),
            self.top_k,
            float(self.top_p),
            float(self.min_p),
            self.seed,
            self.stop,
            self.policy,
            messages,
            -1 if self.logprobs is None else self.logprobs,
        )
        try:
            encode(submit)  # what no peer would take would be dropped without a word
        except ProtocolError as problem:
            raise ConfigError(f"the request cannot be sent: {problem}") from None
        return submit


def _conversation(messages: Sequence[Mapping[str, str]]) -> str:
    """As it travels. Raises ConfigError if it cannot."""
    for message in messages:
        _check_text("prompt" if message["role"] == "user" else "conversation", message["content"])
    text = json.dumps(messages, ensure_ascii=False)
    _check_text("conversation", text)
    return text


def _check_prompt(prompt: str) -> None:
    _check_text("prompt", prompt)
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give at least one character that is no space")


def _check_text(what: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"the {what} is not valid UTF-8 text") from None
    limit = MOST_CHARS
    if len(text) > limit:
        raise ConfigError(f"the {what} has {len(text)} characters; at most {limit} can be sent")


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. `figures`: all that the coordinator told of it (docs/commands.md).

    `logprobs`: of each token, if they were asked for, an object with "token", "logprob" and
    "top_logprobs", as OpenAI's chats have them.
    """

    figures: Finished
    logprobs: tuple[dict[str, Any], ...] = ()

    @property
    def text(self) -> str:
        return self.figures.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.figures.token_ids

    @property
    def finish_reason(self) -> str:
        """ "stop", "length" (max_new_tokens, or the context is full) or "cancelled"."""
        return self.figures.finish_reason

    @property
    def seconds(self) -> float:
        """Since the coordinator took it up, the prompt's reading included."""
        return self.figures.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.figures.new_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def tokens_per_trip(self) -> float:
        """New tokens for each time that rows went round the ring."""
        trips = self.figures.trips
        return self.figures.new_tokens / trips if trips > 0 else 0.0
