"""A ring of real processes on the bundled pair in float64, and `edgespec api` beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from support.nodes import until
from support.torch_rings import CONTEXT

from edgespec.config import Address, CoordinatorConfig
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.cluster import VARIABLE
from edgespec.daemon.local_ring import LocalRing


@contextmanager
def real_api(
    base: str | None = None,
    draft: str | None = None,
    *,
    stages: int = 2,
    dtype: str = "float64",
) -> Iterator[tuple[str, int]]:
    """Its base URL and process id. `base`, `draft`: others than the bundled models."""
    config = CoordinatorConfig(
        base or bundled("base"),
        bundled("draft") if draft is None else draft,
        stages,
        dtype,
        Address("127.0.0.1", 0),
        context=CONTEXT,
    )
    with LocalRing(config) as ring:
        environment = {**os.environ, VARIABLE: str(ring._cluster.path)}
        command = [sys.executable, "-m", "edgespec.cli.main", "api", "--http", "127.0.0.1:0"]
        process = subprocess.Popen(
            [*command, "--coordinator", str(ring.address)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("API at http://"), line
            url = line.split()[-1]
            until(lambda: httpx.get(f"{url}/readyz").status_code == 200, 300.0)
            yield url, process.pid
        finally:
            process.terminate()
            code = process.wait(120)
            if process.stdout is not None:
                process.stdout.close()
    assert code == 0, "a signal to end is obeyed in good order"
