"""Showing one answer: text as it streams, then its figures, or all of it as one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from edgespec.errors import ConfigError
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
    """The request of a command; refuses what could not even be sent."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("the prompt is not valid UTF-8 text") from None
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one character")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed}; it must be between 0 and {2**63 - 1}")
    if not -(2**31) < max_new_tokens < 2**31:
        raise ConfigError(f"max-new-tokens is {max_new_tokens}; it must be at least 1")
    return Submit(
        TAG,
        prompt,
        max_new_tokens,
        float(temperature),
        top_k,
        float(top_p),
        float(min_p),
        seed,
        tuple(stop or ()),
        policy,
    )


def show(answer: Iterable[Progress | Tokens | Finished], as_json: bool, notes: Console) -> Finished:
    """Print an answer as it comes; returns its end. Progress goes to `notes` (standard error)."""
    finished: Finished | None = None
    with notes.status("waiting for the first token") as waiting:
        for message in answer:
            match message:
                case Progress(_, text):
                    waiting.update(text)
                case Tokens(_, _, text) if not as_json:
                    waiting.stop()
                    sys.stdout.write(text)
                    sys.stdout.flush()
                case Finished():
                    finished = message
    assert finished is not None, "an answer ends with Finished or raises"
    if as_json:
        print(json.dumps(figures(finished), ensure_ascii=False))
    else:
        print()
        _print_figures(finished, notes)
    return finished


def figures(finished: Finished) -> dict[str, object]:
    """The JSON object of `demo --json` and `prompt --json` (docs/commands.md)."""
    result = asdict(finished)
    del result["tag"]
    seconds, trips = finished.seconds, finished.trips
    result["tokens_per_second"] = finished.new_tokens / seconds if seconds > 0 else 0.0
    result["tokens_per_trip"] = finished.new_tokens / trips if trips > 0 else 0.0
    return result


def _print_figures(finished: Finished, notes: Console) -> None:
    speed = figures(finished)
    accepted = ", ".join(f"{n}: {times}" for n, times in enumerate(finished.accepted_histogram))
    rows = [
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
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(f"[dim]{name}[/dim]", value)
    notes.print(table)
