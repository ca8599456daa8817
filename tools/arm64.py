#!/usr/bin/env python3
"""Run edgespec on an ARM core that QEMU emulates, and compare its tokens with this machine's.

    sudo make test-arm64

makes a Debian 12 for arm64 (debootstrap), installs the wheels for aarch64 there as `make stage`
does, and runs `edgespec doctor`, a ring of two processes in float64, the bundled pair in float64,
float32, int8, nf4 and int4, and the quick tests of the rooms that compute. Both machines have to
give the same token ids. The core is a Raspberry Pi 5's, of the generation of an Orin's.

The system stays in --folder, and a further run begins where the last one ended. What runs in it
sees no settings of this machine: this machine's pip, as it is set up, fetches and unpacks the
wheels, and the pip there finds them installed. Mounts end with each step; QEMU's entry in the
kernel's list of formats goes at the end, if it was made here. Exit code 77: something is missing,
which is named.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SUITE, PYTHON = "bookworm", "3.11"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,gcc,libc6-dev"
CORE = "cortex-a76"
FORMATS = Path("/proc/sys/fs/binfmt_misc")
ENTRY = Path("/usr/lib/binfmt.d/qemu-aarch64.conf")
TOOLS = ("debootstrap", "dpkg-deb", "qemu-aarch64-static", "unshare", "chroot", "git")
BESIDE = ("bitsandbytes", "gguf", "httpx", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
"""What the tests need beside `edgespec[stage]`."""
DESCRIBED_BY = ("setup.cfg", "pyproject.toml", "constraints.txt", "tools/install.sh")
SITE = f"opt/venv/lib/python{PYTHON}/site-packages"
LONGEST = 4 * 3600.0  # seconds of a step there: emulated, on two cores that others use too
LAST = 6000  # characters of what a program that failed has printed
MISSING = 77  # as automake has it: not run, and not failed

ROOMS = ("wire", "tree", "verify", "policy", "kernels", "model")
QUICK = "not slow and not thorough"
SETTINGS = {  # all that programs there are told
    "PATH": "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "QEMU_CPU": CORE,
    "OMP_NUM_THREADS": "1",
    "PIP_NO_INDEX": "1",
    "PYTHONPATH": "tests",
    "EDGESPEC_HTTP": "none",
    "HF_HUB_OFFLINE": "1",
    "CI": "true",
}
DEMO = (
    *("demo", "--stages", "2", "--dtype", "float64", "--quant", "none", "--raw", "--json"),
    *("--model", "edgespec/models/base", "--draft", "edgespec/models/draft"),
    *("--prompt", "Question: How many legs have 3 cats?\nAnswer:", "--max-new-tokens", "8"),
)

# pip, told that it runs there: what markers are compared with.
ELSEWHERE = """
import sys
from pip._vendor.packaging import markers
there = {**markers.default_environment(), "platform_machine": "aarch64",
         "python_version": "VERSION", "python_full_version": "VERSION.2"}
markers.default_environment = lambda: there
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""

# Token ids of the bundled pair by what it computes in; greedy, and drawn.
TOKENS = """
import json
from support.torch_rings import prompts, request, torch_ring
found = {}
for dtype, quant in (("float64", "none"), ("float32", "none"), ("float64", "int4"),
                     ("float32", "int8"), ("float32", "nf4"), ("float32", "int4")):
    ring = torch_ring(2, dtype, quant)
    for tag, (name, heat) in enumerate((("code-3", 0.0), ("gsm8k-test-3", 0.8)), start=1):
        ring.replies.clear()
        asked = request(prompts()[name], "adaptive", 16, tag=tag, temperature=heat, seed=7)
        found[f"{dtype} {quant} {name}"] = list(ring.ask(asked).token_ids)
print(json.dumps(found))
"""


class Failed(Exception):
    """What went wrong in a step."""


