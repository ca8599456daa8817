"""Formats: an answer of the ring as OpenAI's clients read it, whole or in pieces."""

from __future__ import annotations

import json
import secrets
from typing import Any

from msgspec import UNSET, Struct, to_builtins

from edgespec.serving.schema import (
    AnswerChoice,
    AnswerReply,
    CachedTokens,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatMessage,
    ChatRequest,
    RingUsage,
    TextChoice,
    TextCompletion,
    TextRequest,
    Usage,
)
from edgespec.wire.client_messages import Finished

Object = dict[str, Any]

LEAST_LOG_PROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


class Format:
    """One answer, under an id of its own."""

    prefix = ""
    whole_type: type[AnswerReply]
    piece_type: type[AnswerReply]

    def __init__(self, request: ChatRequest | TextRequest, model: str, created: int) -> None:
        """`created`: seconds since 1970."""
        self._request = request
        self._common: Object = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": created,
            "model": model,
        }

    def whole(self, finished: Finished, log_probs: list[Object]) -> AnswerReply:
        """All of it."""
        choice = self.choice(finished.text, log_probs, finished.finish_reason)
        return self.whole_type(choices=[choice], usage=usage(finished), **self._common)

    def opening(self) -> list[AnswerReply]:
        """What comes before the first piece."""
        return []

    def piece(self, text: str, log_probs: list[Object]) -> AnswerReply:
        """Newly committed text."""
        return self._piece(self.piece_choice(text, log_probs, None))

    def ending(self, finished: Finished) -> list[AnswerReply]:
        """What comes after the last piece."""
        last = self._piece(self.piece_choice("", [], finished.finish_reason))
        return [last, self._piece(usage=usage(finished))] if self._request.with_usage else [last]

    def _piece(self, *choices: AnswerChoice, usage: Usage | None = None) -> AnswerReply:
        counted = usage if self._request.with_usage else UNSET
        return self.piece_type(choices=list(choices), usage=counted, **self._common)

    def choice(self, text: str, log_probs: list[Object], reason: str) -> AnswerChoice:
        """The one choice of a whole answer."""
        raise NotImplementedError

    def piece_choice(self, text: str, log_probs: list[Object], reason: str | None) -> AnswerChoice:
        """The one choice of a piece; `reason`: why the answer ends with it."""
        raise NotImplementedError


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    prefix, whole_type, piece_type = "chatcmpl", Chat, ChatChunk

    def opening(self) -> list[AnswerReply]:
        delta = {"role": "assistant", "content": ""}
        return [self._piece(ChatChunkChoice(0, None, None, delta))]

    def choice(self, text: str, log_probs: list[Object], reason: str) -> AnswerChoice:
        return ChatChoice(0, self._listed(log_probs), reason, ChatMessage(text))

    def piece_choice(self, text: str, log_probs: list[Object], reason: str | None) -> AnswerChoice:
        listed = self._listed(log_probs) if log_probs else None
        return ChatChunkChoice(0, listed, reason, {} if reason else {"content": text})

    def _listed(self, log_probs: list[Object]) -> Object | None:
        if self._request.top < 0:
            return None
        return {"content": [_with_rivals(one) for one in log_probs], "refusal": None}


class CompletionFormat(Format):
    """text_completion, whole and in pieces."""

    prefix, whole_type, piece_type = "cmpl", TextCompletion, TextCompletion
    _offset = 0

    def choice(self, text: str, log_probs: list[Object], reason: str | None) -> AnswerChoice:
        listed = self._listed(log_probs) if self._request.top >= 0 else None
        return TextChoice(0, listed, reason, text)

    def piece_choice(self, text: str, log_probs: list[Object], reason: str | None) -> AnswerChoice:
        return TextChoice(0, None, reason, "") if reason else self.choice(text, log_probs, None)

    def _listed(self, log_probs: list[Object]) -> Object:
        offsets = []
        for one in log_probs:
            offsets.append(self._offset)
            self._offset += len(one["token"])
        return {
            "tokens": [one["token"] for one in log_probs],
            "token_logprobs": [_log_prob(one) for one in log_probs],
            "top_logprobs": [_by_text(one) for one in log_probs],
            "text_offset": offsets,
        }


def format_of(request: ChatRequest | TextRequest, model: str, created: int) -> Format:
    """The one of that kind of request."""
    kind = ChatFormat if isinstance(request, ChatRequest) else CompletionFormat
    return kind(request, model, created)


def usage(finished: Finished) -> Usage:
    """How many tokens were read and written, and what the ring did for them."""
    return Usage(
        prompt_tokens=finished.prompt_tokens,
        completion_tokens=finished.new_tokens,
        total_tokens=finished.prompt_tokens + finished.new_tokens,
        prompt_tokens_details=CachedTokens(finished.cached_tokens),
        edgespec=RingUsage(
            **{name: getattr(finished, name) for name in RingUsage.__struct_fields__}
        ),
    )


def log_probs_of(text: str) -> list[Object]:
    """What a message Tokens says of its tokens."""
    return json.loads(text) if text else []


def encoded(value: Struct | Object) -> bytes:
    """As JSON in ASCII: some readers of events take a U+2028 for the end of a line."""
    return json.dumps(to_builtins(value), allow_nan=False, separators=(",", ":")).encode()


def event(value: Struct | Object) -> bytes:
    """As one server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


def comment(text: str) -> bytes:
    """As a comment, which readers of server-sent events skip."""
    return f": {' '.join(text.split())}\n\n".encode()


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
