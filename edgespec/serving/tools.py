"""Tools: reads the calls of tools out of an answer that comes in pieces (see types.tool_forms)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import regex

from edgespec.serving.xml_arguments import XmlArguments
from edgespec.types.tool_forms import Tool, ToolForm


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

    def flush(self) -> list[Said]:
        """The answer has ended: the rest of it, if that is text."""
        rest, self._held = self._held, ""
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
