"""The answer to one request: takes committed tokens, says what text is final and when to stop."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from edgespec.types.tool_forms import Message, Tool
from edgespec.verify.rules import Grammar
from edgespec.verify.stops import StopScanner


class TextDecoder(Protocol):
    """Turns tokens into text as they come, never half a character."""

    def push(self, token: int) -> str:
        """Text that this token finished."""

    def flush(self) -> str:
        """Whatever text is still held back."""


class TextCodec(Protocol):
    """A tokenizer, as far as the coordinator needs it."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end an answer."""

    @property
    def chat_template(self) -> str:
        """The model's chat template; "" if it has none."""

    def check_length(self, text: str, most: int) -> None:
        """Raise CapacityError if the text is too long, by its characters alone, for `most` tokens.

        Takes no longer than to look at each character once, and never refuses what fits.
        """

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a prompt, with the tokenizer's own opening token."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]], most: int) -> Sequence[int]:
        """Token ids of a conversation by the model's chat template, up to where it answers.

        Raises ConfigError if the model has none, or does not take this conversation, CapacityError
        if what the template wrote is too long for `most` tokens (see check_length).
        """

    def encode_tool_chat(
        self, messages: Sequence[Message], tools: Sequence[Tool], most: int
    ) -> Sequence[int]:
        """As encode_chat, of a conversation in which these tools may be called, or tools were."""

    def grammar(self, text: str) -> Grammar:
        """What an answer may be by that text, which is as the message Submit has it.

        Raises ConfigError for one that cannot be used.
        """

    def stream(self) -> TextDecoder:
        """A fresh stream for one answer."""

    def token(self, token: int) -> tuple[str, bytes | None]:
        """The text of one token alone, and its bytes, None if they are not known."""


class Answer:
    """Grows token by token until it finishes; nothing can be added after the end.

    `finish_reason` is "" while it grows, then "stop" (end token or stop string) or "length".
    """

    def __init__(self, codec: TextCodec, stop: tuple[str, ...], max_new_tokens: int) -> None:
        """Raises ConfigError for an empty stop string."""
        self.codec = codec
        self._eos_ids = codec.eos_ids
        self._stream = codec.stream()
        self._scanner = StopScanner(stop)
        self.limit = max_new_tokens
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason = ""

    @property
    def text(self) -> str:
        """All final text so far."""
        return "".join(self._text)

    def push(self, token: int) -> str:
        """Add one committed token; return the text that became final with it.

        An end token is part of `token_ids` (as in transformers' generate) and gives no text. A
        stop string is not part of the text; the token that completes it is part of `token_ids`.
        """
        self.token_ids.append(token)
        at_end = token in self._eos_ids
        at_limit = len(self.token_ids) == self.limit
        piece = "" if at_end else self._stream.push(token)
        if at_end or at_limit:
            piece += self._stream.flush()
        text, stopped = self._scanner.push(piece)
        if at_end or stopped:
            self.finish_reason = "stop"
        elif at_limit:
            self.finish_reason = "length"
        if self.finish_reason:
            text += self._scanner.flush()  # nothing after a stop string
        self._text.append(text)
        return text
