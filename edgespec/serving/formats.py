"""Formats: an answer of the ring as clients read it, whole or in pieces.

Here are OpenAI's chats and completions, and what all forms share; serving.responses, .messages and
.ollama have the others.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from msgspec import UNSET, DecodeError, Struct, to_builtins
from msgspec.json import decode
from msgspec.structs import replace

from edgespec import __version__
from edgespec.serving.problems import refused
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
from edgespec.serving.token_details import (
    MOST_SCORES,
    Entry,
    TextPlaces,
    ToldPrompt,
    for_chats,
    for_completions,
    log_probs_of,
)
from edgespec.serving.tools import AnswerReader, Said
from edgespec.types.tool_forms import ToolForm
from edgespec.wire.client_messages import Echoed, Finished, Tokens

Object = dict[str, Any]
Reply = Struct | Object
"""A whole answer or a piece of it."""


@dataclass(frozen=True, slots=True)
class Served:
    """What answers: how its model calls tools, the tag of its thoughts ("": it has none), its name,
    and the time, in seconds since 1970."""

    form: ToolForm
    tag: str
    model: str
    created: int

    @property
    def fingerprint(self) -> str:
        """Another one for another model or release."""
        return f"fp_{hashlib.sha256(f'{self.model} {__version__}'.encode()).hexdigest()[:10]}"


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

    def opening(self, prompt_tokens: int) -> list[Reply]:
        """What comes before the first piece; so many tokens were read: 0 for who has the prompt."""
        return []

    def take_prompt(self, index: int, told: Echoed) -> None:
        """More of a choice's prompt is told. Raises ApiProblem for more than a reply can have."""

    def prompted(self, index: int, told: Echoed) -> list[Reply]:
        """What is told of that."""
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
        self._keeps_scores = request.prompt_top >= 0 and not request.stream
        keeps, n = self._keeps_scores, request.n
        # The scores of a prompt are those of all its choices: only the first one is asked for them.
        self._prompts = [ToldPrompt(keeps=keeps) for _ in range(request.choices)]
        if keeps:
            self._prompts = [self._prompts[i - i % n] for i in range(request.choices)]
        self._counted = [(0, 0)] * request.choices  # tokens of each prompt, and of its answer
        self._common: Object = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": served.created,
            "model": served.model,
            "system_fingerprint": served.fingerprint,
        }

    def whole(self, ends: Sequence[Finished], log_probs: Sequence[list[Object]]) -> Reply:
        told = enumerate(zip(ends, log_probs, strict=True))
        choices = [self.choice(i, end, listed) for i, (end, listed) in told]
        reply = self.whole_type(choices=choices, usage=self._usage(ends), **self._common)
        self._tell_prompt(reply, self._prompts[0])
        return reply

    def take_prompt(self, index: int, told: Echoed) -> None:
        if self._keeps_scores and index % self.request.n:
            return
        self._prompts[index].take(told)
        tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        if self._keeps_scores and tokens * (1 + self.request.prompt_top) > MOST_SCORES:
            words = (
                f"the scores of {tokens} tokens of prompts with {self.request.prompt_top} rivals "
                f"each are too many; a reply has {MOST_SCORES}: ask for fewer rivals, or prompts"
            )
            raise refused(words, code="too_many_scores")

    def _tell_prompt(self, reply: Any, prompt: ToldPrompt) -> None:
        """Add what of a prompt was asked for to a reply, or a part of one, that has a place for
        it."""
        asked, fields = self.request, reply.__struct_fields__
        if asked.return_token_ids and "prompt_token_ids" in fields and prompt.token_ids:
            reply.prompt_token_ids = prompt.token_ids
        if asked.prompt_logprobs is not None and "prompt_logprobs" in fields:
            reply.prompt_logprobs = prompt.by_id(asked.prompt_logprobs)

    def _tell_ids(self, choice: Any, tokens: Sequence[int]) -> None:
        """Add the ids of an answer's tokens to a choice, if they were asked for."""
        if self.request.return_token_ids:
            choice.token_ids = [*tokens]

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

    def opening(self, prompt_tokens: int) -> list[Reply]:
        delta = {"role": "assistant", "content": ""}
        choices = range(self.request.choices)
        found = [self._piece(ChatChunkChoice(index, None, None, delta)) for index in choices]
        told = (prompt for prompt in self._prompts if prompt.token_ids)  # all are the same
        self._tell_prompt(found[0], next(told, self._prompts[0]))
        return [*found]

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
        choice = ChatChoice(index, for_chats(log_probs, self.request.top), reason, message)
        self._tell_ids(choice, end.token_ids)
        return choice

    def piece_choices(
        self, index: int, tokens: Tokens, log_probs: list[Object]
    ) -> Sequence[AnswerChoice]:
        listed = for_chats(log_probs, self.request.top) if log_probs else None
        said = self.readers[index].push(tokens.text, thinks=tokens.thinks)
        choices = [ChatChunkChoice(index, None, None, _delta(one)) for one in said]
        if (listed or self.request.return_token_ids) and not choices:
            choices = [ChatChunkChoice(index, None, None, {"content": ""})]
        if choices:
            choices[0].logprobs = listed
            self._tell_ids(choices[0], tokens.token_ids)
        return choices

    def last_choices(self, index: int, reason: str) -> Sequence[AnswerChoice]:
        reader = self.readers[index]
        last = [ChatChunkChoice(index, None, None, _delta(one)) for one in reader.flush(reason)]
        return [*last, ChatChunkChoice(index, None, _reason(reason, reader), {})]


