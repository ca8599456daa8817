"""Toy: a vocabulary of one-letter tokens, and the answers that plain decoding gives in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import ConfigError
from edgespec.sim.toy_model import toy_next
from edgespec.types.tool_forms import Message, Tool
from edgespec.verify.rules import Grammar
from edgespec.wire.client_messages import Submit

VOCABULARY = 40


class HoldingStream:
    """A text stream that holds every third token's text back until the next one, or the end."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token: int) -> str:
        text, self._held = self._held, ""
        if token % 3 == 0:
            self._held = text_of(token)
            return text
        return text + text_of(token)

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


@dataclass
class ToyCodec:
    """A tokenizer of one-letter tokens (several tokens share a letter)."""

    eos_ids: Collection[int] = frozenset()
    chat_template: str = ""

    def check_length(self, text: str, most: int) -> None:
        """Nothing is too long to be looked at."""

    def encode(self, text: str, *, bare: bool = False) -> Sequence[int]:
        """One token a character; blanks give none."""
        return [ord(c) % VOCABULARY for c in text if c != " "]

    def encode_chat(
        self,
        messages: Sequence[Message],
        most: int,
        tools: Sequence[Tool] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Sequence[int]:
        if tools:
            raise ConfigError("the toy model knows no tools")
        return self.encode("".join(one["content"] for one in messages))

    def spelt(self, tokens: Sequence[int]) -> str:
        return "".join(map(text_of, tokens))

    thought_marks = None

    def opens_thought(self, tokens: Sequence[int]) -> bool:
        return False

    def grammar(self, text: str) -> Grammar:
        raise ConfigError("the toy model knows no grammar")

    def token(self, token: int) -> tuple[str, bytes | None]:
        text = text_of(token)
        return text, text.encode()

    def stream(self) -> HoldingStream:
        return HoldingStream()


def text_of(token: int) -> str:
    """The text of a token that ends no answer."""
    return chr(ord("a") + token % 10)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a request must get. `whole`: its prompt, its answer, and the tokens that a model would
    go on with: what a draft may be told."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    whole: tuple[int, ...]


def plain_answer(codec: ToyCodec, ask: Submit, stages: int, context_length: int) -> Expected:
    """Plain decoding, one token at a time, written down without the code that is checked."""
    prompt = list(codec.encode(ask.prompt))
    tokens: list[int] = []
    text = ""
    reason = ""
    limit = min(ask.max_new_tokens, context_length - len(prompt))
    while not reason:
        token = toy_next(prompt + tokens, stages, VOCABULARY, ask.seed)
        tokens.append(token)
        at_end = token in codec.eos_ids
        at_limit = len(tokens) == limit
        text += "" if at_end else text_of(token)
        # Text that the stream holds back cannot stop an answer yet.
        held = token % 3 == 0 and not at_end and not at_limit
        visible = text[:-1] if held else text
        ends = [visible.index(s) + len(s) for s in ask.stop if s in visible]
        if ends:
            first = min(ends)
            starts = [first - len(s) for s in ask.stop if visible[:first].endswith(s)]
            text, reason = text[: min(starts)], "stop"
        elif at_end:
            reason = "stop"
        elif at_limit:
            reason = "length"
    whole = prompt + tokens
    for _ in range(3):
        whole.append(toy_next(whole, stages, VOCABULARY, ask.seed))
    return Expected(tuple(tokens), text, reason, tuple(whole))
