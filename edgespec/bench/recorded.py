"""Recorded: the requests that a coordinator wrote down, played again on a ring in virtual time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from edgespec.bench.setup import Setup, load_base, one_thread, world_of
from edgespec.bench.workloads import Prompt
from edgespec.errors import ConfigError, ProtocolError
from edgespec.runtime.request_log import FORMAT, KIND
from edgespec.types.tool_forms import Tool
from edgespec.wire.client_messages import (
    ChatMessage,
    Failed,
    Finished,
    Submit,
    TokenBias,
    ToolCall,
)
from edgespec.wire.codec import decode, encode


class RecordedEnd(Struct, frozen=True):
    """The end of a request; empty if it failed."""

    token_ids: tuple[int, ...] | None = None
    seconds: float | None = None


class RecordedLine(Struct, frozen=True):
    """One line of the log."""

    what: str
    format: int
    after: float
    outcome: str
    request: dict[str, Any]
    end: RecordedEnd


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded request. `after`: seconds after the first one. `token_ids` and `seconds` are None
    if it failed. `was_cut`: its client cancelled it."""

    submit: Submit
    after: float
    outcome: str
    token_ids: tuple[int, ...] | None
    seconds: float | None

    @property
    def was_cut(self) -> bool:
        return self.outcome == "cancelled"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Its replay. `same`: whether the tokens are the recorded ones, None if none were recorded."""

    recorded: Recorded
    end: Finished | Failed

    @property
    def same(self) -> bool | None:
        before = self.recorded.token_ids
        if before is None:
            return None
        if not isinstance(self.end, Finished):
            return False
        again = self.end.token_ids
        return (again[: len(before)] if self.recorded.was_cut else again) == before


def read_recording(path: Path) -> list[Recorded]:
    """All requests in a file of `edgespec serve --record`, in the order in which they came.

    Raises ConfigError, naming the line, for anything else, and for a file without any.
    """
    found = sorted(_lines(path), key=lambda recorded: recorded.after)
    if not found:
        raise ConfigError(f"{path} has no requests; give what `edgespec serve --record` wrote")
    first = found[0].after
    return [replace(recorded, after=recorded.after - first) for recorded in found]


def _lines(path: Path) -> Iterator[Recorded]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as problem:
        raise ConfigError(f"{path} cannot be read: {problem}") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield _recorded(msgspec.json.decode(line, type=RecordedLine))
        except (TypeError, ValueError, LookupError, ProtocolError) as problem:
            raise ConfigError(
                f"line {number} of {path} is no request that `edgespec serve --record` writes "
                f"({problem})"
            ) from None


def _recorded(line: RecordedLine) -> Recorded:
    if line.what != KIND or line.format != FORMAT:
        raise ValueError(f"it is not of format {FORMAT}")
    asked = line.request
    chat = asked.get("messages", [])
    if isinstance(chat, str):  # as release 0.2.0 wrote it
        chat = json.loads(chat or "[]")
    records = {
        "logit_bias": tuple(TokenBias(**one) for one in asked.get("logit_bias", ())),
        "messages": tuple(map(_message, chat)),
        "tools": tuple(Tool(**one) for one in asked.get("tools", ())),
    }
    submit = decode(encode(Submit(**{**asked, **records, "tag": 0, "top": -1})))  # holds the types
    assert isinstance(submit, Submit)
    return Recorded(submit, line.after, line.outcome, line.end.token_ids, line.end.seconds)


def _message(given: dict[str, Any]) -> ChatMessage:
    calls = tuple(ToolCall(**call) for call in given.get("tool_calls", ()))
    return ChatMessage(**{**given, "tool_calls": calls})


def prompts_of(recording: list[Recorded]) -> list[Prompt]:
    asked = (recorded.submit for recorded in recording)
    texts = (one.prompt or "\n".join(said.content for said in one.messages) for one in asked)
    return [Prompt(str(number), "", (text,)) for number, text in enumerate(texts, start=1)]


def replay_recording(setup: Setup, recording: list[Recorded], policy: str = "") -> list[Replayed]:
    """Play all requests, each at its time, on a ring in virtual time. Outcomes are in their order.

    `policy` "": as recorded. A cancelled request is asked for as many tokens as it got. Up to
    `setup.load.live` requests are answered at once; without a load they wait for each other.
    """
    with one_thread():
        world = world_of(setup, load_base(setup.model, setup.dtype, setup.stages))
        for tag, recorded in enumerate(recording):
            submit = structs.replace(
                recorded.submit, tag=tag, policy=policy or recorded.submit.policy
            )
            if recorded.was_cut:
                submit = structs.replace(
                    submit, max_new_tokens=max(len(recorded.token_ids or ()), 1)
                )
            world.submit(submit, recorded.after)
        world.run()
    messages = (reply.message for reply in world.replies)
    ends = {said.tag: said for said in messages if isinstance(said, Finished | Failed)}
    return [Replayed(recorded, ends[tag]) for tag, recorded in enumerate(recording)]
