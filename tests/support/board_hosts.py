"""Hosts of a LAN that are as boards of their own: with a name, a home and a cache each, and all but
the first with nothing of a model's files.

with board_hosts(model, "board-a", "board-b") as (hosts, folders): ...
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from support.namespaces import Cable, Host, lan

from edgespec.files import cache_folder

_START = 'hostname "$1"; [ -z "$2" ] || mount -t tmpfs none "$2"; shift 2; exec "$@"'


@contextmanager
def board_hosts(
    hidden: Path, *names: str, cable: Cable | None = None
) -> Iterator[tuple[list[Host], dict[str, Path]]]:
    """The hosts, and by name the folder in which `home` and `cache` are. `hidden`: a folder that
    only the first one has. What is compiled on this machine is compiled on them."""
    with lan(*names, cable=cable) as hosts, tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / name for name in names}
        boards = []
        for number, host in enumerate(hosts):
            own = folders[host.name]
            (own / "home").mkdir(parents=True)
            kernels = own / "cache" / "edgespec" / "kernels"
            if (cache_folder() / "kernels").exists():
                shutil.copytree(cache_folder() / "kernels", kernels)
            inside = ("unshare", "--uts", "--mount", "sh", "-c", _START, "sh", host.name)
            environment = ("env", f"HOME={own}/home", f"XDG_CACHE_HOME={own}/cache")
            own_words = (*inside, str(hidden) if number else "", *environment, "OMP_NUM_THREADS=1")
            boards.append(replace(host, _first=own_words))
        yield boards, folders
