"""Grammars in a process of their own: what explodes ends in one clear error, and soon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.torch_rings import tokenizer

from edgespec.errors import ConfigError
from edgespec.model.grammar_process import MOST_CHARS, GrammarProcess
from edgespec.types.grammar_spec import json_spec, spec

GOOD = json_spec({"type": "object", "properties": {"a": {"type": "integer"}}})


@pytest.fixture
def trying() -> Iterator[GrammarProcess]:
    made = GrammarProcess(lambda: tokenizer().vocabulary, seconds=60.0)
    made.check(GOOD)
    yield made
    made.close()


def nested(depth: int) -> dict[str, Any]:
    """Objects in one another."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def keyed(count: int) -> dict[str, Any]:
    """So many kinds of object."""
    kinds = [{"type": "object", "properties": {f"k{n}": {"type": "null"}}} for n in range(count)]
    return {"anyOf": kinds}


PATTERNS = [{"type": "string", "pattern": f".*a{{{n}}}.*"} for n in range(1, 60)]


TOO_LARGE = [
    json_spec(nested(300)),
    json_spec(keyed(10_000)),
    spec("json_schema", '{"a":' * 50_000 + "1" + "}" * 50_000),
    spec("regex", "x" * MOST_CHARS),
]
ONLY_LARGE = [
    json_spec({"enum": [f"value {n}" for n in range(10_000)]}),
    json_spec({"type": "string", "pattern": "^(a|b)*a(a|b){40}$"}),
    spec("regex", "(x+x+)+y"),
]


def test_what_is_too_large_ends_in_one_clear_error(trying: GrammarProcess) -> None:
    for grammar in TOO_LARGE:
        with pytest.raises(ConfigError) as caught:
            trying.check(grammar)
        assert len(str(caught.value)) < 500, grammar[:80]
        assert "\n" not in str(caught.value), grammar[:80]
        trying.check(GOOD)


def test_what_is_only_large_is_taken_and_not_tried_twice(
    trying: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for grammar in ONLY_LARGE:
        trying.check(grammar)
    monkeypatch.setattr(trying, "ask", lambda _: pytest.fail("it was asked"))
    for grammar in ONLY_LARGE:
        trying.check(grammar)


def test_what_has_no_end_is_given_up_and_the_next_is_tried(trying: GrammarProcess) -> None:
    trying.seconds, trying.patience, before = 0.5, 1.0, trying.child
    with pytest.raises(ConfigError, match="given up: it took all the time"):
        trying.check(json_spec({"allOf": PATTERNS}))
    assert trying.child is not None, "the next one gets ready"
    trying.seconds = 60.0
    with pytest.raises(ConfigError, match="cannot be used"):
        trying.check(spec("regex", "(a"))
    assert trying.child is not before
