"""Formats: an answer of the ring as the objects that OpenAI's clients read, whole or in pieces."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from edgespec.serving.requests import Asked
from edgespec.wire.client_messages import Finished

Object = dict[str, Any]

LEAST_LOG_PROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


class Format:
    """One answer, under an id of its own."""

    prefix = ""
    whole_kind = ""
    piece_kind = ""

    def __init__(self, asked: Asked, model: str, created: int) -> None:
        """`created`: seconds since 1970."""
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._asked = asked
        self._model = model
        self._created = created

    def whole(self, finished: Finished, log_probs: list[Object]) -> Object:
        """All of it."""
        choice = self.choice(finished.text, log_probs, finished.finish_reason)
        return {**self._head(self.whole_kind, choice), "usage": usage(finished)}

    def opening(self) -> list[Object]:
        """What comes in front of the first piece."""
        return []

    def piece(self, text: str, log_probs: list[Object]) -> Object:
        """Some of it, newly certain."""
        return self._piece(self.delta(text, log_probs))

    def ending(self, finished: Finished) -> list[Object]:
        """What comes behind the last piece."""
        last = self._piece(self.last(finished.finish_reason))
        if not self._asked.with_usage:
            return [last]
        counted = {**self._head(self.piece_kind), "usage": usage(finished)}
        return [last, counted]

    def _piece(self, choice: Object) -> Object:
        piece = self._head(self.piece_kind, choice)
        return {**piece, "usage": None} if self._asked.with_usage else piece

    def _head(self, kind: str, *choices: Object) -> Object:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": list(choices),
        }

    def choice(self, text: str, log_probs: list[Object], reason: str) -> Object:
        """The one choice of a whole answer."""
        raise NotImplementedError

    def delta(self, text: str, log_probs: list[Object]) -> Object:
        """The one choice of a piece."""
        raise NotImplementedError

    def last(self, reason: str) -> Object:
        """The one choice of the piece that says why the answer ends."""
        raise NotImplementedError


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    prefix, whole_kind, piece_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Object]:
        return [self._piece(self._delta({"role": "assistant", "content": ""}, [], None))]

    def choice(self, text: str, log_probs: list[Object], reason: str) -> Object:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": 0,
            "message": message,
            "logprobs": self._told(log_probs),
            "finish_reason": reason,
        }

    def delta(self, text: str, log_probs: list[Object]) -> Object:
        return self._delta({"content": text}, log_probs, None)

    def last(self, reason: str) -> Object:
        return self._delta({}, [], reason)

    def _delta(self, delta: Object, log_probs: list[Object], reason: str | None) -> Object:
        told = self._told(log_probs) if log_probs else None
        return {"index": 0, "delta": delta, "logprobs": told, "finish_reason": reason}

    def _told(self, log_probs: list[Object]) -> Object | None:
        if self._asked.submit.top < 0:
            return None
        return {"content": [_with_rivals(one) for one in log_probs], "refusal": None}


class CompletionFormat(Format):
    """text_completion, whole and in pieces."""

    prefix, whole_kind, piece_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: Asked, model: str, created: int) -> None:
        super().__init__(asked, model, created)
        self._offset = 0

    def choice(self, text: str, log_probs: list[Object], reason: str | None) -> Object:
        told = self._told(log_probs) if self._asked.submit.top >= 0 else None
        return {"index": 0, "text": text, "logprobs": told, "finish_reason": reason}

    def delta(self, text: str, log_probs: list[Object]) -> Object:
        return self.choice(text, log_probs, None)

    def last(self, reason: str) -> Object:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}

    def _told(self, log_probs: list[Object]) -> Object:
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


def format_of(asked: Asked, model: str, created: int) -> Format:
    """The one of that kind of request."""
    return (ChatFormat if asked.is_chat else CompletionFormat)(asked, model, created)


def usage(finished: Finished) -> Object:
    """How many tokens were read and written; and, an extension, what the ring did for them."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.new_tokens,
        "total_tokens": finished.prompt_tokens + finished.new_tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "edgespec": {
            "policy": finished.policy,
            "seconds": finished.seconds,
            "first_token_seconds": finished.first_token_seconds,
            "trips": finished.trips,
            "rows_sent": finished.rows_sent,
            "rows_wasted": finished.rows_wasted,
            "recoveries": finished.recoveries,
        },
    }


def log_probs_of(text: str) -> list[Object]:
    """What the message Tokens tells of its tokens."""
    return json.loads(text) if text else []


def encoded(value: Object) -> bytes:
    """As JSON in ASCII: some readers of events take a U+2028 for the end of a line."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def event(value: Object) -> bytes:
    """As one server-sent event."""
    return b"data: " + encoded(value) + b"\n\n"


def comment(text: str) -> bytes:
    """As what a reader of server-sent events does not see; whoever looks at the wire does."""
    return f": {' '.join(text.split())}\n\n".encode()


def _with_rivals(one: Object) -> Object:
    rivals: Iterable[Object] = one["top_logprobs"]
    return {**_entry(one), "top_logprobs": [_entry(rival) for rival in rivals]}


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
