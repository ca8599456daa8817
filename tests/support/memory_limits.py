"""Whether a limit on a process's memory holds here: QEMU's user emulation has none for programs."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache

_TAKE = (
    "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28)); bytes(1 << 29)"
)


@lru_cache
def memory_limit_holds() -> bool:
    """Whether a process may not take 512 MiB of the 256 that it is allowed."""
    return subprocess.run([sys.executable, "-c", _TAKE], stderr=subprocess.DEVNULL).returncode != 0
