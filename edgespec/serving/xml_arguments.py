"""XML arguments: makes JSON of a call's arguments that come with a tag each, as they come.

<parameter=NAME>, the value on lines of its own, </parameter>, each; then </function>. The schema of
the tool says which values are texts, which have no quotes there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import regex

_NEXT = regex.compile(r"\s{0,16}(?:<parameter=([^>\n]{1,256})>|</function>)")
_END = regex.compile(r"\n?</parameter>")
_LONGEST_END = len("\n</parameter>")
_AS_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Templates write what a call had before as Python does, and models repeat that."""


class XmlArguments:
    """Reads the arguments of one call; `parameters`: their schema."""

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
