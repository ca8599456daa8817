"""Toy: a vocabulary of one-letter tokens, and its tokenizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import ConfigError
from edgespec.types.tool_forms import Message, Tool
from edgespec.verify.rules import Grammar

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
