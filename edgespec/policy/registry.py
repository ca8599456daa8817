"""The published names of the policies."""

from __future__ import annotations

from edgespec.errors import ConfigError
from edgespec.policy.adaptive import Adaptive
from edgespec.policy.autoregressive import Autoregressive
from edgespec.policy.base import Policy
from edgespec.policy.flowspec import FlowSpec
from edgespec.policy.naive_tree import NaiveTree
from edgespec.policy.pipedec import PipeDec
from edgespec.policy.pruned import Pruned
from edgespec.policy.specpipe import SpecPipe

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Autoregressive(),
        NaiveTree(),
        Pruned(),
        PipeDec(),
        PipeDec(width=16, name="pipedec16"),
        SpecPipe(),
        FlowSpec(),
        Adaptive(),
    )
}


def policy_named(name: str) -> Policy:
    """The policy of that name with its paper's parameters; ConfigError lists the names."""
    try:
        return POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ConfigError(f"unknown policy {name!r}; choose one of: {known}") from None
