"""Prompt scores: how likely each token of a prompt was, told as its rows come home.

A token's log-probability comes of the row before it, so the first token has none. Kept rows of
other requests are of no use to a prompt of which scores are missing, as no hidden rows are kept:
it is read anew.
"""

from __future__ import annotations

import json

from edgespec.decoding.answer import RequestClient, TextCodec, entries, entry
from edgespec.decoding.events import PromptEncoded
from edgespec.machines.effects import Effect
from edgespec.types.record import MOST_CHARS
from edgespec.verify.top_logprobs import TopLogprobs
from edgespec.wire.client_messages import Echoed, Submit

_MOST_TOLD = MOST_CHARS // 2
"""Characters of one message's text, but for the last token's."""


class PromptScores:
    """Of one request, whose ring may be lost meanwhile: nothing is told twice."""

    def __init__(self, submit: Submit, client: RequestClient, codec: TextCodec) -> None:
        self.top = submit.prompt_top
        self._echoes = submit.echo or self.top >= 0
        self._is_unanswered = submit.max_new_tokens == 0
        self._client, self._codec = client, codec
        self._tokens: tuple[int, ...] = ()
        self._told = 0

    def begin(self, tokens: tuple[int, ...]) -> None:
        """These are the prompt's."""
        self._tokens = tokens

    @property
    def next_row(self) -> int | None:
        """The first row after which a token is to be scored; None: there is none."""
        missing = self.top >= 0 and self._told + 1 < len(self._tokens)
        return self._told if missing else None

    @property
    def are_all(self) -> bool:
        """Whether nothing but they was asked for, and they are complete."""
        return self._is_unanswered and self.next_row is None

    def echo(self, prompt: PromptEncoded) -> list[Effect]:
        """What the client is told of its prompt before any of it is read."""
        if not self._echoes:
            return []
        told: list[Effect] = [self._reply(prompt.tokens, prompt.text)]
        if self.top >= 0:
            first = {**entry(self._codec, prompt.tokens[0], None), "top_logprobs": []}
            told.append(self._reply(log_probs=json.dumps([first], ensure_ascii=False)))
        return told

    def take(self, count: int, scores: TopLogprobs | None) -> list[Effect]:
        """The tokens after the next `count` rows have these scores; what the client is told."""
        assert scores is not None
        tokens = self._tokens[self._told + 1 : self._told + 1 + count]
        self._told += count
        found: list[Effect] = []
        told: list[str] = []
        for one in entries(self._codec, tokens, scores.part(slice(count), self.top)):
            told.append(json.dumps(one, ensure_ascii=False))
            if sum(map(len, told)) > _MOST_TOLD:
                found.append(self._reply(log_probs=f"[{', '.join(told)}]"))
                told = []
        return [*found, self._reply(log_probs=f"[{', '.join(told)}]")] if told else found

    def _reply(self, tokens: tuple[int, ...] = (), text: str = "", log_probs: str = "") -> Effect:
        return self._client.reply(Echoed(self._client.tag, tokens, text, log_probs))
