"""Log-probabilities: how likely a token and its rivals were, as a client is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.decoding.answer import TextCodec
from edgespec.verify.sampling import Choice
from edgespec.verify.top_logprobs import TopLogprobs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token that was taken, its natural log-probability, and the likeliest ones with theirs."""

    token: int
    log_prob: float
    top: tuple[tuple[int, float], ...]

    def as_json(self, codec: TextCodec) -> dict[str, Any]:
        """As the message Tokens has it."""
        rivals = [_entry(codec, token, log_prob) for token, log_prob in self.top]
        return {**_entry(codec, self.token, self.log_prob), "top_logprobs": rivals}


def token_logprobs(choice: Choice, others: TopLogprobs) -> Iterator[TokenLogprobs]:
    """One for each row of a head's answer."""
    top = others.top.tolist(), others.top_log_probs.tolist()
    rows = zip(choice.tokens.tolist(), others.log_probs.tolist(), *top, strict=True)
    for token, log_prob, ids, log_probs in rows:
        yield TokenLogprobs(token, log_prob, tuple(zip(ids, log_probs, strict=True)))


class HeadLog:
    """What the head said of rows, until they are committed or gone."""

    def __init__(self) -> None:
        self._margins: dict[int, float] = {}
        self._logprobs: dict[int, TokenLogprobs] = {}

    def add(self, ids: Sequence[int], choice: Choice, others: TopLogprobs | None) -> None:
        """The tokens after rows `ids` were sampled."""
        self._margins.update(zip(ids, choice.margins.tolist(), strict=True))
        if others is not None:
            self._logprobs.update(zip(ids, token_logprobs(choice, others), strict=True))

    def as_json(self, ids: Sequence[int], codec: TextCodec) -> str:
        """The log-probabilities of these rows' tokens, as the message Tokens has them."""
        found = [self._logprobs[i].as_json(codec) for i in ids]
        return json.dumps(found, ensure_ascii=False)

    def take(self, ids: Sequence[int]) -> float:
        """The smallest margin of these rows; they and all older ones are forgotten."""
        smallest, newest = min(self._margins[i] for i in ids), ids[-1]
        self._margins = {i: m for i, m in self._margins.items() if i > newest}
        self._logprobs = {i: c for i, c in self._logprobs.items() if i > newest}
        return smallest


def _entry(codec: TextCodec, token: int, log_prob: float) -> dict[str, Any]:
    text, raw = codec.token(token)
    return {
        "id": token,
        "token": text,
        "bytes": list(raw) if raw is not None else None,
        "logprob": log_prob,
    }
