"""Showing one answer: text as it streams, then its figures, or all of it as one JSON object."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from edgespec.cli.notes import Notes
from edgespec.errors import ConfigError, ProtocolError
from edgespec.policy.registry import policy_named
from edgespec.runtime.client import Client
from edgespec.verify.sampling import Sampling
from edgespec.verify.stops import StopScanner
from edgespec.wire.codec import DEFAULT_LIMITS, decode, encode
from edgespec.wire.messages import Finished, Progress, Submit, Tokens

TAG = 1
"""A command has one request on its connection."""


def make_submit(
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    stop: list[str] | None,
    policy: str,
) -> Submit:
    """The request of a command. Raises ConfigError for what no coordinator would accept."""
    stops = tuple(stop or ())
    for what, text in [("prompt", prompt), *(("stop string", s) for s in stops)]:
        _check_text(what, text)
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character")
    if max_new_tokens < 1:
        raise ConfigError(f"max-new-tokens is {max_new_tokens}; it must be at least 1")
    Sampling(temperature, top_k, top_p, min_p, seed)
    StopScanner(stops)
    if policy:
        policy_named(policy)
    submit = Submit(
        TAG,
        prompt,
        max_new_tokens,
        float(temperature),
        top_k,
        float(top_p),
        float(min_p),
        seed,
        stops,
        policy,
    )
    try:
        decode(encode(submit))  # a message that is too large would be dropped without a word
    except ProtocolError as problem:
        raise ConfigError(f"the request cannot be sent: {problem}") from None
    return submit


def _check_text(what: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"the {what} is not valid UTF-8 text") from None
    limit = DEFAULT_LIMITS.text_chars
    if len(text) > limit:
        raise ConfigError(f"the {what} has {len(text)} characters; at most {limit} can be sent")


@contextmanager
def cancelling(client: Client) -> Iterator[None]:
    """Let Ctrl-C cancel the client's request through the ring; a second one leaves at once."""

    def on_interrupt(number: int, frame: object) -> None:
        if client.cancelled:
            raise KeyboardInterrupt
        client.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def show(answer: Iterable[Progress | Tokens | Finished], as_json: bool, notes: Notes) -> Finished:
    """Print an answer as it comes; returns its end."""
    finished: Finished | None = None
    streamed = False
    try:
        with notes.waiting("waiting for the first token") as waiting:
            for message in answer:
                match message:
                    case Progress(_, text):
                        waiting(text)
                    case Tokens(_, _, text) if not as_json:
                        waiting("")
                        streamed = True
                        sys.stdout.write(text)
                        sys.stdout.flush()
                    case Finished():
                        finished = message
    finally:
        if streamed:  # the text's last line ends here, whether an error follows or not
            sys.stdout.write("\n")
            sys.stdout.flush()
    assert finished is not None, "an answer ends with Finished or raises"
    if as_json:
        # A terminal of another encoding gets the same JSON, spelt in ASCII.
        ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
        print(json.dumps(figures(finished), ensure_ascii=ascii_only))
    else:
        notes.table(_described(finished))
    return finished


def figures(finished: Finished) -> dict[str, object]:
    """The JSON object of `demo --json` and `prompt --json` (docs/commands.md)."""
    result = asdict(finished)
    del result["tag"]
    seconds, trips = finished.seconds, finished.trips
    result["tokens_per_second"] = finished.new_tokens / seconds if seconds > 0 else 0.0
    result["tokens_per_trip"] = finished.new_tokens / trips if trips > 0 else 0.0
    return result


def _described(finished: Finished) -> list[tuple[str, str]]:
    speed = figures(finished)
    accepted = ", ".join(f"{n}: {times}" for n, times in enumerate(finished.accepted_histogram))
    return [
        ("policy", f"{finished.policy}, draft {finished.draft}, {finished.stages} stage(s)"),
        ("tokens", f"{finished.prompt_tokens} prompt, {finished.new_tokens} new "
                   f"({finished.finish_reason})"),
        ("time", f"{finished.seconds:.2f} s, {speed['tokens_per_second']:.1f} tokens/s, first "
                 f"after {finished.first_token_seconds:.2f} s"),
        ("trips", f"{finished.trips:.1f} round the ring, {speed['tokens_per_trip']:.2f} tokens "
                  "each"),
        ("accepted", f"results by tokens made certain: {accepted or 'none'}"),
        ("rows", f"{finished.rows_sent} sent, {finished.rows_wasted} of them in vain"),
        ("margin", f"{finished.smallest_margin:.2g} between best and second-best token at the "
                   "closest call"),
    ]  # fmt: skip
