"""Tools: functions that a model may call, told and called in the form of Hermes and Qwen.

The tools are told in the system message, and a call is written as ``<tool_call>``, a line of JSON
with "name" and "arguments", ``</tool_call>``. Results come back in ``<tool_response>``. A grammar
holds a call that has to be made to the tool's own schema.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.types.grammar_spec import spec

BEGIN, END = "<tool_call>", "</tool_call>"

_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TOLD = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_HEAD = re.compile(r'\s*\{\s*"name":\s*"([\w.-]{1,64})",\s*"(?:arguments|parameters)":\s*(?=\S)')


@dataclass(frozen=True, slots=True)
class Tool:
    """A function; `parameters`: the JSON schema of its arguments."""

    name: str
    description: str
    parameters: Mapping[str, Any]


def told(tools: Sequence[Tool]) -> str:
    """What the model is told of them."""
    lines = [
        json.dumps(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                },
            },
            ensure_ascii=False,
        )
        for tool in tools
    ]
    return _TOLD.format(tools="\n".join(lines))


def called(name: str, arguments: str) -> str:
    """A call as the model writes it; `arguments`: JSON."""
    return f'{BEGIN}\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n{END}'


def result(content: str) -> str:
    """What a call gave, as the model reads it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def grammar(tools: Sequence[Tool], *, must: bool, several: bool) -> str:
    """Of an answer whose calls are of these tools, with valid arguments (see types.grammar_spec).
    With `must` it is a call, or `several`; else a text with or without calls."""
    begin, tail = json.dumps(BEGIN), json.dumps("}\n" + END)
    names = " | ".join(f"tool_{n}" for n in range(len(tools)))
    lines = [f"one_call: {names}"]
    for number, tool in enumerate(tools):
        head = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        schema = {"type": "object", **tool.parameters, "x-guidance": _LAYOUT}
        lines.append(f"tool_{number}: {head} %json {json.dumps(schema)} {tail}")
    if must:
        more = f' ("\\n" {begin} one_call)*' if several else ""
        lines.append(f"start: {begin} one_call{more}")
    else:
        calls = "(begun one_call)*" if several else "(begun one_call)?"
        lines += [f"start: {calls} rest", f"begun[lazy]: ANY {begin}", "rest: ANY"]
        lines.append("ANY: /(.|\\n)*/")
    return spec("lark", "%llguidance {}\n" + "\n".join(lines) + "\n")


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of an answer: of its text, or, with a `name` as it begins, of the arguments of its
    call number `call`."""

    text: str
    call: int = -1
    id: str = ""
    name: str = ""


class CallReader:
    """Reads calls out of an answer that comes in pieces. What is no call is text."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: of the tools that there are."""
        self._names = frozenset(names)
        self._held = ""
        self._calls = 0
        self._in_call = self._has_head = False

    @property
    def calls(self) -> int:
        """How many there were so far."""
        return self._calls

    def push(self, text: str) -> list[Said]:
        """What is certain with this text."""
        self._held += text
        found: list[Said] = []
        while (one := self._next()) is not None:
            found += one
        return found

    def flush(self) -> list[Said]:
        """The answer has ended: the rest of it, an unfinished call included."""
        rest, self._held = self._held, ""
        if self._calls and not self._in_call and not rest.strip():
            return []
        if self._has_head:
            return [Said(rest.rstrip(), self._calls - 1)]
        return [Said(BEGIN + rest if self._in_call else rest)] if rest or self._in_call else []

    def _next(self) -> list[Said] | None:
        """What comes next of what is held; None if that is not certain yet."""
        if not self._in_call:
            return self._text()
        return self._arguments() if self._has_head else self._head()

    def _text(self) -> list[Said] | None:
        before, begin, after = self._held.partition(BEGIN)
        if begin:
            self._held, self._in_call = after, True
            text = before if before.strip() else ""
            return [Said(text)] if text else []
        keep = next((n for n in range(len(BEGIN), 0, -1) if before.endswith(BEGIN[:n])), 0)
        # Blanks between calls are no text.
        if self._calls and not before[: len(before) - keep].strip():
            return None
        self._held = before[len(before) - keep :]
        text = before[: len(before) - keep]
        return [Said(text)] if text else None

    def _head(self) -> list[Said] | None:
        found = _HEAD.match(self._held)
        if found and found[1] in self._names:
            self._held, self._has_head = self._held[found.end() :], True
            self._calls += 1
            return [Said("", self._calls - 1, f"call_{secrets.token_hex(12)}", found[1])]
        if found or END in self._held:  # of no tool that there is, or no call
            self._in_call = False
            return [Said(BEGIN)]
        return None

    def _arguments(self) -> list[Said] | None:
        arguments, end, after = self._held.partition(END)
        if end:
            self._held, self._in_call, self._has_head = after, False, False
            return [Said(arguments.rstrip().removesuffix("}"), self._calls - 1)]
        # The last brace may be that of the call itself.
        sure = self._held.rfind("}")
        sure = len(self._held) if sure < 0 and "<" not in self._held else sure
        if sure <= 0:
            return None
        piece, self._held = self._held[:sure], self._held[sure:]
        return [Said(piece, self._calls - 1)]