def missing(root: Path) -> list[str]:
    """What this machine lacks."""
    found = [f"the program {tool}" for tool in TOOLS if shutil.which(tool) is None]
    if platform.machine() == "aarch64":
        found.append("another processor: this one is an ARM core itself, so run `make test`")
    if os.geteuid():
        found.append("root: debootstrap, chroot and mounts need it (sudo make test-arm64)")
    elif not (FORMATS / "qemu-aarch64").exists() and not ENTRY.exists():
        found.append(f"QEMU's entry in {FORMATS}, or {ENTRY} of Debian's qemu-user-static")
    if not root.exists():
        try:
            urllib.request.urlopen(f"{MIRROR}/dists/{SUITE}/InRelease", timeout=20).close()
        except OSError as problem:
            found.append(f"Debian's packages at {MIRROR} ({problem})")
    return found


@contextlib.contextmanager
def emulation() -> Iterator[None]:
    """The kernel hands programs for ARM to QEMU; afterwards all is as before."""
    with contextlib.ExitStack() as stack:
        if not (FORMATS / "register").exists():
            run("mount", "-t", "binfmt_misc", "binfmt_misc", FORMATS)
            stack.callback(run, "umount", FORMATS)
        entry = FORMATS / "qemu-aarch64"
        if not entry.exists():
            (FORMATS / "register").write_bytes(ENTRY.read_bytes().strip())
            stack.callback(entry.write_text, "-1")
        yield


def run(
    *words: object,
    seconds: float = 600,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> str:
    """What a program prints. Raises Failed if it fails or takes too long."""
    command, pipe = [str(word) for word in words], subprocess.PIPE
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} took more than {seconds:.0f} s") from None
    if done.returncode:
        last = (done.stdout + done.stderr)[-LAST:]
        raise Failed(f"{command[0]} ended with exit code {done.returncode}\n{last}")
    return done.stdout


