"""Tools: reads thoughts, text and calls of tools out of an answer that comes in pieces.

For the forms of calls see types.tool_forms, for the tags of thoughts types.thinking.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from edgespec.types.thinking import ThoughtReader
from edgespec.types.tool_forms import Tool, ToolForm

_NEXT = regex.compile(r"\s{0,16}(?:<parameter=([^>\n]{1,256})>|</function>)")
_END = regex.compile(r"\n?</parameter>")
_LONGEST_END = len("\n</parameter>")
_AS_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates write what a call had before as Python does, and models repeat that."""


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of an answer: of its text, of a thought if it `thinks`, or, with a `name` as it
    begins, of the arguments of its call number `call`."""

    text: str
    call: int = -1
    id: str = ""
    name: str = ""
    thinks: bool = False


class AnswerReader:
    """Reads an answer that comes in pieces: what it thinks first, and what it says and calls."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool], tag: str) -> None:
        """`tools`: those that there are. `tag`: that of its thoughts; "": it has none."""
        self._thoughts = ThoughtReader(*([tag] if tag else ()))
        self._calls = CallReader(form, tools) if tools else None

    @property
    def calls(self) -> int:
        """How many there were so far."""
        return self._calls.calls if self._calls else 0

    def push(self, text: str, *, thinks: bool = False) -> list[Said]:
        """What is certain with this text; `thinks`: the prompt ended within a thought."""
        return self._read(self._thoughts.push(text, thinks=thinks))

    def flush(self, reason: str) -> list[Said]:
        """The answer has ended, for that reason: the rest of it."""
        found = self._read(self._thoughts.flush())
        is_cut = reason == "length"
        return [*found, *(self._calls.flush(is_cut=is_cut) if self._calls else ())]

    def _read(self, pieces: Sequence[tuple[str, bool]]) -> list[Said]:
        found: list[Said] = []
        for text, thinks in pieces:
            if thinks or self._calls is None:
                found.append(Said(text, thinks=thinks))
            else:
                found += self._calls.push(text)
        return found


class CallReader:
    """Reads calls out of an answer that comes in pieces. What is no call is text."""

    def __init__(self, form: ToolForm, tools: Sequence[Tool]) -> None:
        """`tools`: those that there are."""
        names = [tool.name for tool in tools]
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._anywhere = form.anywhere
        self._first = regex.compile(form.pattern(names, another=False))
        self._another = regex.compile(form.pattern(names, another=True))
        self._closing = regex.compile(form.closing)
        self._held = ""
        self._calls = 0
        self._next = self._opening
        self._arguments: JsonArguments | XmlArguments = JsonArguments()

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

    def flush(self, *, is_cut: bool = False) -> list[Said]:
        """The answer has ended: the rest of it, if that is text. What begins like a call is none
        where the answer was cut."""
        rest, self._held = self._held, ""
        if is_cut and self._next == self._opening and rest.strip():
            return []
        if self._next == self._in_arguments:
            piece = self._arguments.rest(rest)
            return [Said(piece, self._calls - 1)] if piece else []
        if self._next == self._closed or (self._calls and not rest.strip()):
            return []
        return [Said(rest)] if rest else []

    # Each step gives what comes next of what is held; None if that is not certain yet.

    def _text(self) -> list[Said] | None:
        text, self._held = self._held, ""
        return [Said(text)] if text else None

    def _opening(self) -> list[Said] | None:
        pattern = self._another if self._calls else self._first
        look = pattern.search if self._anywhere else pattern.match
        found = look(self._held, partial=True)
        if found is None:
            self._next = self._text
            return []
        text, self._held = self._held[: found.start()], self._held[found.start() :]
        said = [Said(text)] if text else []
        if found.partial:
            return said or None
        is_json = found[0].endswith("{")
        self._held = self._held[len(found[0]) - is_json :]  # from the first brace on
        self._arguments = JsonArguments() if is_json else XmlArguments(self._schemas[found[1]])
        self._next = self._in_arguments
        self._calls += 1
        return [*said, Said("", self._calls - 1, f"call_{secrets.token_hex(12)}", found[1])]

    def _in_arguments(self) -> list[Said] | None:
        piece, self._held = self._arguments.take(self._held)
        if self._arguments.is_over:
            self._next = self._closed
        return [Said(piece, self._calls - 1)] if piece else None

    def _closed(self) -> list[Said] | None:
        if self._closing.fullmatch(self._held, partial=True):  # it may be longer yet
            return None
        found = self._closing.match(self._held)
        self._held = self._held[found.end() :] if found else self._held
        self._next = self._opening
        return []


