"""Formats: an answer of the ring as clients read it, whole or in pieces.

Here are OpenAI's chats and completions, and what all forms share; serving.responses, .messages and
.ollama have the others.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from msgspec import UNSET, DecodeError, Struct, to_builtins
from msgspec.json import decode
from msgspec.structs import replace

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
from edgespec.serving.tools import AnswerReader, Said
from edgespec.types.tool_forms import ToolForm
from edgespec.wire.client_messages import Finished, Tokens

Object = dict[str, Any]
Reply = Struct | Object
"""A whole answer or a piece of it."""

LEAST_LOG_PROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class Served:
    """What answers: how its model calls tools, the tag of its thoughts ("": it has none), its name,
    and the time, in seconds since 1970."""

    form: ToolForm
    tag: str
    model: str
    created: int


class Format:
    """The answers to one call, under an id of its own: one for each choice, by its index."""

    media = "text/event-stream; charset=utf-8"
    """Of a stream."""
    done = b"data: [DONE]\n\n"
    """What ends a stream."""

    def __init__(self, request: ChatRequest | TextRequest, served: Served) -> None:
        self.request = request
        # What a grammar holds from its first token on has no room for a thought.
        thinks = isinstance(request, ChatRequest) and not request.is_held
        reader = partial(AnswerReader, served.form, request.callable_tools)
        tag = served.tag if thinks else ""
        self.readers = [reader(tag) for _ in range(request.choices)]
        self.served = served

    def whole(self, ends: Sequence[Finished], log_probs: Sequence[list[Object]]) -> Reply:
        """All of it; of each choice its end and log-probabilities."""
        raise NotImplementedError

    def opening(self, first: Tokens | Finished) -> list[Reply]:
        """What comes before the first piece, which is of that message."""
        return []

    def pieces(self, index: int, tokens: Tokens) -> list[Reply]:
        """Newly committed tokens of a choice."""
        raise NotImplementedError

    def endings(self, index: int, finished: Finished) -> list[Reply]:
        """What comes after the last piece of a choice."""
        raise NotImplementedError

    def closing(self, ends: Sequence[Finished]) -> list[Reply]:
        """What comes after the ends of all choices."""
        return []

    def framed(self, replies: Sequence[Reply]) -> bytes:
        """As a stream has them."""
        return b"".join(map(event, replies))

    def waiting(self, text: str) -> bytes:
        """What says, in a stream, that the answer waits, and for what."""
        return comment(text)

    def said(self, index: int, end: Finished) -> list[Said]:
        """All that a choice says."""
        reader = self.readers[index]
        return [*reader.push(end.text, thinks=end.thinks), *reader.flush(end.finish_reason)]


class ChoiceFormat(Format):
    """OpenAI's lists of choices."""

    prefix = ""
    whole_type: type[AnswerReply]
    piece_type: type[AnswerReply]

    def __init__(self, request: ChatRequest | TextRequest, served: Served) -> None:
        super().__init__(request, served)
        self._offsets = [0] * request.choices  # characters of each choice so far, of a completion
        self._counted = [(0, 0)] * request.choices  # tokens of each prompt, and of its answer
        self._common: Object = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": served.created,
            "model": served.model,
        }

    def whole(self, ends: Sequence[Finished], log_probs: Sequence[list[Object]]) -> Reply:
        told = enumerate(zip(ends, log_probs, strict=True))
        choices = [self.choice(i, end, listed) for i, (end, listed) in told]
        return self.whole_type(choices=choices, usage=self._usage(ends), **self._common)

    def pieces(self, index: int, tokens: Tokens) -> list[Reply]:
        so_far = self._counted[index][1] + len(tokens.token_ids)
        self._counted[index] = tokens.prompt_tokens, so_far
        listed = log_probs_of(tokens.log_probs)
        return [self._piece(one) for one in self.piece_choices(index, tokens, listed)]

    def endings(self, index: int, finished: Finished) -> list[Reply]:
        return [self._piece(one) for one in self.last_choices(index, finished.finish_reason)]

    def closing(self, ends: Sequence[Finished]) -> list[Reply]:
        return [self._piece(usage=self._usage(ends))] if self.request.with_usage else []

    def _piece(self, *choices: AnswerChoice, usage: Usage | None = None) -> AnswerReply:
        if usage is None and self.request.counts_pieces:
            prompts = sum(prompt for prompt, _ in self._counted[:: self.request.n])
            usage = usage_of(prompts, sum(answer for _, answer in self._counted))
        counted = usage if self.request.with_usage else UNSET
        return self.piece_type(choices=list(choices), usage=counted, **self._common)

    def _usage(self, ends: Sequence[Finished]) -> Usage:
        return usage(ends, self.request.n)

    def choice(self, index: int, end: Finished, log_probs: list[Object]) -> AnswerChoice:
        """A choice of a whole answer."""
        raise NotImplementedError

    def piece_choices(
        self, index: int, tokens: Tokens, log_probs: list[Object]
    ) -> Sequence[AnswerChoice]:
        """What new tokens are of a choice, in pieces."""
        raise NotImplementedError

    def last_choices(self, index: int, reason: str) -> Sequence[AnswerChoice]:
        """The last pieces of a choice; `reason`: why it ends."""
        raise NotImplementedError


