"""Chances: how likely a token and its rivals were, as a client is told."""

from __future__ import annotations

from collections.abc import Iterator
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


def _entry(codec: TextCodec, token: int, log_prob: float) -> dict[str, Any]:
    text, raw = codec.token(token)
    return {
        "id": token,
        "token": text,
        "bytes": list(raw) if raw is not None else None,
        "logprob": log_prob,
    }
