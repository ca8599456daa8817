"""Plain JSON: frozen dataclasses to JSON values and back, checked against their annotations."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from edgespec.errors import ConfigError

_T = TypeVar("_T")


def to_json(value: Any) -> Any:
    """A dataclass of numbers, texts, tuples and dataclasses as a JSON value."""
    return asdict(value)


def from_json(kind: type[_T], value: Any) -> _T:
    """The dataclass that `to_json` made `value` of.

    Of several dataclasses that a field may hold, the one is meant whose `kind` field has the
    value's. Raises ConfigError for a value that does not fit.
    """
    made: _T = _read(kind, value, kind.__name__)
    return made


def _read(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin is tuple:
        return _tuple(get_args(kind), value, where)
    if origin in (Union, UnionType):
        return _one_of(get_args(kind), value, where)
    if is_dataclass(kind):
        return _dataclass(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}; it must be {kind.__name__}")
    return value


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} is {value!r}; it must be a list")
    return tuple(_read(kinds[0], item, f"{where}[{at}]") for at, item in enumerate(value))


def _one_of(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    choices = [kind for kind in kinds if kind is not type(None)]
    if len(choices) > 1:
        name = value.get("kind") if isinstance(value, dict) else None
        choices = [
            k for k in choices if any(f.default == name for f in fields(k) if f.name == "kind")
        ]
        if not choices:
            raise ConfigError(f"{where} is of the unknown kind {name!r}")
    return _read(choices[0], value, where)


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}; it must be an object")
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}
    for name in value:
        if name not in known:
            raise ConfigError(f"{where} has an unknown field {name!r}")
    for name, field in known.items():
        if name not in value and field.default is MISSING:
            raise ConfigError(f"{where} lacks {name!r}")
    return kind(
        **{name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    )
