"""Requests of commands: their settings, cancelling, and the figures or JSON of the answer."""

from __future__ import annotations

import json
import signal
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer

from edgespec.cli.answer_view import AnswerView
from edgespec.cli.notes import Notes
from edgespec.config import MAX_TEMPERATURE
from edgespec.errors import ConfigError, ProtocolError
from edgespec.policy.registry import POLICIES, policy_named
from edgespec.runtime.client import Client
from edgespec.types.record import MOST_CHARS, as_dict
from edgespec.verify.sampling import Sampling
from edgespec.verify.stops import StopScanner
from edgespec.wire.client_messages import Finished, Progress, Submit, Tokens
from edgespec.wire.codec import encode

TAG = 1
"""A command sends one request per connection."""

_POLICIES = " or ".join(", ".join(sorted(POLICIES)).rsplit(", ", 1))


@dataclass(frozen=True)
class _PolicyOption:
    policy: Annotated[
        str,
        typer.Option(
            help=f"What to send when: {_POLICIES}. Default: adaptive, or autoregressive where "
            "there is no draft model."
        ),
    ] = ""


@dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling and length, which bench and simulate have too."""

    max_new_tokens: Annotated[
        int,
        typer.Option(help="Tokens to generate at most; fewer if the context has no room for them."),
    ] = 128
    temperature: Annotated[
        float,
        typer.Option(
            help=f"From 0, which takes the most likely token every time, to {MAX_TEMPERATURE:g}."
        ),
    ] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample from the K most likely tokens; 0 is off.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens of total share P.")
    ] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Leave out tokens below P times the likeliest one's share.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0

    @property
    def sampling(self) -> Sampling:
        """Raises ConfigError for values out of range."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


@dataclass(frozen=True)
class RequestSettings(SamplingOptions, _PolicyOption):  # the last base's field comes first
    """All options of a request (docs/commands.md).

    Raises ConfigError for values that every coordinator would refuse.
    """

    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given several times.")
    ] = None

    def __post_init__(self) -> None:
        for text in self.stop or ():
            _check_text("stop string", text)
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        _ = self.sampling  # raises for values out of range
        StopScanner(tuple(self.stop or ()))
        if self.policy:
            policy_named(self.policy)

    def complete(self, prompt: str) -> Submit:
        """The request for a completion of a text. Raises ConfigError if it cannot be sent."""
        _check_prompt(prompt)
        return self._submit(prompt, "")

    def ask(self, prompt: str) -> Submit:
        """The request for an answer by the model's chat template; a model without one completes the
        text. Raises ConfigError if it cannot be sent."""
        _check_prompt(prompt)
        return self._submit(prompt, _conversation([{"role": "user", "content": prompt}]))

    def answer(self, messages: list[dict[str, str]]) -> Submit:
        """The request for the next message of a conversation of {"role", "content"} objects.

        Raises ConfigError if it cannot be sent.
        """
        return self._submit("", _conversation(messages))

    def _submit(self, prompt: str, messages: str) -> Submit:
        submit = Submit(
            TAG,
            prompt,
            self.max_new_tokens,
            float(self.temperature),
            self.top_k,
            float(self.top_p),
            float(self.min_p),
            self.seed,
            tuple(self.stop or ()),
            self.policy,
            messages,
        )
        try:
            encode(submit)  # what no peer would take would be dropped without a word
        except ProtocolError as problem:
            raise ConfigError(f"the request cannot be sent: {problem}") from None
        return submit


USUAL = RequestSettings()


def _conversation(messages: list[dict[str, str]]) -> str:
    """As it travels. Raises ConfigError if it cannot."""
    for message in messages:
        _check_text("prompt" if message["role"] == "user" else "conversation", message["content"])
    text = json.dumps(messages, ensure_ascii=False)
    _check_text("conversation", text)
    return text


def _check_prompt(prompt: str) -> None:
    _check_text("prompt", prompt)
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give at least one character that is no space")


def _check_text(what: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"the {what} is not valid UTF-8 text") from None
    limit = MOST_CHARS
    if len(text) > limit:
        raise ConfigError(f"the {what} has {len(text)} characters; at most {limit} can be sent")