class CompletionFormat(ChoiceFormat):
    """text_completion, whole and in pieces."""

    prefix, whole_type, piece_type = "cmpl", TextCompletion, TextCompletion

    def __init__(self, request: ChatRequest | TextRequest, served: Served) -> None:
        super().__init__(request, served)
        assert isinstance(request, TextRequest)
        self._echoes, self._asked = request.echo, request.prompts
        self._places = [TextPlaces() for _ in range(request.choices)]
        self._begun: set[int] = set()

    def prompted(self, index: int, told: Echoed) -> list[Reply]:
        piece = TextChoice(index, None, None, "")
        if told.token_ids:
            piece.text = self._echo(index)
            self._tell_prompt(piece, self._prompts[index])
        elif self._echoes:
            piece.logprobs = self._listed(index, log_probs_of(told.log_probs))
        return [self._piece(piece)]

    def choice(self, index: int, end: Finished, log_probs: list[Object]) -> AnswerChoice:
        text, prompt = self._echo(index), self._prompts[index]
        listed = self._listed(index, prompt.entries if self._echoes else [])
        self._begin(index, end.text, log_probs)
        if (behind := self._listed(index, log_probs)) and listed:
            listed = {name: [*column, *behind[name]] for name, column in listed.items()}
        choice = TextChoice(index, listed, end.finish_reason, text + end.text)
        self._tell_prompt(choice, prompt)
        self._tell_ids(choice, end.token_ids)
        return choice

    def piece_choices(
        self, index: int, tokens: Tokens, log_probs: list[Object]
    ) -> Sequence[AnswerChoice]:
        if not (tokens.text or log_probs or self.request.return_token_ids):
            return []
        self._begin(index, tokens.text, log_probs)
        choice = TextChoice(index, self._listed(index, log_probs), None, tokens.text)
        self._tell_ids(choice, tokens.token_ids)
        return [choice]

    def last_choices(self, index: int, reason: str) -> Sequence[AnswerChoice]:
        return [TextChoice(index, None, reason, "")]

    def _echo(self, index: int) -> str:
        """The prompt as it stands before the answer; a text without what the tokenizer puts in
        front of it."""
        asked, read = self._asked[index // self.request.n], self._prompts[index].text
        if not self._echoes:
            return ""
        if not isinstance(asked, str):
            return read
        self._places[index].shift(max(read.rfind(asked), 0))
        return asked

    def _begin(self, index: int, text: str, entries: Sequence[Entry]) -> None:
        """The answer begins: some decoders drop the blank in front of its first token."""
        if entries and index not in self._begun:
            self._begun.add(index)
            is_dropped = text[:1] not in ("", " ") and entries[0]["token"][:1] == " "
            self._places[index].shift(int(is_dropped))

    def _listed(self, index: int, entries: Sequence[Entry]) -> Object | None:
        return for_completions(entries, self.request.top, self._places[index])


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
