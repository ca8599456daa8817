"""What an installation may leave out: the extras of setup.cfg, and how a command asks for one."""

from __future__ import annotations

from importlib.util import find_spec

from edgespec.errors import ConfigError

EXTRAS = {
    "coordinator": ("starlette", "uvicorn", "prometheus_client", "segno"),
    "bench": ("matplotlib",),
    "nf4": ("bitsandbytes",),
}
"""Each extra, and the modules that come with it."""


def missing(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRAS[extra] if find_spec(name) is None]


def require(extra: str, purpose: str) -> None:
    """Raise ConfigError if `purpose`, the subject of the message, lacks a module of an extra."""
    if names := missing(extra):
        raise ConfigError(
            f"{purpose} needs {', '.join(names)}, which is not installed here: `pip install "
            f"'.[{extra}]'` in the folder of edgespec's sources, as docs/dependencies.md has it"
        )
