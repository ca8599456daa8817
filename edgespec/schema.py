"""Schema: the content of a JSON file as a typed value, or one sentence on what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from reprlib import Repr
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from edgespec.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

Text = Annotated[str, Meta(pattern=r"\S")]
"""A text that is not empty."""

_PROBLEM = re.compile(r"(.*?)(?: - at (`key` in )?`\$([^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_KEY_PROBLEM = re.compile(r"Object (missing|contains) \w+ field `(.*)`")
_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_SHOWN = Repr()
_SHOWN.maxstring = _SHOWN.maxlong = 60


class FileStruct(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of what a file holds: immutable, and an unknown key is an error."""


def parse_json(text: str | bytes, where: str, remedy: str = "") -> Any:
    """The value in a JSON file. Raises ConfigError.

    `where`: the file, for messages; `remedy`: what to do about a bad one.
    """
    try:
        decoded = text.decode() if isinstance(text, bytes) else text
        return json.loads(decoded, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as problem:
        raise _refused(f"{where} is not JSON in UTF-8: {problem}", remedy) from None


def check_version(
    content: Any,
    where: str,
    remedy: str,
    version: tuple[str, int],
    older: str = "use the edgespec that wrote it",
) -> dict[str, Any]:
    """The object in a JSON file, without its version: the key, and the number that is read.

    `older`: what to do about another number.
    """
    if not isinstance(content, dict):
        raise _refused(f"{where} is {_SHOWN.repr(content)}; it must be an object", remedy)
    key, number = version
    found = content.get(key)
    if found != number or isinstance(found, bool):
        raise ConfigError(
            f"{where} has {key} {_SHOWN.repr(found)}, and this edgespec reads {key} {number}; "
            f"{older}"
        )
    return {name: value for name, value in content.items() if name != key}


def read_as(
    kind: type[S],
    text: str | bytes,
    where: str,
    remedy: str,
    version: tuple[str, int],
    *,
    all_keys: bool = False,
    newer: Collection[str] = (),
) -> S:
    """The object in a JSON file as a msgspec type; see `check_version` and `as_type`.

    `all_keys`: those with defaults must be there, too, but for the `newer` ones, which files of
    earlier releases lack.
    """
    content = check_version(parse_json(text, where, remedy), where, remedy, version)
    known = kind.__struct_fields__ if all_keys else ()
    if missing := [name for name in known if name not in content and name not in newer]:
        raise _refused(f"{where}: the key {missing[0]!r} is missing", remedy)
    return as_type(kind, content, where, remedy)


def json_text(content: Struct, version: tuple[str, int]) -> str:
    """What `read_as` reads."""
    return json.dumps(dict([version], **to_builtins(content)), indent=1) + "\n"


def as_type(kind: type[T], value: object, where: str, remedy: str = "") -> T:
    """`value` converted to a msgspec type, strictly. Raises ConfigError that names the place."""
    try:
        return convert(value, kind)
    except (ValidationError, ConfigError) as problem:
        try:
            words = _explained(kind, value, str(problem))
        except (AssertionError, LookupError, TypeError, ValueError):  # a key that looks like a path
            words = str(problem)
    except UnicodeEncodeError:  # JSON can spell half a character
        words = "it holds text that is not Unicode"
    raise _refused(f"{where}: {words}", remedy)


def _refused(problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"{problem}; {remedy}" if remedy else problem)


def _explained(kind: type[Any], value: object, problem: str) -> str:
    """What msgspec says of a value, with the place and the value in plain words."""
    found = _PROBLEM.fullmatch(problem)
    assert found is not None
    what, of_key, path = found[1], found[2], found[3] or ""
    place, at = "", value
    for name, index in _STEP.findall(path):
        step = name or (int(index) if index.isdigit() else _culprit(kind, value, at, problem))
        place += f"[{step}]" if isinstance(step, int) else f".{step}"
        at = at[step]  # type: ignore[index]
    place = place.removeprefix(".")
    if key := _KEY_PROBLEM.fullmatch(what):
        inside = f" in {place}" if place else ""
        if key[1] == "missing":
            return f"the key {key[2]!r} is missing{inside}"
        known = "" if place else f"; known: {', '.join(getattr(kind, '__struct_fields__', ()))}"
        return f"unknown key {key[2]!r}{inside}{known}"
    if not what[:1].isupper():  # words of our own types, which say what they speak of
        return f"{place}: {what}" if place else what
    wanted = re.sub(r"`(.*?)`", lambda m: _in_words(m[1]), what.partition(", got ")[0])
    for empty in (r" matching regex '\\S'", " of length >= 1"):
        wanted = wanted.replace(empty, " that is not empty")
    subject = f"{'a key of ' if of_key else ''}{place or 'it'} is {_SHOWN.repr(at)}"
    if wanted.startswith("Expected "):
        return f"{subject}; it must be {wanted.removeprefix('Expected ')}"
    return f"{subject}: {wanted.lower()}"


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))


def _culprit(kind: type[Any], whole: object, entries: Any, problem: str) -> str:
    """The key of the first entry of a mapping that is refused, which msgspec does not tell."""
    kept = dict(entries)
    entries.clear()
    try:
        for key, value in kept.items():
            entries[key] = value
            try:
                convert(whole, kind)
            except ValidationError as again:
                if str(again) == problem:
                    return str(key)
    finally:
        entries.clear()
        entries.update(kept)
    raise AssertionError(problem)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"a key is there twice in {_SHOWN.repr([key for key, _ in pairs])}")
    return content


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
