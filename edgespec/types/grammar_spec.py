"""Grammar spec: what an answer may be, as whoever asks writes it and the message Submit has it."""

from __future__ import annotations

import json
from typing import Literal

import msgspec

from edgespec.errors import ConfigError

Kind = Literal["json_schema", "regex", "lark"]

LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as Python's json.dumps writes it: else a model may write blanks without end."""


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
    try:
        return spec("json_schema", json.dumps(schema))
    except RecursionError:
        raise ConfigError("the JSON schema is nested too deep") from None


def spec(kind: Kind, text: str) -> str:
    """One as the message Submit has it."""
    return json.dumps({"kind": kind, "text": text})
