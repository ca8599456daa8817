"""The answer to one request: its text and its end, its figures, and the client who gets them."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol

from edgespec.machines.effects import Effect, SendPeer
from edgespec.tree.node import Advance
from edgespec.types.tool_forms import Message, Tool
from edgespec.verify.rules import Grammar
from edgespec.verify.sampling import Choice
from edgespec.verify.stops import StopScanner
from edgespec.verify.top_logprobs import TopLogprobs, joined
from edgespec.wire.client_messages import Progress, SourceFigures, Submit
from edgespec.wire.messages import Message as WireMessage

BEGINS = "reading the prompt"
GOES_ON = "reading what there is so far"
RING_AGAIN = f"the ring is up again; {GOES_ON}"
"""What a request is told that waited, until its next token comes."""

MOST_FRUITLESS = 10
"""Rings in a row that may end before a request has a further token."""


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

    def encode(self, text: str, *, bare: bool = False) -> Sequence[int]:
        """Token ids of a prompt, with the tokenizer's own opening token, unless it is `bare`."""

    def encode_chat(
        self,
        messages: Sequence[Message],
        most: int,
        tools: Sequence[Tool] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Sequence[int]:
        """Token ids of a conversation by the model's chat template, up to where it answers; these
        `tools` may be called there. `settings`: what else the template is told, by name.

        Raises ConfigError if the model has none, or does not take this conversation, CapacityError
        if what the template wrote is too long for `most` tokens (see check_length).
        """

    @property
    def thought_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The tokens that begin a thought, and those that end one; None: there are no thoughts."""

    def opens_thought(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt ends within a thought."""

    def grammar(self, text: str) -> Grammar:
        """What an answer may be by that text, which is as the message Submit has it.

        Raises ConfigError for one that cannot be used.
        """

    def stream(self) -> TextDecoder:
        """A fresh stream for one answer."""

    def token(self, token: int) -> tuple[str, bytes | None]:
        """The text of one token alone, and its bytes, None if they are not known."""

    def spelt(self, tokens: Sequence[int]) -> str:
        """The text of all of these, control tokens by their names."""


class Answer:
    """Grows token by token until it finishes; nothing can be added after the end.

    `finish_reason` is "" while it grows, then "stop" (end token or stop string) or "length".
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: tuple[str, ...],
        max_new_tokens: int,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`stop_token_ids`: further end tokens. Raises ConfigError for an empty stop string."""
        self.codec = codec
        self.ends = frozenset(codec.eos_ids).union(stop_token_ids)
        """Tokens that end it."""
        self._stream = codec.stream()
        self._scanner = StopScanner(stop) if stop else None
        self._limit = max_new_tokens
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.finish_reason = ""

    def limit_to(self, most_new: int) -> None:
        """So many tokens fit, which is known once its prompt is."""
        self._limit = most_new

    @property
    def stop(self) -> str:
        """The stop string that ended it; "" if none did."""
        return self._scanner.found if self._scanner is not None else ""

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
        at_end = token in self.ends
        at_limit = len(self.token_ids) == self._limit
        piece = "" if at_end else self._stream.push(token)
        if at_end or at_limit:
            piece += self._stream.flush()
        text, stopped = (piece, False) if self._scanner is None else self._scanner.push(piece)
        if at_end or stopped:
            self.finish_reason = "stop"
        elif at_limit:
            self.finish_reason = "length"
        if self.finish_reason and self._scanner is not None:
            text += self._scanner.flush()  # nothing after a stop string
        self._text.append(text)
        return text

    def end_unanswered(self) -> None:
        """Only the prompt was wanted."""
        self.finish_reason = "length"


class HeadLog:
    """What the head said of rows, until they are committed or gone."""

    def __init__(self, top: int) -> None:
        """`top`: how many of the likeliest tokens are to be told; -1: no log-probabilities."""
        self._top = top
        self._margins: dict[int, float] = {}
        # The token, and what else was told of it, as a row.
        self._logprobs: dict[int, tuple[int, TopLogprobs]] = {}

    def add(self, ids: Sequence[int], choice: Choice, others: TopLogprobs | None) -> None:
        """The tokens after rows `ids` were sampled, those of the path."""
        self._margins.update(zip(ids, choice.margins.tolist(), strict=True))
        if others is not None and self._top >= 0:
            for row, (id, token) in enumerate(zip(ids, choice.tokens.tolist(), strict=True)):
                self._logprobs[id] = token, others.part(slice(row, row + 1), self._top)

    def as_json(self, ids: Sequence[int], codec: TextCodec) -> str:
        """The log-probabilities of these rows' tokens, as the message Tokens has them; "" where
        they were not asked for."""
        if self._top < 0:
            return ""
        told = [self._logprobs[i] for i in ids]
        found = entries(codec, [token for token, _ in told], joined([row for _, row in told]))
        return json.dumps(found, ensure_ascii=False)

    def take(self, ids: Sequence[int]) -> float:
        """The smallest margin of these rows; they and all older ones are forgotten."""
        smallest, newest = min(self._margins[i] for i in ids), ids[-1]
        self._margins = {i: m for i, m in self._margins.items() if i > newest}
        self._logprobs = {i: c for i, c in self._logprobs.items() if i > newest}
        return smallest


def entries(codec: TextCodec, tokens: Sequence[int], told: TopLogprobs) -> list[dict[str, Any]]:
    """What messages have of each of these tokens."""
    found = []
    own = tokens, told.log_probs.tolist()
    rows = zip(*own, told.top.tolist(), told.top_log_probs.tolist(), strict=True)
    for token, log_prob, top, top_log_probs in rows:
        pairs = zip(top, top_log_probs, strict=True)
        # A grammar may leave fewer tokens than are asked for.
        rivals = [entry(codec, *rival) for rival in pairs if rival[1] > -math.inf]
        found.append({**entry(codec, token, log_prob), "top_logprobs": rivals})
    return found


def entry(codec: TextCodec, token: int, log_prob: float | None) -> dict[str, Any]:
    """What messages have of one."""
    text, raw = codec.token(token)
    spelt = list(raw) if raw is not None else None
    return {"id": token, "token": text, "bytes": spelt, "logprob": log_prob}


@dataclass(slots=True)
class RequestStats:
    """Figures of a request; docs/figures.md defines each.

    `sources`: tokens by which members of the draft source guessed them, as bits (see tree.drafted).
    `entered`: when its first segment entered the ring, on the ring's clock, in trips.
    """

    started: float = 0.0
    first_token: float | None = None
    rows_sent: int = 0
    rows_used: int = 0
    ppd_rows: int = 0
    cached: int = 0
    misses: int = 0
    accepted_per_step: Counter[int] = field(default_factory=Counter)
    sources: Counter[int] = field(default_factory=Counter)
    smallest_margin: float = float("inf")
    entered: Fraction | None = None
    newest_token: float | None = None
    fruitless_rings: int = 0
    _tokens_before: int = 0
    _first_token_trip: Fraction | None = None
    _newest_token_trip: Fraction = Fraction(0)

    def started_at(self, now: float) -> None:
        """It begins, or begins to wait, now."""
        self.started = now

    def reused(self, rows: int) -> None:
        """On one of its rings it began with so many rows of another request."""
        self.cached = max(self.cached, rows)

    def sent(self, rows: int, ppd_rows: int = 0) -> None:
        """So many rows of guesses were sent, and PPD rows with them."""
        self.rows_sent += rows
        self.ppd_rows += ppd_rows

    def on_ring(self, entered: Fraction) -> None:
        """A segment of it entered the ring, at that time of the ring's clock."""
        if self.entered is None:
            self.entered = entered

    def ring_lost(self, tokens: int) -> int:
        """The ring is lost, after so many tokens; returns how many in a row gave no further one."""
        self.fruitless_rings = 0 if tokens > self._tokens_before else self.fruitless_rings + 1
        self._tokens_before = tokens
        return self.fruitless_rings

    def walked(self, step: Advance, *, opening: bool, drafts: bool) -> None:
        """The tree was walked; `opening`: the first token comes of the prompt, not of guesses."""
        if not opening or len(step.tokens) > 1:
            self.accepted_per_step[len(step.tokens) - opening] += 1
        self.misses += step.missed and drafts and not opening

    def committed(
        self, sources: Sequence[int], rows: int, margin: float, now: float, trip: Fraction
    ) -> float:
        """Tokens of these sources were committed, at `trip` on the ring's clock, the closest call
        by `margin`; `rows` guessed rows gave them. Returns seconds since the token before them, 0
        for the first."""
        self.smallest_margin = min(self.smallest_margin, margin)
        self.sources.update(sources)
        self.rows_used += rows
        self._newest_token_trip = trip
        before, self.newest_token = self.newest_token, now
        if before is None:
            self.first_token = now
            self._first_token_trip = trip
        return 0.0 if before is None else now - before

    def speed(self, tokens: int, now: float) -> float:
        """Tokens a second behind the first one until now, of so many in all."""
        since = now if self.first_token is None else self.first_token
        return max(tokens - 1, 0) / (now - since) if now > since else 0.0

    def trips(self, now: Fraction) -> float:
        """Trips from its first segment until `now` on the ring's clock."""
        return 0.0 if self.entered is None else float(max(now - self.entered, Fraction(0)))

    @property
    def answer_trips(self) -> float:
        """Trips in which the tokens so far were made: one for the first token, however many chunks
        its prompt had, and none for tokens that are still to come."""
        first = self._first_token_trip
        return 0.0 if first is None else float(1 + self._newest_token_trip - first)

    def histogram(self) -> tuple[int, ...]:
        """How many verifications committed 0, 1, 2, … tokens."""
        most = max(self.accepted_per_step, default=-1)
        return tuple(self.accepted_per_step[n] for n in range(most + 1))

    def of_sources(self, names: Sequence[str]) -> tuple[SourceFigures, ...]:
        """What each member of the draft source brought."""
        found = []
        for bit, name in enumerate(names):
            accepted = sum(count for made_by, count in self.sources.items() if made_by >> bit & 1)
            found.append(SourceFigures(name, accepted, self.sources[1 << bit]))
        return tuple(found)


class RequestClient:
    """Who asked a request, and what it was told last of what the request waits for. `sampled`: see
    Finished."""

    def __init__(self, peer: bytes, submit: Submit, now: float, sampled: str = "") -> None:
        self.sampled = sampled
        self.peer, self.tag, self.asker = peer, submit.tag, submit.scope
        self.asked_at = now
        self._last_notice = ""
        self._resume_notice = BEGINS

    def asked(self, peer: bytes, tag: int) -> bool:
        """Whether that client knows the request by that tag."""
        return (self.peer, self.tag) == (peer, tag)

    def reply(self, message: WireMessage) -> SendPeer:
        """Say that to it."""
        return SendPeer(self.peer, message)

    def notify(self, text: str) -> list[Effect]:
        """Say what the request waits for, if that was not said last."""
        if self._last_notice == text:
            return []
        self._last_notice = text
        return [self.reply(Progress(self.tag, text))]

    def resumes(self, notice: str) -> None:
        """The request has to start once more, and is then told so."""
        self._resume_notice = notice

    def notify_start(self) -> list[Effect]:
        """The request starts; whoever was told to wait is told."""
        return self.notify(self._resume_notice) if self._last_notice else []
