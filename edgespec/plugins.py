"""Plug-ins: classes of somebody's own that this process was told to use, by module or entry point.

Only the owner of a process names them, on its command line or in its program, never a peer: to name
one is to run its module. What a process was told it tells its children (`OWN_POLICIES`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

from edgespec.errors import ConfigError
from edgespec.policy.base import Policy
from edgespec.policy.registry import POLICIES

POLICY_GROUP, DRAFT_GROUP = "edgespec.policies", "edgespec.drafts"
"""Groups of entry points."""

OWN_POLICIES: dict[str, str] = {}
"""What was said for each policy of somebody's own that is in POLICIES, by its name there."""

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

Kind = TypeVar("Kind")


def _entry_points(group: str) -> EntryPoints:
    from importlib.metadata import entry_points  # slow to import; hardly any command needs it

    return entry_points(group=group)


@cache
def entry_names(group: str) -> frozenset[str]:
    """The entry points that the installed packages have in a group."""
    return frozenset(one.name for one in _entry_points(group))


def load(text: str, kind: type[Kind], group: str) -> type[Kind]:
    """The class that `package.module:Class`, or an entry point of the group, stands for.

    Modules are found where Python finds them, and in the current folder. Raises ConfigError for
    what cannot be imported and for what is no `kind`.
    """
    module, colon, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        if colon:
            found = getattr(import_module(module), name)
        else:
            found = next(one for one in _entry_points(group) if one.name == text).load()
    except Exception as problem:  # whatever a module of somebody's own does
        raise ConfigError(f"{text} cannot be loaded: {type(problem).__name__}: {problem}") from None
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{text} is no {kind.__name__}: derive its class from edgespec's")
    return found


def known_policies(texts: Iterable[str]) -> list[str]:
    """The names of these policies; what is `package.module:Class` or an entry point is known to
    this process from now on, by its own name. Other texts stay as they are.

    Raises ConfigError as `load`, and for a name that another policy has.
    """
    return [_known(text) for text in texts]


def _known(text: str) -> str:
    if text in ("", *POLICIES) or not (":" in text or text in entry_names(POLICY_GROUP)):
        return text
    try:
        policy = load(text, Policy, POLICY_GROUP)()  # type: ignore[type-abstract]
    except TypeError as problem:
        raise ConfigError(f"policy {text} cannot be made: {problem}") from None
    name = policy.name
    if name in POLICIES and OWN_POLICIES.get(name) != text:
        raise ConfigError(f"policy {text} is called {name!r}, as another one is; rename it")
    POLICIES[name], OWN_POLICIES[name] = policy, text
    return name


def own_policy_options() -> list[str]:
    """What tells a command of edgespec the policies that this process was told."""
    return ["--policy", ",".join(OWN_POLICIES.values())] if OWN_POLICIES else []
