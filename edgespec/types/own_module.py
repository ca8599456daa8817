"""Own module: a module of edgespec as a program, whatever the working directory holds."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])


def own_command(module: str) -> list[str]:
    """The command that runs a module as `python -m` does, but finds it where this process did.

    `-m` looks into the working directory first, which may hold another folder `edgespec`.
    """
    found = f"sys.path[:1] = [{_ROOT!r}] * ({_ROOT!r} not in sys.path[1:])"
    run = "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import runpy, sys; {found}; {run}", module]
