"""JSON schemas from a seed, whose answers are short enough to end by themselves."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "age", "city", "id", "kind", "ok", "size", "tags")
_WORDS = ("red", "green", "dark blue", "x", "ünï", 'a "quote"', "new\nline")
_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(yes|no)$", "^[a-f]+$", "^[0-9]{4}-[0-9]{2}$")


def schema_of(seed: int) -> Schema:
    """The schema of that seed; the first ones have little, the later ones more."""
    chance = random.Random(seed)
    schema = _any(chance, depth=min(2, 1 + seed % 3 // 2))
    if seed % 7 == 3:  # what is defined elsewhere
        return {"$defs": {"part": schema}, **_object(chance, [{"$ref": "#/$defs/part"}])}
    return schema if "properties" in schema or seed % 5 else _object(chance, [schema])


def _any(chance: random.Random, depth: int) -> Schema:
    makers = [_string, _integer, _choice, _literal]
    if depth:
        makers += [_array, _group, _group, _either]
    return chance.choice(makers)(chance, depth)


def _string(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.4:
        return {"type": "string", "pattern": chance.choice(_PATTERNS), "maxLength": 8}
    least = chance.randint(0, 2)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}


def _integer(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 200)}


def _choice(chance: random.Random, depth: int) -> Schema:
    return {"enum": chance.sample([*_WORDS, 1, 2.5, None, True], chance.randint(1, 4))}


def _literal(chance: random.Random, depth: int) -> Schema:
    return chance.choice(
        [{"type": "boolean"}, {"type": "null"}, {"const": chance.choice(_WORDS)}, {"const": 7}]
    )


def _array(chance: random.Random, depth: int) -> Schema:
    least = chance.randint(0, 1)
    items = _any(chance, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _group(chance: random.Random, depth: int) -> Schema:
    return _object(chance, [_any(chance, depth - 1) for _ in range(chance.randint(1, 3))])


def _either(chance: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(chance, depth - 1) for _ in range(chance.randint(2, 3))]}


def _object(chance: random.Random, values: list[Schema]) -> Schema:
    names = chance.sample(_NAMES, len(values))
    needed = [name for name in names if chance.random() < 0.8]
    return {
        "type": "object",
        "properties": dict(zip(names, values, strict=True)),
        "required": needed,
        "additionalProperties": False,
    }
