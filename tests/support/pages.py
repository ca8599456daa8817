"""A cluster with its API as processes, and Chromium on the page that it serves."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.commands import Command

from edgespec.daemon.cluster import ClusterFolder, ClusterSettings

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu"]
"""Tests run as root, where Chromium's sandbox does not."""


def require_chromium() -> None:
    """Skip the test where there is no Chromium; in CI, where there has to be one, fail it."""
    if Path(CHROMIUM).exists():
        return
    if os.environ.get("CI"):
        pytest.fail("there is no Chromium: .ci/run installs it", pytrace=False)
    pytest.skip("there is no Chromium: install the package chromium")


class Cluster:
    """A coordinator with its API, and stages on this machine. Use as a context manager."""

    def __init__(self, folder: Path, stages: int, *options: str, recovery: float = 60.0) -> None:
        """`options`: more of `edgespec serve`, and of `edgespec join` alike."""
        self._folder = folder
        self._stages = stages
        self._options = options
        self._recovery = recovery
        self._open = ExitStack()
        self.stages: dict[int, Command] = {}

    def __enter__(self) -> Cluster:
        settings = ClusterSettings(stages=self._stages)  # of the bundled pair
        ClusterFolder.create(self._folder / "cluster", settings)
        serve = ["serve", "--host", "127.0.0.1", "--port", "0", "--http", "127.0.0.1:0"]
        serve += ["--recovery", str(self._recovery), *self._common]
        self.coordinator = self._open.enter_context(Command(*serve))
        try:
            self.coordinator.until_out("\n")
            self.address = self.coordinator.out.split()[-1]
            for stage in range(1, self._stages + 1):
                self.join(stage)
            for stage in self.stages.values():
                stage.until_err("the ring is up")
            self.coordinator.until_err("API at http://")
        except BaseException:
            self._open.close()
            raise
        found = re.search(r"API at (http://\S+)", self.coordinator.err)
        assert found is not None
        self.url = found[1].rstrip(",;")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def _common(self) -> list[str]:
        cache, cluster = self._folder / "blocks", self._folder / "cluster"
        return ["--cache", str(cache), "--cluster", str(cluster), *self._options]

    def join(self, stage: int) -> None:
        """Start a stage, or start it again."""
        join = ["join", "--stage", str(stage), "--coordinator", self.address, *self._common]
        self.stages[stage] = self._open.enter_context(Command(*join))

    def kill(self, stage: int) -> None:
        """End a stage as a power cut does."""
        self.stages[stage].process.kill()
        self.stages[stage].process.wait()