class ChatFormat(ChoiceFormat):
    """chat.completion and chat.completion.chunk."""

    prefix, whole_type, piece_type = "chatcmpl", Chat, ChatChunk

    def opening(self, first: Tokens | Finished) -> list[Reply]:
        delta = {"role": "assistant", "content": ""}
        choices = range(self.request.choices)
        return [self._piece(ChatChunkChoice(index, None, None, delta)) for index in choices]

    def choice(self, index: int, end: Finished, log_probs: list[Object]) -> AnswerChoice:
        said = self.said(index, end)
        calls = [
            MadeCall(one.id, MadeFunction(one.name, "".join(s.text for s in said if s.call == n)))
            for n, one in enumerate(one for one in said if one.name)
        ]
        content = "".join(one.text for one in said if one.call < 0 and not one.thinks)
        message = MadeMessage(content if content or not calls else None)
        if thought := "".join(one.text for one in said if one.thinks):
            message.reasoning_content = message.reasoning = thought
        if calls:
            message.tool_calls = calls
        reason = _reason(end.finish_reason, self.readers[index])
        return ChatChoice(index, self._listed(log_probs), reason, message)

    def piece_choices(
        self, index: int, tokens: Tokens, log_probs: list[Object]
    ) -> Sequence[AnswerChoice]:
        listed = self._listed(log_probs) if log_probs else None
        said = self.readers[index].push(tokens.text, thinks=tokens.thinks)
        choices = [ChatChunkChoice(index, None, None, _delta(one)) for one in said]
        if listed and not choices:
            choices = [ChatChunkChoice(index, None, None, {"content": ""})]
        if choices:
            choices[0].logprobs = listed
        return choices

    def last_choices(self, index: int, reason: str) -> Sequence[AnswerChoice]:
        reader = self.readers[index]
        last = [ChatChunkChoice(index, None, None, _delta(one)) for one in reader.flush(reason)]
        return [*last, ChatChunkChoice(index, None, _reason(reason, reader), {})]

    def _listed(self, log_probs: list[Object]) -> Object | None:
        if self.request.top < 0:
            return None
        return {"content": [_with_rivals(one) for one in log_probs], "refusal": None}


class CompletionFormat(ChoiceFormat):
    """text_completion, whole and in pieces."""

    prefix, whole_type, piece_type = "cmpl", TextCompletion, TextCompletion

    def choice(self, index: int, end: Finished, log_probs: list[Object]) -> AnswerChoice:
        return TextChoice(index, self._listed(index, log_probs), end.finish_reason, end.text)

    def piece_choices(
        self, index: int, tokens: Tokens, log_probs: list[Object]
    ) -> Sequence[AnswerChoice]:
        if not tokens.text and not log_probs:
            return []
        return [TextChoice(index, self._listed(index, log_probs), None, tokens.text)]

    def last_choices(self, index: int, reason: str) -> Sequence[AnswerChoice]:
        return [TextChoice(index, None, reason, "")]

    def _listed(self, index: int, log_probs: list[Object]) -> Object | None:
        if self.request.top < 0:
            return None
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


