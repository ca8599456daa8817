"""Parameters: what each may be, told once for reading a request and for the OpenAPI document."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.serving.problems import not_supported, refused

Body = Mapping[str, Any]
Schema = dict[str, Any]


class Parameter(Protocol):
    """One parameter of a body. `said`: what it does, for the document."""

    @property
    def name(self) -> str:
        """As clients write it."""

    @property
    def said(self) -> str:
        """What it does."""

    def schema(self) -> Schema:
        """What it may be, as JSON Schema."""

    def read(self, body: Body) -> Any:
        """Its value, or what counts if it is left out or null. Raises ApiProblem."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number from `low` to `high`; above `low` if `is_open`."""

    name: str
    low: float
    high: float
    default: float | None
    said: str
    is_integer: bool = False
    is_open: bool = False

    def schema(self) -> Schema:
        kind = "integer" if self.is_integer else "number"
        low = "exclusiveMinimum" if self.is_open else "minimum"
        return {"type": [kind, "null"], low: self.low, "maximum": self.high}

    def read(self, body: Body) -> Any:
        value = body.get(self.name)
        if value is None:
            return self.default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or (self.is_integer and not _is_whole(value)):
            kind = "an integer" if self.is_integer else "a number"
            raise refused(
                f"{self.name} is {shown(value)}; it must be {kind}", self.name, "invalid_type"
            )
        if not self.low <= value <= self.high or (self.is_open and value == self.low):
            low = f"above {self.low}" if self.is_open else f"at least {self.low}"
            raise refused(
                f"{self.name} is {shown(value)}; it must be {low} and at most {self.high}",
                self.name,
            )
        return int(value) if self.is_integer else float(value)


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    name: str
    default: bool
    said: str

    def schema(self) -> Schema:
        return {"type": ["boolean", "null"]}

    def read(self, body: Body) -> bool:
        value = body.get(self.name)
        if value is None:
            return self.default
        if not isinstance(value, bool):
            raise refused(
                f"{self.name} is {shown(value)}; it must be true or false",
                self.name,
                "invalid_type",
            )
        return value


@dataclass(frozen=True, slots=True)
class Text:
    """A text, one of `choices` if there are any; "" if it is left out."""

    name: str
    said: str
    choices: tuple[str, ...] = ()

    def schema(self) -> Schema:
        if self.choices:
            return {"enum": [*self.choices, None]}
        return {"type": ["string", "null"]}

    def read(self, body: Body) -> str:
        value = body.get(self.name)
        if value is None:
            return ""
        text = text_of(value, self.name)
        if self.choices and text not in self.choices:
            raise refused(
                f"{self.name} is {shown(text)}; choose one of: {', '.join(self.choices)}",
                self.name,
            )
        return text


@dataclass(frozen=True, slots=True)
class Only:
    """What this server does not do: taken if it asks for nothing, refused otherwise."""

    name: str
    values: tuple[Any, ...]
    said: str

    def schema(self) -> Schema:
        return {"enum": [*self.values, None]}

    def read(self, body: Body) -> None:
        value = body.get(self.name)
        if value is not None and not any(_is_same(value, one) for one in self.values):
            raise not_supported(
                f"{self.name} is not supported here ({self.said}); leave it out", self.name
            )


@dataclass(frozen=True, slots=True)
class Unread:
    """What changes no answer: taken and not looked at."""

    name: str
    said: str

    def schema(self) -> Schema:
        return {}

    def read(self, body: Body) -> None:
        return None


def text_of(value: object, name: str) -> str:
    """A text that can be encoded. Raises ApiProblem."""
    if not isinstance(value, str):
        raise refused(f"{name} is {shown(value)}; it must be a string", name, "invalid_type")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise refused(f"{name} is not valid Unicode text: it has half a character", name) from None
    return value


def refuse_unknown(body: Body, known: Iterable[str], where: str = "") -> None:
    """Raise ApiProblem for the first name that nobody knows: a typing error changes answers."""
    names = set(known)
    for name in body:
        if name not in names:
            path = f"{where}{name}"
            raise refused(f"there is no parameter {shown(path)}", path[:200], "unknown_parameter")


def shown(value: object) -> str:
    """A value in a message: not all of a long one."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_whole(value: float) -> bool:
    return isinstance(value, int) or (math.isfinite(value) and value.is_integer())


def _is_same(value: object, other: object) -> bool:
    """Equal, and of the same kind: true is not 1."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return value == other
