"""The image of Containerfile: built, and a ring in it, where podman, buildah or docker is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGE = "localhost/edgespec-test"
BUILDERS = ("podman", "docker", "buildah")
WORDS = "--prompt Once --max-new-tokens 4"


def text() -> str:
    return (REPOSITORY / "Containerfile").read_text(encoding="utf-8")


def test_it_ends_as_a_user_without_rights_and_keeps_what_must_stay() -> None:
    lines = text().splitlines()
    users = [line.removeprefix("USER ") for line in lines if line.startswith("USER ")]
    assert users == ["edgespec"]
    (volumes,) = (line.split()[1:] for line in lines if line.startswith("VOLUME "))
    homes = re.findall(r"(?:STATE_DIRECTORY|HOME)=(\S+)", text())
    assert sorted(volumes) == sorted(homes)


def test_what_an_installation_reads_is_not_left_out() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for needed in ("setup.cfg", "constraints.txt", "README.md", "edgespec", "daemon", "tools"):
        assert needed not in ignored
    assert {".git", ".venv", "tests"} <= set(ignored)


def run(*words: str, seconds: float) -> str:
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_a_ring_in_a_container_answers_as_a_user_without_rights() -> None:
    """By name. CONTAINER_BUILD: further words for the build, as `--build-arg BASE=...`;
    CONTAINER_RUN: for the run."""
    builder = next(filter(shutil.which, BUILDERS), None)
    if builder is None:
        pytest.skip("no podman, docker or buildah here")
    more = {name: os.environ.get(f"CONTAINER_{name}", "").split() for name in ("BUILD", "RUN")}
    run(builder, "build", "-f", "Containerfile", "-t", IMAGE, *more["BUILD"], ".", seconds=3000)
    model = "/opt/edgespec/edgespec/models"
    demo = f"edgespec demo --model {model}/base --draft {model}/draft --stages 2 --json --raw"
    script = ("sh", "-c", f"id -un; {demo} {WORDS}")
    if builder == "buildah":
        container = run("buildah", "from", IMAGE, seconds=600).strip()
        try:
            said = run("buildah", "run", *more["RUN"], container, "--", *script, seconds=900)
        finally:
            run("buildah", "rm", container, seconds=60)
    else:
        words = ("run", "--rm", *more["RUN"], "--entrypoint", script[0], IMAGE, *script[1:])
        said = run(builder, *words, seconds=900)
    user, answer = said.split("\n", 1)
    assert user == "edgespec"
    assert json.loads(answer)["new_tokens"] == 4
