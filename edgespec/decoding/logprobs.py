"""Log-probabilities: how likely a token and its rivals were, as a client is told."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from edgespec.decoding.answer import TextCodec
from edgespec.verify.sampling import Choice
from edgespec.verify.top_logprobs import TopLogprobs


class HeadLog:
    """What the head said of rows, until they are committed or gone."""

    def __init__(self) -> None:
        self._margins: dict[int, float] = {}
        # The token, its log-probability, the likeliest tokens, theirs.
        self._logprobs: dict[int, tuple[int, float, list[int], list[float]]] = {}

    def add(self, ids: Sequence[int], choice: Choice, others: TopLogprobs | None) -> None:
        """The tokens after rows `ids` were sampled, those of the path."""
        self._margins.update(zip(ids, choice.margins.tolist(), strict=True))
        if others is not None:
            own = choice.tokens.tolist(), others.log_probs.tolist()
            rows = zip(*own, others.top.tolist(), others.top_log_probs.tolist(), strict=True)
            self._logprobs.update(zip(ids, rows, strict=True))

    def as_json(self, ids: Sequence[int], codec: TextCodec) -> str:
        """The log-probabilities of these rows' tokens, as the message Tokens has them."""
        found = []
        for token, log_prob, top, top_log_probs in (self._logprobs[i] for i in ids):
            pairs = zip(top, top_log_probs, strict=True)
            # A grammar may leave fewer tokens than are asked for.
            rivals = [_entry(codec, *rival) for rival in pairs if rival[1] > -math.inf]
            found.append({**_entry(codec, token, log_prob), "top_logprobs": rivals})
        return json.dumps(found, ensure_ascii=False)

    def take(self, ids: Sequence[int]) -> float:
        """The smallest margin of these rows; they and all older ones are forgotten."""
        smallest, newest = min(self._margins[i] for i in ids), ids[-1]
        self._margins = {i: m for i, m in self._margins.items() if i > newest}
        self._logprobs = {i: c for i, c in self._logprobs.items() if i > newest}
        return smallest


def _entry(codec: TextCodec, token: int, log_prob: float) -> dict[str, Any]:
    text, raw = codec.token(token)
    spelt = list(raw) if raw is not None else None
    return {"id": token, "token": text, "bytes": spelt, "logprob": log_prob}