@contextmanager
def cancelling(client: Client) -> Iterator[None]:
    """Ctrl-C cancels the client's request on the ring; a second one raises KeyboardInterrupt."""

    def on_interrupt(number: int, frame: object) -> None:
        if client.cancelled:
            raise KeyboardInterrupt
        client.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with _quiet_keys():
            yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _quiet_keys() -> Iterator[None]:
    """Ctrl-C writes no ^C into an answer on a terminal."""
    if not sys.stdout.isatty():
        yield
        return
    # Whoever sets the terminal from the background would be stopped.
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    echoed = _echo_keys(0)
    try:
        yield
    finally:
        _echo_keys(echoed)
        signal.signal(signal.SIGTTOU, before)


def _echo_keys(bit: int) -> int:
    """Set the terminal's ECHOCTL bit; returns what it was."""
    mode = termios.tcgetattr(sys.stdout)
    was = int(mode[3]) & termios.ECHOCTL
    mode[3] = (mode[3] & ~termios.ECHOCTL) | bit
    termios.tcsetattr(sys.stdout, termios.TCSADRAIN, mode)
    return was


def show(
    answer: Iterable[Progress | Tokens | Finished],
    as_json: bool,
    notes: Notes,
    speculation: bool = False,
) -> Finished:
    """Print an answer while it arrives, then how fast it was, or all figures if `notes` is verbose.

    `speculation`: change the colour with each result that committed tokens.
    """
    view = AnswerView(notes, hidden=as_json, speculation=speculation)
    finished = view.follow(answer)
    if as_json:
        print(json_text(figures(finished)))
    else:
        view.legend()
        notes.say(summary(finished))
        if notes.is_verbose:
            notes.table(described(finished))
    return finished


def json_text(content: dict[str, object]) -> str:
    """One object; where standard output has another encoding than UTF-8, in ASCII."""
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    return json.dumps(content, ensure_ascii=ascii_only)


_ENDS = {
    "length": " (cut: --max-new-tokens or the model's context allows no more)",
    "cancelled": " (cancelled)",
}


def summary(finished: Finished) -> str:
    """One line: how many tokens, how fast, and why it ended if it is no whole answer."""
    end = _ENDS.get(finished.finish_reason, "")
    return f"{finished.new_tokens} tokens, {tokens_per_second(finished):.1f} tokens a second{end}"


def tokens_per_second(finished: Finished) -> float:
    return finished.new_tokens / finished.seconds if finished.seconds > 0 else 0.0


def figures(finished: Finished) -> dict[str, object]:
    """The JSON object of `demo --json` and `prompt --json` (docs/figures.md)."""
    result = as_dict(finished)
    del result["tag"]
    trips = finished.trips
    result["tokens_per_second"] = tokens_per_second(finished)
    result["tokens_per_trip"] = finished.new_tokens / trips if trips > 0 else 0.0
    return result


def described(finished: Finished) -> list[tuple[str, str]]:
    speed = figures(finished)
    accepted = ", ".join(f"{n}: {times}" for n, times in enumerate(finished.accepted_histogram))
    sources = ", ".join(
        f"{source.name} {source.accepted} ({source.alone} alone)" for source in finished.sources
    )
    return [
        ("policy", f"{finished.policy}, draft {finished.draft}, {finished.stages} stage(s)"),
        ("tokens", f"{finished.prompt_tokens} prompt, {finished.new_tokens} new "
                   f"({finished.finish_reason})"),
        ("time", f"{finished.seconds:.2f} s, {speed['tokens_per_second']:.1f} tokens/s, first "
                 f"after {finished.first_token_seconds:.2f} s"),
        ("trips", f"{finished.trips:.1f} round the ring, {speed['tokens_per_trip']:.2f} tokens "
                  "each"),
        ("accepted", f"results by tokens made certain: {accepted or 'none'}"),
        ("guessed by", sources or "nobody"),
        ("rows", f"{finished.rows_sent} sent, {finished.rows_wasted} of them in vain"),
        ("margin", f"{finished.smallest_margin:.2g} between best and second-best token at the "
                   "closest call"),
    ]  # fmt: skip
