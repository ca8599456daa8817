"""Requests of commands: cancelling, and the figures or JSON of the answer."""

from __future__ import annotations

import json
import signal
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from edgespec.cli.answer_view import AnswerView
from edgespec.cli.notes import Notes
from edgespec.door.asking import Completion
from edgespec.runtime.client import Answer, Client
from edgespec.types.record import as_dict
from edgespec.types.shown import shown
from edgespec.wire.client_messages import Finished


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
    answer: Iterable[Answer],
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
        if finished.looped:
            notes.say(shown(finished.looped))
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
    speed = f"{tokens_per_second(finished):.1f} tokens a second"
    own = f"; {shown(finished.sampled)}" if finished.sampled else ""
    return f"{finished.new_tokens} tokens, {speed}{own}{end}"


def tokens_per_second(finished: Finished) -> float:
    return Completion.of(finished).tokens_per_second


def figures(finished: Finished) -> dict[str, object]:
    """The JSON object of `demo --json` and `prompt --json` (docs/figures.md)."""
    result = as_dict(finished)
    del result["tag"]
    result["tokens_per_second"] = tokens_per_second(finished)
    result["tokens_per_trip"] = Completion.of(finished).tokens_per_trip
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
