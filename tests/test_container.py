"""The image of Containerfile: built, and a ring in it, where podman, buildah or docker is.

Both machines' are where the base can be had and the other machine is emulated; each that cannot be
is skipped, with the reason. CONTAINER_BUILD and CONTAINER_RUN hold further words, as another BASE
(then with `-k amd64` or `-k arm64`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
IMAGE = "localhost/edgespec-test"
BUILDERS = ("podman", "docker", "buildah")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}  # as images and as kernels name them
LONGEST = 4 * 3600.0  # emulated, it takes long
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


def builder_for(machine: str, build: list[str]) -> str:
    """What makes images for this machine here, or a skipped test."""
    builder = next(filter(shutil.which, BUILDERS), None)
    if builder is None:
        pytest.skip("no podman, docker or buildah here")
    emulator = Path("/proc/sys/fs/binfmt_misc/qemu-" + MACHINES[machine])
    if platform.machine() != MACHINES[machine] and not emulator.exists():
        pytest.skip(f"this machine has no emulator for {machine} ({emulator})")
    if not any("BASE=" in word for word in build):
        (base,) = re.findall(r"^ARG BASE=(\S+)", text(), re.MULTILINE)
        words = (builder, "pull", "--platform", f"linux/{machine}", base)
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"{base} cannot be had: {done.stderr.strip()[-200:]}")
    return builder


@pytest.mark.slow
@pytest.mark.timeout(3 * LONGEST)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_ring_in_a_container_answers_as_a_user_without_rights(machine: str) -> None:
    """By name. CONTAINER_BUILD: further words for the build, as `--build-arg BASE=...` for a base
    of this machine; CONTAINER_RUN: for the run."""
    more = {name: os.environ.get(f"CONTAINER_{name}", "").split() for name in ("BUILD", "RUN")}
    builder, there = builder_for(machine, more["BUILD"]), ("--platform", f"linux/{machine}")
    image = f"{IMAGE}-{machine}"
    words = ("build", *there, "-f", "Containerfile", "-t", image, *more["BUILD"], ".")
    run(builder, *words, seconds=LONGEST)
    model = "/opt/edgespec/edgespec/models"
    demo = f"edgespec demo --model {model}/base --draft {model}/draft --stages 2 --json --raw"
    script = ("sh", "-c", f"id -un; uname -m; edgespec doctor >&2 && {demo} {WORDS}")
    if builder == "buildah":
        container = run("buildah", "from", *there, image, seconds=600).strip()
        try:
            said = run("buildah", "run", *more["RUN"], container, "--", *script, seconds=LONGEST)
        finally:
            run("buildah", "rm", container, seconds=600)
    else:
        words = ("run", "--rm", *there, *more["RUN"], "--entrypoint", script[0], image, *script[1:])
        said = run(builder, *words, seconds=LONGEST)
    user, machine_there, answer = said.split("\n", 2)
    assert (user, machine_there) == ("edgespec", MACHINES[machine])
    assert json.loads(answer)["new_tokens"] == 4
