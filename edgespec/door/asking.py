"""Asking: what a program or a command says of an answer that it wants, and the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec.structs import replace

from edgespec.config import MAX_TEMPERATURE
from edgespec.errors import ConfigError, ProtocolError
from edgespec.plugins import known_policies
from edgespec.policy.registry import POLICIES, policy_named
from edgespec.types.record import MOST_CHARS
from edgespec.verify.sampling import Sampling
from edgespec.verify.stops import StopScanner
from edgespec.wire.client_messages import ChatMessage, Finished, Submit
from edgespec.wire.codec import encode

TAG = 1
"""Of a request that is alone on its connection."""

_POLICIES = " or ".join(", ".join(sorted(POLICIES)).rsplit(", ", 1))


@dataclass(frozen=True)
class _PolicyOption:
    policy: Annotated[
        str,
        f"What to send when: {_POLICIES}, or a policy of your own (package.module:Class). "
        "Default: adaptive, or autoregressive where there is no draft.",
    ] = ""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling and length; the texts are also what commands say of their options. What is None is
    as the model publishes it, or, where no ring is asked, as at temperature 0."""

    max_new_tokens: Annotated[
        int, "Tokens to generate at most; fewer if the context has no room for them."
    ] = 128
    temperature: Annotated[
        float | None,
        f"From 0, which takes the most likely token every time, to {MAX_TEMPERATURE:g}. Without a "
        "default, as the model publishes it, like the filters and the repetition penalty.",
    ] = None
    top_k: Annotated[int | None, "Sample from the K most likely tokens; 0 is off."] = None
    top_p: Annotated[float | None, "Sample from the likeliest tokens of total share P."] = None
    min_p: Annotated[float | None, "Leave out tokens below P times the likeliest one's share."] = (
        None
    )
    seed: Annotated[int, "The same seed gives the same text."] = 0

    @property
    def sampling(self) -> Sampling:
        """With what is None at temperature 0. Raises ConfigError for values out of range."""
        names = "temperature", "top_k", "top_p", "min_p", "seed"
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Sampling(**given)


@dataclass(frozen=True)
class RequestSettings(SamplingOptions, _PolicyOption):  # the last base's field comes first
    """All options of a request (docs/commands.md).

    Raises ConfigError for values that every coordinator would refuse.
    """

    stop: Annotated[list[str] | None, "End before this text; may be given several times."] = None
    repetition_penalty: Annotated[
        float | None,
        "Divide the logits of tokens that the prompt or the answer has; 1 is off, 1.1 is usual.",
    ] = None

    def __post_init__(self) -> None:
        for text in self.stop or ():
            _check_text("stop string", text)
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        _ = self.sampling  # raises for values out of range
        StopScanner(tuple(self.stop or ()))
        for name in known_policies([self.policy] if self.policy else []):
            policy_named(name)

    def complete(self, prompt: str, tag: int = TAG) -> Submit:
        """The request for a completion of a text. Raises ConfigError if it cannot be sent."""
        _check_prompt(prompt)
        return self._submit(tag, prompt, ())

    def ask(self, prompt: str, tag: int = TAG) -> Submit:
        """The request for an answer by the model's chat template; a model without one completes the
        text. Raises ConfigError if it cannot be sent."""
        _check_prompt(prompt)
        return self._submit(tag, prompt, (ChatMessage("user", prompt),))

    def answer(self, messages: Sequence[Mapping[str, str]], tag: int = TAG) -> Submit:
        """The request for the next message of a conversation of {"role", "content"} objects.

        Raises ConfigError if it cannot be sent.
        """
        for one in messages:
            _check_text("prompt" if one["role"] == "user" else "conversation", one["content"])
        said = tuple(ChatMessage(one["role"], one["content"]) for one in messages)
        return self._submit(tag, "", said)

    def _submit(self, tag: int, prompt: str, messages: tuple[ChatMessage, ...]) -> Submit:
        (policy,) = known_policies([self.policy])
        try:
            submit = Submit(
                tag,
                prompt,
                self.max_new_tokens,
                _number(self.temperature),
                self.top_k,
                _number(self.top_p),
                _number(self.min_p),
                self.seed,
                tuple(self.stop or ()),
                policy,
                messages,
                repetition_penalty=_number(self.repetition_penalty),
            )
            encode(submit)  # what no peer would take would be dropped without a word
        except (ProtocolError, ValueError) as problem:
            raise ConfigError(f"the request cannot be sent: {problem}") from None
        return submit


@dataclass(frozen=True)
class SamplingParams(RequestSettings):
    """How an answer is made. Raises ConfigError for values that every coordinator would refuse.

    `logprobs`: each token comes with its log-probability, and with those of so many others, at most
    20, that could have stood there; None: without any.
    """

    logprobs: int | None = None

    def _submit(self, tag: int, prompt: str, messages: tuple[ChatMessage, ...]) -> Submit:
        top = -1 if self.logprobs is None else self.logprobs
        return replace(super()._submit(tag, prompt, messages), top=top)


USUAL = SamplingParams()
GREEDY = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
"""The likeliest token every time, whatever the model publishes: of what is compared."""


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


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
    """An answer: its text, tokens, and why it ended ("stop", "length" or "cancelled").

    `seconds`: since the coordinator took it up, `first_token_seconds` of them until the first
    token. `tokens_per_trip`: new tokens for each time that rows went round the ring. `logprobs`: if
    they were asked for, of each token an object with "token", "logprob" and "top_logprobs", as
    OpenAI's chats have them. `figures`: all that the coordinator told (docs/commands.md).
    """

    figures: Finished
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    first_token_seconds: float
    tokens_per_second: float
    tokens_per_trip: float
    logprobs: tuple[dict[str, Any], ...] = ()

    @staticmethod
    def of(end: Finished, logprobs: Sequence[dict[str, Any]] = ()) -> Completion:
        return Completion(
            end,
            end.text,
            end.token_ids,
            end.finish_reason,
            end.seconds,
            end.first_token_seconds,
            end.new_tokens / end.seconds if end.seconds > 0 else 0.0,
            end.new_tokens / end.trips if end.trips > 0 else 0.0,
            tuple(logprobs),
        )
