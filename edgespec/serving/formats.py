"""Formats: an answer of the ring as OpenAI's clients read it, whole or in pieces."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, to_builtins

from edgespec.serving.reply_bodies import (
    AnswerChoice,
    AnswerReply,
    CachedTokens,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    MadeCall,
    MadeFunction,
    MadeMessage,
    RingUsage,
    TextChoice,
    TextCompletion,
    Usage,
)
from edgespec.serving.request_bodies import ChatRequest, TextRequest
from edgespec.serving.tools import CallReader, Said
from edgespec.types.tool_forms import ToolForm
from edgespec.wire.client_messages import Finished

Object = dict[str, Any]
Reply = Struct | Object
"""A whole answer or a piece of it."""

LEAST_LOG_PROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


class Format:
    """The answers to one call, under an id of its own: one for each choice, by its index."""

    prefix = ""
    whole_type: type[AnswerReply]
    piece_type: type[AnswerReply]

    def __init__(
        self, request: ChatRequest | TextRequest, form: ToolForm, model: str, created: int
    ) -> None:
        """`form`: how the model calls tools. `created`: seconds since 1970."""
        self._request = request
        tools = request.callable_tools
        self._readers = [CallReader(form, tools) for _ in range(request.choices if tools else 0)]
        self._offsets = [0] * request.choices  # characters of each choice so far, of a completion
        self._common: Object = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": created,
            "model": model,
        }

    def whole(self, ends: Sequence[Finished], log_probs: Sequence[list[Object]]) -> Reply:
        """All of it; of each choice its end and log-probabilities."""
        told = enumerate(zip(ends, log_probs, strict=True))
        choices = [self.choice(i, end.text, listed, end.finish_reason) for i, (end, listed) in told]
        return self.whole_type(choices=choices, usage=self._usage(ends), **self._common)

    def opening(self) -> list[Reply]:
        """What comes before the first piece."""
        return []

    def pieces(self, index: int, text: str, log_probs: list[Object]) -> list[Reply]:
        """Newly committed text of a choice."""
        return [self._piece(self.piece_choice(index, text, log_probs, None))]

    def endings(self, index: int, finished: Finished) -> list[Reply]:
        """What comes after the last piece of a choice."""
        return [self._piece(self.piece_choice(index, "", [], finished.finish_reason))]

    def closing(self, ends: Sequence[Finished]) -> list[Reply]:
        """What comes after the ends of all choices."""
        return [self._piece(usage=self._usage(ends))] if self._request.with_usage else []

    def _piece(self, *choices: AnswerChoice, usage: Usage | None = None) -> AnswerReply:
        counted = usage if self._request.with_usage else UNSET
        return self.piece_type(choices=list(choices), usage=counted, **self._common)

    def _usage(self, ends: Sequence[Finished]) -> Usage:
        return usage(ends, self._request.n)

    def choice(self, index: int, text: str, log_probs: list[Object], reason: str) -> AnswerChoice:
        """A choice of a whole answer."""
        raise NotImplementedError

    def piece_choice(
        self, index: int, text: str, log_probs: list[Object], reason: str | None
    ) -> AnswerChoice:
        """The one choice of a piece; `reason`: why it ends with it."""
        raise NotImplementedError


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    prefix, whole_type, piece_type = "chatcmpl", Chat, ChatChunk

    def opening(self) -> list[Reply]:
        delta = {"role": "assistant", "content": ""}
        choices = range(self._request.choices)
        return [self._piece(ChatChunkChoice(index, None, None, delta)) for index in choices]

    def choice(self, index: int, text: str, log_probs: list[Object], reason: str) -> AnswerChoice:
        listed = self._listed(log_probs)
        if not self._readers:
            return ChatChoice(index, listed, reason, MadeMessage(text))
        reader = self._readers[index]
        said = [*reader.push(text), *reader.flush()]
        calls = [
            MadeCall(one.id, MadeFunction(one.name, "".join(s.text for s in said if s.call == n)))
            for n, one in enumerate(one for one in said if one.name)
        ]
        content = "".join(one.text for one in said if one.call < 0)
        message = MadeMessage(content if content or not calls else None)
        if calls:
            message.tool_calls = calls
        return ChatChoice(index, listed, _reason(reason, reader), message)

    def pieces(self, index: int, text: str, log_probs: list[Object]) -> list[Reply]:
        if not self._readers:
            return super().pieces(index, text, log_probs)
        listed = self._listed(log_probs) if log_probs else None
        deltas = [_delta(one) for one in self._readers[index].push(text)]
        choices = [ChatChunkChoice(index, None, None, delta) for delta in deltas]
        if listed and not choices:
            choices = [ChatChunkChoice(index, None, None, {"content": ""})]
        if choices:
            choices[0].logprobs = listed
        return [self._piece(choice) for choice in choices]

    def endings(self, index: int, finished: Finished) -> list[Reply]:
        if not self._readers:
            return super().endings(index, finished)
        reader = self._readers[index]
        last = [ChatChunkChoice(index, None, None, _delta(one)) for one in reader.flush()]
        reason = _reason(finished.finish_reason, reader)
        return [self._piece(one) for one in (*last, ChatChunkChoice(index, None, reason, {}))]

    def piece_choice(
        self, index: int, text: str, log_probs: list[Object], reason: str | None
    ) -> AnswerChoice:
        listed = self._listed(log_probs) if log_probs else None
        return ChatChunkChoice(index, listed, reason, {} if reason else {"content": text})

    def _listed(self, log_probs: list[Object]) -> Object | None:
        if self._request.top < 0:
            return None
        return {"content": [_with_rivals(one) for one in log_probs], "refusal": None}


class CompletionFormat(Format):
    """text_completion, whole and in pieces."""

    prefix, whole_type, piece_type = "cmpl", TextCompletion, TextCompletion

    def choice(
        self, index: int, text: str, log_probs: list[Object], reason: str | None
    ) -> AnswerChoice:
        listed = self._listed(index, log_probs) if self._request.top >= 0 else None
        return TextChoice(index, listed, reason, text)

    def piece_choice(
        self, index: int, text: str, log_probs: list[Object], reason: str | None
    ) -> AnswerChoice:
        if reason:
            return TextChoice(index, None, reason, "")
        return self.choice(index, text, log_probs, None)

    def _listed(self, index: int, log_probs: list[Object]) -> Object:
        offsets = []
        for one in log_probs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(one["token"])
        return {
            "tokens": [one["token"] for one in log_probs],
            "token_logprobs": [_log_prob(one) for one in log_probs],
            "top_logprobs": [_by_text(one) for one in log_probs],
            "text_offset": offsets,
        }


def usage(ends: Sequence[Finished], n: int) -> Usage:
    """How many tokens were read and written, and what the ring did for them; `ends`: of `n` choices
    of each prompt, which counts once. Times are those of the last one."""
    read = ends[::n]
    prompts, answers = sum(e.prompt_tokens for e in read), sum(e.new_tokens for e in ends)
    return Usage(
        prompt_tokens=prompts,
        completion_tokens=answers,
        total_tokens=prompts + answers,
        prompt_tokens_details=CachedTokens(sum(e.cached_tokens for e in read)),
        edgespec=RingUsage(
            policy=ends[0].policy,
            seconds=max(e.seconds for e in ends),
            first_token_seconds=max(e.first_token_seconds for e in ends),
            trips=sum(e.trips for e in ends),
            rows_sent=sum(e.rows_sent for e in ends),
            rows_wasted=sum(e.rows_wasted for e in ends),
            recoveries=max(e.recoveries for e in ends),
        ),
    )


def log_probs_of(text: str) -> list[Object]:
    """What a message Tokens says of its tokens."""
    return json.loads(text) if text else []


def encoded(value: Struct | Object) -> bytes:
    """As JSON in ASCII: some readers of events take a U+2028 for the end of a line."""
    return json.dumps(to_builtins(value), allow_nan=False, separators=(",", ":")).encode()


def event(value: Struct | Object) -> bytes:
    """As one server-sent event; one with a type has it as its name too."""
    name = value.get("type") if isinstance(value, dict) else None
    begin = f"event: {name}\n".encode() if isinstance(name, str) else b""
    return begin + b"data: " + encoded(value) + b"\n\n"


def comment(text: str) -> bytes:
    """As a comment, which readers of server-sent events skip."""
    return f": {' '.join(text.split())}\n\n".encode()


def _delta(said: Said) -> Object:
    """A piece of an answer with calls."""
    if said.call < 0:
        return {"content": said.text}
    call: Object = {"index": said.call, "function": {"arguments": said.text}}
    if said.name:
        call |= {"id": said.id, "type": "function"}
        call["function"]["name"] = said.name
    return {"tool_calls": [call]}


def _reason(reason: str, reader: CallReader) -> str:
    """Why an answer ended, if it has calls."""
    return "tool_calls" if reason == "stop" and reader.calls else reason


def _with_rivals(one: Object) -> Object:
    return {**_entry(one), "top_logprobs": [_entry(rival) for rival in one["top_logprobs"]]}


def _entry(one: Object) -> Object:
    return {"token": one["token"], "logprob": _log_prob(one), "bytes": one["bytes"]}


def _by_text(one: Object) -> dict[str, float]:
    """The likeliest tokens and the one that was taken; of two that read alike the likelier."""
    found: dict[str, float] = {}
    for rival in (*one["top_logprobs"], one):
        found.setdefault(rival["token"], _log_prob(rival))
    return found


def _log_prob(one: Object) -> float:
    return max(float(one["logprob"]), LEAST_LOG_PROB)
