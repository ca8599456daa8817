"""edgespec prompt: ask a running ring."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer
from msgspec.structs import replace

from edgespec.cli import options
from edgespec.cli.answering import cancelling, show
from edgespec.cli.notes import Notes
from edgespec.cli.reach import given_token, introduced, reach
from edgespec.door.asking import USUAL, RequestSettings
from edgespec.errors import EXIT_CANCELLED, ConfigError
from edgespec.runtime.client import Client
from edgespec.types.grammar_spec import json_spec
from edgespec.types.record import MOST_CHARS
from edgespec.wire.client_messages import Submit

_MOST_BYTES = 4 * MOST_CHARS
"""The longest text that can be sent, in UTF-8; a bound for endless input."""


@options.grouped
def prompt(
    text: str | None = typer.Argument(
        None,
        help="The prompt; - reads it from standard input, and so does leaving it out where "
        "something is piped in.",
        show_default=False,
    ),
    file: list[str] | None = typer.Option(
        None,
        metavar="FILE",
        help="Put this file's text in front of the prompt, or ask that alone; may be given "
        "several times.",
    ),
    system: str | None = typer.Option(
        None,
        metavar="TEXT",
        help="The system message of the conversation that the model's chat template writes.",
        show_default=False,
    ),
    schema: str | None = typer.Option(
        None,
        metavar="FILE",
        help="A JSON schema that the answer is held to; tell the model of it in the prompt.",
        show_default=False,
    ),
    raw: bool = options.RAW,
    show_speculation: bool = typer.Option(
        False,
        "--show-speculation",
        help="On a terminal, change the text's colour with each result of the ring: one run of "
        "a colour is what one result made certain.",
    ),
    coordinator: str | None = options.COORDINATOR,
    settings: RequestSettings = USUAL,
    wait: float = options.WAIT,
    token: str = options.CLIENT_TOKEN,
    cluster: str = options.CLUSTER,
    verbose: bool = options.VERBOSE,
    as_json: bool = options.JSON,
) -> None:
    """Send a prompt to the running coordinator and stream the answer; Ctrl-C cancels it."""
    introduction = given_token(token)  # on standard input it comes before the prompt
    submit = _submit(settings, gather(text, file or []), system, raw)
    if schema is not None:
        submit = replace(submit, grammar=_grammar(schema))
    notes = Notes(verbose)
    introduced(introduction, coordinator, cluster, wait, notes)
    address, identity = reach(coordinator, cluster, wait, notes)
    with Client(address, identity, wait) as client, cancelling(client):
        finished = show(client.ask(submit), as_json, notes, show_speculation)
    if finished.finish_reason == "cancelled":
        raise typer.Exit(EXIT_CANCELLED)


def _submit(settings: RequestSettings, question: str, system: str | None, raw: bool) -> Submit:
    if raw and system is not None:
        raise ConfigError("--raw continues the bare text, which has no system message; drop one")
    submit = settings.complete(question) if raw else settings.ask(question)
    if system is None:
        return submit
    opening = [{"role": "system", "content": system}] if system else []
    return settings.answer([*opening, {"role": "user", "content": question}])


def _grammar(name: str) -> str:
    """What holds an answer to the schema in that file. Raises ConfigError if it is no JSON."""
    text = _read_file(name)
    try:
        return json_spec(json.loads(text))
    except (ValueError, RecursionError) as problem:
        raise ConfigError(f"{name!r} is no JSON schema: {problem}") from None


def gather(text: str | None, files: list[str]) -> str:
    """The files in their order, then the prompt, with empty lines between; or standard input.

    Raises ConfigError if there is nothing to ask, or no UTF-8.
    """
    parts = [_read_file(name) for name in files]
    if text is not None:
        parts.append(read_prompt(text))
    elif not parts:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError(
                'there is nothing to ask; give a prompt (`edgespec prompt "..."`), pipe one in, or '
                "name a file with --file"
            )
        parts.append(read_prompt("-"))
    return "\n\n".join([*(part.rstrip("\n") for part in parts[:-1]), parts[-1]])


def read_prompt(text: str) -> str:
    """The prompt; "-": from standard input. Raises ConfigError if that is no UTF-8."""
    if text != "-":
        return text
    return _decoded(sys.stdin.buffer.read(_MOST_BYTES + 1), "standard input")


def _read_file(name: str) -> str:
    try:
        with Path(name).open("rb") as file:
            return _decoded(file.read(_MOST_BYTES + 1), name)
    except (OSError, ValueError) as problem:  # ValueError: a name that cannot be one
        reason = getattr(problem, "strerror", None) or problem
        raise ConfigError(f"cannot read {name!r}: {reason}") from None


def _decoded(raw: bytes, where: str) -> str:
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{where} is too long: at most {MOST_CHARS} characters can be sent")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ConfigError(
            f"{where} is not valid UTF-8 (byte {problem.start}); convert it first, for "
            "instance with iconv"
        ) from None
