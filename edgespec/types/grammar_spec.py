"""Grammar spec: what an answer may be, as whoever asks writes it and the message Submit has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from edgespec.errors import ConfigError

Kind = Literal["json_schema", "regex", "lark"]

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's json.dumps writes it: else a model may write blanks without end."""


FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""Those that llguidance holds a text to. Any other is an annotation, as JSON Schema has it."""

LEFT_OUT = "uniqueItems"
"""A keyword that no grammar can hold a text to: an answer may be invalid by it."""

_OF_NAMES = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose object has a schema under each name, whatever the name."""

_OF_VALUES = {"const", "enum", "default", "examples"}
"""Keywords whose value is no schema, whatever it looks like."""


class GrammarSpec(msgspec.Struct, forbid_unknown_fields=True):
    """`text`: a JSON schema, a regular expression for the whole answer, or a Lark grammar."""

    kind: Kind
    text: str

    @staticmethod
    def read(text: str) -> GrammarSpec:
        """Raises ConfigError."""
        try:
            return msgspec.json.decode(text, type=GrammarSpec)
        except (msgspec.MsgspecError, RecursionError) as problem:
            raise ConfigError(f"the grammar cannot be read: {problem}") from None


def json_spec(schema: object) -> str:
    """One of a JSON schema. Raises ConfigError if that is nested too deep."""
    return spec("json_schema", schema_text(schema))


def schema_text(schema: object) -> str:
    """A JSON schema as grammars have it: a `format` that is not one of FORMATS is an annotation,
    and left out; so is LEFT_OUT. Raises ConfigError if it is nested too deep."""
    try:
        return json.dumps(_without_annotations(schema))
    except RecursionError:
        raise ConfigError("the JSON schema is nested too deep") from None


def leaves_out(schema: object) -> bool:
    """Whether a schema that is not nested too deep has LEFT_OUT."""
    named = json.dumps(LEFT_OUT)
    return json.dumps(schema).count(named) > schema_text(schema).count(named)


def _without_annotations(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_annotations(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key == LEFT_OUT:
            continue
        if key in _OF_NAMES and isinstance(value, Mapping):
            value = {name: _without_annotations(part) for name, part in value.items()}
        elif key not in _OF_VALUES:
            value = _without_annotations(value)
        kept[key] = value
    return kept


def spec(kind: Kind, text: str) -> str:
    """One as the message Submit has it."""
    return json.dumps({"kind": kind, "text": text})
