"""Grammar fault: what is said of a grammar that llguidance refuses, and where it is wrong."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from edgespec.types.grammar_spec import LAYOUT, GrammarSpec
from edgespec.types.tool_forms import IS_OF_TOOL

SEARCH_S = 0.5
"""Seconds of computing that the search for the place of a fault may take."""

MOST_CHARS = 300

_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?")
_QUOTED = re.compile(r"\n *\d+ \| .*|; following special tokens are .*|<non-verbose/>", re.DOTALL)


def refusal(spec: GrammarSpec, problem: str, limits: LLParserLimits) -> str:
    """What whoever asks is told of a fault that llguidance has these words for."""
    where, schema, place = [], "", _PLACE.match(problem)
    if spec.kind == "json_schema":
        schema = spec.text
    elif spec.kind == "lark" and place:
        number = int(place[1])
        line = "".join(spec.text.split("\n")[number - 1 : number])
        schema = line.partition(" %json ")[2]
        tool = line.rpartition(IS_OF_TOOL)
        where.append(f"tool {tool[2]}" if tool[1] else f"line {number}")
    with suppress(ValueError, RecursionError):  # there may be no schema
        pointer = _pointer(json.JSONDecoder().raw_decode(schema)[0], limits)
        where += [f"at {pointer!a:.150}"] if pointer else []
    told = words_of(problem[place.end() :] if place else problem)
    return ": ".join(["the grammar cannot be used", *filter(None, [", ".join(where)]), told])


def words_of(problem: str) -> str:
    """llguidance's words in one line, without the grammar that it quotes."""
    return " ".join(_QUOTED.sub("", problem).split())[:MOST_CHARS]


def _pointer(schema: Any, limits: LLParserLimits) -> str:
    """The JSON pointer of a schema's fault: of the innermost part without which it is none, or
    another one; "" if the schema has none."""

    def fault(tried: Any) -> str:
        source = LLMatcher.grammar_from_json_schema(json.dumps(tried), overrides=LAYOUT)  # type: ignore[arg-type]
        return str(LLMatcher.validate_grammar(source, limits=limits))

    until, first = time.process_time() + SEARCH_S, fault(schema)
    if not first:
        return ""

    def inner(path: list[Any], part: Any) -> list[Any]:
        for key in _keys(part):
            if time.process_time() > until:
                break
            if fault(_without(schema, [*path, key])) != first:
                return inner([*path, key], part[key])
        return path

    return "/".join(["#", *map(str, inner([], schema))])


def _keys(part: Any) -> list[Any]:
    """Where to look in it: what has parts itself first."""
    if isinstance(part, list):
        return [n for n, one in enumerate(part) if isinstance(one, dict | list)]
    if not isinstance(part, dict):
        return []
    return sorted(part, key=lambda key: not isinstance(part[key], dict | list))


def _without(whole: Any, path: Sequence[Any]) -> Any:
    """A copy that lacks what is there."""
    found = whole.copy()
    if len(path) > 1:
        found[path[0]] = _without(found[path[0]], path[1:])
    else:
        del found[path[0]]
    return found
