"""edgespec: one large language model across a handful of small boards, fast for one person.

What programs use is imported when it is first asked for; torch, when a model is opened.
"""

from importlib import import_module

__version__ = "0.2.0"

_ROOMS = {
    "door.asking": ("Completion", "SamplingParams"),
    "door.llm": ("LLM", "AsyncClient", "Client"),
    "door.simulation": ("simulate",),
    "drafting.own": ("DraftSource",),
    "policy.base": ("Decision", "Deepen", "Expand", "Grow", "Policy", "RequestView", "Send"),
    "verify.sampling": ("Sampling",),
}
"""Where the names are; `__init__.pyi` tells type checkers the same."""


def __getattr__(name: str) -> object:
    for room, names in _ROOMS.items():
        if name in names:
            return getattr(import_module(f"edgespec.{room}"), name)
    raise AttributeError(f"module 'edgespec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *(name for names in _ROOMS.values() for name in names)]
