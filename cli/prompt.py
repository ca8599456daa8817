"""edgespec prompt: ask a running ring."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from edgespec.cli import options
from edgespec.cli.answering import cancelling, make_submit, show
from edgespec.cli.notes import Notes
from edgespec.cli.reach import admitted, reach
from edgespec.daemon.cluster import folder_of
from edgespec.daemon.process import EXIT_CANCELLED
from edgespec.errors import ConfigError
from edgespec.net.keys import Token
from edgespec.runtime.client import Client


def prompt(
    text: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    coordinator: options.Coordinator = None,
    policy: options.Policy = "",
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    seed: options.Seed = 0,
    stop: options.Stop = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for a coordinator that does not answer.")
    ] = 10.0,
    token: Annotated[
        str,
        typer.Option(
            help="A token of `edgespec token new --client`: lets this machine ask, from now on.",
        ),
    ] = "",
    cluster: options.Cluster = "",
    as_json: options.Json = False,
) -> None:
    """Send a prompt to the running coordinator and stream the answer; Ctrl-C cancels it."""
    submit = make_submit(
        read_prompt(text), max_new_tokens, temperature, top_k, top_p, min_p, seed, stop, policy
    )
    notes = Notes()
    if token:
        admitted(folder_of(cluster), Token.parse(token), coordinator, wait, notes.say)
    address, identity = reach(coordinator, cluster, wait, notes.say)
    with Client(address, identity, wait) as client, cancelling(client):
        finished = show(client.ask(submit), as_json, notes)
    if finished.finish_reason == "cancelled":
        raise typer.Exit(EXIT_CANCELLED)


def read_prompt(text: str) -> str:
    """The prompt, from standard input where it is "-". Raises ConfigError if it is no text."""
    if text != "-":
        return text
    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError(
            f"standard input is not valid UTF-8 (byte {problem.start}); convert it first, for "
            "instance with iconv"
        ) from None