class AnswerBlock:
    """A part of an answer: a thought, a text, or a call of a tool."""

    def __init__(self, kind: Literal["thinking", "text", "call"], said: Said) -> None:
        self.kind = kind
        self.call_id, self.name = said.id, said.name
        self.text = ""

    @property
    def arguments(self) -> Object:
        """Those of a call as an object; none if that is not JSON, as of one that was cut off."""
        try:
            return decode(self.text, type=dict)
        except (DecodeError, UnicodeError, RecursionError):
            return {}


class BlockFormat(Format):
    """Of one choice, told as blocks, of which one at most is open."""

    def __init__(self, request: ChatRequest | TextRequest, served: Served) -> None:
        super().__init__(request, served)
        self.blocks: list[AnswerBlock] = []
        self._is_open = False

    def whole(self, ends: Sequence[Finished], log_probs: Sequence[list[Object]]) -> Reply:
        self._take(self.said(0, ends[0]))
        self._close()
        return self.reply(ends[0])

    def pieces(self, index: int, tokens: Tokens) -> list[Reply]:
        return self._take(self.readers[0].push(tokens.text, thinks=tokens.thinks))

    def endings(self, index: int, finished: Finished) -> list[Reply]:
        return [*self._take(self.readers[0].flush(finished.finish_reason)), *self._close()]

    def _take(self, said: Sequence[Said]) -> list[Reply]:
        """Add to the blocks; what is told of that."""
        found: list[Reply] = []
        for one in said:
            kind: Literal["thinking", "text", "call"] = "thinking" if one.thinks else "text"
            kind = "call" if one.call >= 0 else kind
            if one.name or not self._is_open or self.blocks[-1].kind != kind:
                found += self._close()
                self.blocks.append(AnswerBlock(kind, one))
                self._is_open = True
                found += self.begun(self.blocks[-1])
            if one.text:
                self.blocks[-1].text += one.text
                found += self.added(self.blocks[-1], one.text)
        return found

    def _close(self) -> list[Reply]:
        if not self._is_open:
            return []
        self._is_open = False
        return self.ended(self.blocks[-1])

    def reply(self, end: Finished) -> Reply:
        """The whole answer."""
        raise NotImplementedError

    def begun(self, block: AnswerBlock) -> list[Reply]:
        """What is told as a block begins."""
        return []

    def added(self, block: AnswerBlock, text: str) -> list[Reply]:
        """What is told of more text of it."""
        return []

    def ended(self, block: AnswerBlock) -> list[Reply]:
        """What is told as it is whole."""
        return []


def usage_of(prompts: int, answers: int) -> Usage:
    """So many tokens were read and written so far."""
    return Usage(prompts, answers, prompts + answers)


def usage(ends: Sequence[Finished], n: int) -> Usage:
    """How many tokens were read and written, and what the ring did for them; `ends`: of `n` choices
    of each prompt, which counts once. Times are those of the last one."""
    read = ends[::n]
    prompts, answers = sum(e.prompt_tokens for e in read), sum(e.new_tokens for e in ends)
    return replace(
        usage_of(prompts, answers),
        prompt_tokens_details=CachedTokens(sum(e.cached_tokens for e in read)),
        edgespec=RingUsage(
            policy=ends[0].policy,
            seconds=max(e.seconds for e in ends),
            first_token_seconds=max(e.first_token_seconds for e in ends),
            trips=sum(e.trips for e in ends),
            rows_sent=sum(e.rows_sent for e in ends),
            rows_wasted=sum(e.rows_wasted for e in ends),
            recoveries=max(e.recoveries for e in ends),
            sampled=ends[0].sampled,
            looped=max(e.looped for e in ends),
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
    """A piece of an answer."""
    if said.thinks:
        return {"reasoning_content": said.text, "reasoning": said.text}
    if said.call < 0:
        return {"content": said.text}
    call: Object = {"index": said.call, "function": {"arguments": said.text}}
    if said.name:
        call |= {"id": said.id, "type": "function"}
        call["function"]["name"] = said.name
    return {"tool_calls": [call]}


def _reason(reason: str, reader: AnswerReader) -> str:
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