class JsonArguments:
    """Finds where a JSON object ends that comes in pieces: its braces are counted, not those in
    its texts."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._in_text = self._is_escaped = False

    def take(self, text: str) -> tuple[str, str]:
        """What belongs to it of this text, and the rest."""
        end = self._end(text)
        return text[:end], text[end:]

    def rest(self, text: str) -> str:
        """Nothing is held back of it."""
        return text

    def _end(self, text: str) -> int:
        for at, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_text:
                self._is_escaped = character == "\\"
                self._in_text = character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_over = True
                    return at + 1
        return len(text)


class XmlArguments:
    """Makes JSON of a call's arguments that come with a tag each: <parameter=NAME>, the value on
    lines of its own, </parameter>, each; then </function>. The tool's `parameters`, a schema, say
    which values are texts, which have no quotes there."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        given = parameters.get("properties")
        self._schemas: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
        self.is_over = False
        self._before = "{"  # the next name
        self._value: _Value | None = None

    def take(self, text: str) -> tuple[str, str]:
        """What is certain of the JSON with this text, and the rest of it, which is not."""
        found = ""
        while not self.is_over:
            step = self._in_value(text) if self._value else self._between(text)
            if step is None:
                break
            found, text = found + step[0], step[1]
        return found, text

    def rest(self, text: str) -> str:
        """The JSON of a rest that nothing follows: the call was cut off."""
        return _bare(text) if self._value is not None and self._value.streams else ""

    def _between(self, text: str) -> tuple[str, str] | None:
        found = _NEXT.match(text, partial=True)
        if found is not None and found.partial:
            return None
        if found is None or found[1] is None:  # its end, or what cannot be read
            self.is_over = True
            closing = "}" if self._before == ", " else "{}"
            return closing, text[found.end() :] if found else text
        self._value = _Value(self._schemas.get(found[1], {}))
        begun = f"{self._before}{json.dumps(found[1])}: "
        self._before = ", "
        return begun + '"' * self._value.streams, text[found.end() :]

    def _in_value(self, text: str) -> tuple[str, str] | None:
        value = self._value
        assert value is not None
        if not value.begun:
            if not text:
                return None
            value.begun = True
            return "", text.removeprefix("\n")
        end = _END.search(text)
        if end is not None:
            self._value = None
            said, rest = text[: end.start()], text[end.end() :]
            return (f'{_bare(said)}"' if value.streams else value.as_json(said)), rest
        sure = len(text) - _LONGEST_END if value.streams else 0
        return (_bare(text[:sure]), text[sure:]) if sure > 0 else None


class _Value:
    """What is known of one argument's value."""

    def __init__(self, schema: object) -> None:
        self._kinds = _kinds(schema)
        self._is_text = "string" in self._kinds or not self._kinds
        self.streams = self._is_text and "null" not in self._kinds
        """Whether it is a text, so that each part of it is certain as it comes."""
        self.begun = False

    def as_json(self, said: str) -> str:
        plain = said.strip()
        plain = _AS_PYTHON.get(plain, plain)
        if self._is_text and plain != "null":
            return json.dumps(said, ensure_ascii=False)
        try:
            return json.dumps(json.loads(plain), ensure_ascii=False)
        except (ValueError, RecursionError):
            return json.dumps(said, ensure_ascii=False)


def _kinds(schema: object) -> set[str]:
    """The types that a schema allows, as far as it says so itself; empty if it says nothing."""
    if not isinstance(schema, Mapping):
        return set()
    if "$ref" in schema:
        return {"object"}
    given = schema.get("type", [])
    found: set[str] = (
        {given} if isinstance(given, str) else {*given} if isinstance(given, list) else set()
    )
    for name in ("anyOf", "oneOf"):
        for one in schema.get(name) or ():
            found |= _kinds(one)
    if not found and any(not isinstance(one, str) for one in schema.get("enum") or ()):
        return {"number"}
    return found


def _bare(text: str) -> str:
    """A text within JSON's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