class System:
    """The Debian for arm64 in a folder."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.sources = self.root / "opt/edgespec"

    def make(self) -> None:
        """Unpack Debian, unless it is there. Nothing of it is configured: that would be emulated
        for long, and Python and the compiler run without."""
        if self.root.exists():
            return
        part = self.root.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        options = ("--arch=arm64", "--variant=minbase", "--foreign", f"--include={PACKAGES}")
        run("debootstrap", *options, SUITE, part, MIRROR, seconds=1800)
        for package in sorted((part / "var/cache/apt/archives").glob("*.deb")):
            run("dpkg-deb", "--extract", package, part)
            package.unlink()
        (part / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
        part.rename(self.root)

    def install(self) -> None:
        """Install edgespec as it is here, with wheels that this machine's pip fetches."""
        self.copy_sources()
        described = b"".join((REPOSITORY / name).read_bytes() for name in DESCRIBED_BY)
        stamp, now = self.root / "installed", hashlib.sha256(described).hexdigest()
        if stamp.exists() and stamp.read_text() == now:
            return
        self.unpack_wheels()
        words = ("/opt/venv", ".[stage]", "--no-build-isolation", *BESIDE)
        self.inside("tools/install.sh", *words)
        stamp.write_text(now)

    def copy_sources(self) -> None:
        """What git knows of, with its times, so that nothing is compiled twice."""
        listed = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
        git = ("git", "-c", f"safe.directory={REPOSITORY}", "-C", REPOSITORY)
        listing = run(*git, *listed).split("\0")
        # Links to folders are files to git: without them edgespec has no `cli` and no `daemon`.
        names = {
            name
            for name in listing
            if (REPOSITORY / name).is_file() or (REPOSITORY / name).is_symlink()
        }
        for old in self.sources.glob("*/**/*.py"):
            if str(old.relative_to(self.sources)) not in names:
                old.unlink()
        for name in names:
            copy = self.sources / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.unlink(missing_ok=True)  # a link is not copied over one
            shutil.copy2(REPOSITORY / name, copy, follow_symlinks=False)

    def unpack_wheels(self) -> None:
        """Of the versions that are pinned there. Emulated, it would take ten times as long."""
        cfg = configparser.ConfigParser(interpolation=None)
        cfg.read(REPOSITORY / "setup.cfg", encoding="utf-8")
        needed = [line for line in cfg["options"]["install_requires"].split("\n") if line]
        kinds = ["manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 37)), "linux"]
        options = [f"--platform={kind}_aarch64" for kind in kinds]
        options += ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp"]
        options += ["--target", str(self.root / SITE), "--upgrade", "--no-compile", "--quiet"]
        options += ["-c", str(REPOSITORY / "constraints.txt"), "--disable-pip-version-check"]
        code = ELSEWHERE.replace("VERSION", PYTHON)
        words = ("install", *options, *needed, *BESIDE, "setuptools")
        run(sys.executable, "-c", code, *words, seconds=1800)

    def inside(self, *words: str) -> str:
        """What a program of that system prints; its processes and mounts end with it."""
        # The shell stays, as the first process there: it waits for those whose parents have ended.
        script = (
            'cd "$0" && mount --rbind /dev dev && mount -t proc proc proc && '
            "mount -t sysfs sys sys && "
            'chroot . /usr/bin/env -C /opt/edgespec -i "$@"; exit "$?"'
        )
        settings = [f"{name}={value}" for name, value in SETTINGS.items()]
        namespaces = ("--mount", "--pid", "--fork", "--kill-child")
        command = ("unshare", *namespaces, "sh", "-c", script, self.root)
        return run(*command, *settings, *words, seconds=LONGEST)


def check_doctor(system: System) -> str:
    """Whether edgespec finds all that it needs there, and what it finds wrong."""
    said = json.loads(system.inside("edgespec", "doctor", "--json"))
    if not said["can_run"]:
        raise Failed(json.dumps(said, indent=1))
    wrong = [finding["name"] for finding in said["findings"] if finding["state"] != "ok"]
    return f"edgespec can run; {len(said['findings'])} findings, not ok: {', '.join(wrong)}"


def check_demo(system: System) -> str:
    """A ring of processes there and here."""
    there = json.loads(system.inside("edgespec", *DEMO))
    here = json.loads(run(Path(sys.executable).with_name("edgespec"), *DEMO, cwd=REPOSITORY))
    return same({"demo": there["token_ids"]}, {"demo": here["token_ids"]})


def check_tokens(system: System) -> str:
    """The pair in every kind of arithmetic, in one process there and here."""
    there = json.loads(system.inside("python", "-c", TOKENS))
    own = {**os.environ, "PYTHONPATH": "tests", "OMP_NUM_THREADS": "1"}
    here = json.loads(run(sys.executable, "-c", TOKENS, cwd=REPOSITORY, env=own))
    return same(there, here)


def same(there: dict[str, list[int]], here: dict[str, list[int]]) -> str:
    """What was compared. Raises Failed if token ids differ."""
    wrong = [
        f"{name}: {there.get(name)}, here {here[name]}"
        for name in here
        if there.get(name) != here[name]
    ]
    if wrong:
        raise Failed("other token ids than here:\n" + "\n".join(wrong))
    return f"{len(here)} of {len(here)} answers have the token ids of {platform.machine()}"


def check_tests(system: System) -> str:
    """The quick tests of the rooms that compute."""
    words = ("python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", QUICK)
    rooms = [f"tests/{room}" for room in ROOMS]
    return system.inside(*words, *rooms).strip().splitlines()[-1]


def step(name: str, work: Callable[[], str | None]) -> None:
    """Do it, and say what came of it and how long it took."""
    began = time.monotonic()
    print(f"{name}: ", end="", flush=True)
    said = work() or "ready"
    print(f"{said} ({time.monotonic() - began:.0f} s)", flush=True)


def main() -> None:
    """Every check, however the one before it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPOSITORY / "build" / "arm64",
        help="where the emulated system stays (default: build/arm64)",
    )
    system = System(parser.parse_args().folder.resolve())
    if lacking := missing(system.root):
        print("Not run. Missing here: " + "; ".join(lacking), file=sys.stderr)
        sys.exit(MISSING)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    failed = []
    with emulation():
        try:
            step("Debian", system.make)
            step("edgespec", system.install)
        except Failed as problem:
            sys.exit(f"failed: {problem}")
        for check in (check_doctor, check_demo, check_tokens, check_tests):
            name = check.__name__.removeprefix("check_")
            try:
                step(name, lambda check=check: check(system))  # type: ignore[misc]
            except Failed as problem:
                print(f"failed: {problem}", flush=True)
                failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
