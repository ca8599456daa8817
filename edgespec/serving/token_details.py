"""Token details: log-probabilities, places in a text and ids of tokens, as replies have them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from typing import Any

from edgespec.wire.client_messages import Echoed

Entry = dict[str, Any]
"""Of a token, as the message Tokens tells of it."""

LEAST_LOG_PROB = -9999.0
"""What OpenAI writes for a token that cannot come: JSON has no infinity."""


def log_probs_of(text: str) -> list[Entry]:
    """What a message Tokens or Echoed says of its tokens."""
    return json.loads(text) if text else []


MOST_SCORES = 1 << 19
"""Tokens and rivals of all prompts that one whole reply tells of: they take half a GB."""


class ToldPrompt:
    """The prompt of one choice, as far as it was told; its scores only if it `keeps` them."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.token_ids: list[int] = []
        self.text = ""
        self.entries: list[Entry] = []

    def take(self, told: Echoed) -> None:
        """More of it."""
        self.token_ids += told.token_ids
        self.text += told.text
        self.entries += log_probs_of(told.log_probs) if self._keeps else ()

    def by_id(self, top: int) -> list[dict[str, Entry] | None]:
        """As vLLM has it: of each place the `top` likeliest tokens and the prompt's own, by their
        ids. The own one's rank is not known where it is none of them."""
        found: list[dict[str, Entry] | None] = []
        for one in self.entries:
            rivals = one["top_logprobs"][:top]
            ranks = {rival["id"]: n for n, rival in enumerate(rivals, start=1)}
            told = {
                str(each["id"]): {
                    "logprob": _log_prob(each),
                    "rank": ranks.get(each["id"]),
                    "decoded_token": each["token"],
                }
                for each in (*rivals, one)
                if each["logprob"] is not None
            }
            found.append(told or None)
        return found


class TextPlaces:
    """Where in a text its tokens begin, in characters; one that goes on with a character has that
    one's place."""

    def __init__(self) -> None:
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def shift(self, characters: int) -> None:
        """So many of the next ones are not in the text."""
        self._characters -= characters

    def of(self, token: Entry) -> int:
        """That of the next one."""
        raw = token["bytes"]
        if raw is None or (raw and not 0x80 <= raw[0] < 0xC0):  # no character goes on
            self._characters += len(self._decoder.decode(b"", True))
        at = max(self._characters, 0)
        text = token["token"] if raw is None else self._decoder.decode(bytes(raw))
        self._characters += len(text)
        return at


def for_chats(entries: Sequence[Entry], top: int) -> Entry | None:
    """As OpenAI's chats have them; None where they were not asked for."""
    if top < 0:
        return None
    rows = [
        {**_entry(one), "top_logprobs": [_entry(rival) for rival in one["top_logprobs"][:top]]}
        for one in entries
    ]
    return {"content": rows, "refusal": None}


def for_completions(entries: Sequence[Entry], top: int, places: TextPlaces) -> Entry | None:
    """As OpenAI's completions have them; None where they were not asked for. The first token of a
    prompt has none."""
    if top < 0:
        return None
    known = [one["logprob"] is not None for one in entries]
    pairs = [*zip(entries, known, strict=True)]
    return {
        "tokens": [_text(one) for one in entries],
        "token_logprobs": [_log_prob(one) if told else None for one, told in pairs],
        "top_logprobs": [_by_text(one, top) if told else None for one, told in pairs],
        "text_offset": [places.of(one) for one in entries],
    }


def _entry(one: Entry) -> Entry:
    return {"token": one["token"], "logprob": _log_prob(one), "bytes": one["bytes"]}


def _by_text(one: Entry, top: int) -> dict[str, float]:
    """The likeliest tokens and the one that was taken; of two that read alike the likelier."""
    found: dict[str, float] = {}
    for rival in (*one["top_logprobs"][:top], one):
        found.setdefault(_text(rival), _log_prob(rival))
    return found


def _text(one: Entry) -> str:
    """A token's text, or its bytes, as OpenAI's completions write those of a part of a character:
    several of them would read alike."""
    raw = one["bytes"]
    try:
        return one["token"] if raw is None else bytes(raw).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _log_prob(one: Entry) -> float:
    return max(float(one["logprob"]), LEAST_LOG_PROB)
